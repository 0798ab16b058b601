"""Example of a complete batch adapter, described in ``doc/plugins.md`` and run by the tests.

The batch system "acme" is fictional:

- Users submit with ``acmesub [-n NAME] [-c CPUS] [-m MIB] [-k NOTE] [-a JOBS] [-N NODES] [-i]
  SCRIPT [ARGUMENT...]``.
- The option ``-S PROGRAM`` of acmesub starts PROGRAM with the script and its arguments.
- ``acmestat`` lists the existing jobs.
- Root's hook gets all its information from environment variables.
"""

from __future__ import annotations

import getopt
import itertools
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_admin.steps import ReplacedFile, hook_script
from vtorque_core.api import BatchSystem, HostFault, Refused, UsageError, setting
from vtorque_core.api.batch_system import (
    BatchJob,
    JobInfo,
    JobShell,
    JobState,
    Needs,
    NodeAdapter,
    Outcome,
    PeerGuest,
    ShellStart,
    SubmitArgs,
)
from vtorque_core.api.directives import vm_directives
from vtorque_core.api.guest_context import ContextItem, EnvVar
from vtorque_core.api.kept_records import Usage
from vtorque_core.api.node_job import Site
from vtorque_core.api.setup_steps import Installation, SetupStep
from vtorque_core.api.submission import from_token, to_token

OPTIONS = "n:c:m:k:a:N:iS:"
MAX_NOTE = 60_000  # characters of a note


@dataclass(frozen=True)
class Settings:
    """Settings of acme: ``[plugin.acme]``."""

    acmesub: str = setting("/usr/bin/acmesub", doc="the submit command")
    acmestat: str = setting("/usr/bin/acmestat", doc="the command that lists jobs")
    hooks: str = setting("/etc/acme/prolog.d", doc="directory of root's hooks")


class AcmeSubmitter:
    """Submitter of acme: :class:`vtorque_core.api.batch_system.Submitter`."""

    naming = "-n"

    def __init__(self, site: Site) -> None:
        self._settings, self._jobshell = site[Settings], site.paths.jobshell

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Extract ``-vm VALUE`` from the options; all other words are for acmesub."""
        words, vm, rest = iter(argv), [], list[str]()
        for word in words:
            if word == "-vm":
                vm.append(next(words, ""))
                continue
            rest.append(word)
            if not word.startswith("-"):
                break
            if word[1:] and f"{word[1:]}:" in OPTIONS:
                rest += itertools.islice(words, 1)
        rest += words
        options, operands = options_of(rest)
        content = b""
        if operands:
            try:
                content = Path(operands[0]).read_bytes()
            except OSError as error:
                raise UsageError(f"{operands[0]}: {error.strerror}") from None
        return SubmitArgs(
            tuple(vm),
            tuple(rest),
            script=operands[0] if operands else None,
            interactive="-i" in options,
            vcpus_given=int(options["-c"]) if "-c" in options else None,
            mib_given=int(options["-m"]) if "-m" in options else None,
            directives=vm_directives(content),
        )

    def submit(self, args: SubmitArgs, blob: bytes | None, needs: Needs | None) -> int:
        """Submit with ``-S`` for the job shell, and append the request to the value of ``-k``."""
        extra: list[str] = []
        if blob is not None:
            note = f"{options_of(args.rest)[0].get('-k', '')} {to_token(blob)}".lstrip()
            if len(note) > MAX_NOTE:
                raise Refused(f"note and request have {len(note)} characters (limit: {MAX_NOTE})")
            extra = ["-S", str(self._jobshell), "-k", note]
        place = len(args.rest) - len(options_of(args.rest)[1])
        words = [*args.rest[:place], *extra, *args.rest[place:]]
        return subprocess.run([self._settings.acmesub, *words], check=False).returncode

    def jobs(self) -> Iterable[JobInfo]:
        """Return the existing jobs; acmestat prints only their ids."""
        return [JobInfo(each, "", "", "R") for each in _alive(self._settings) or ()]

    def cancel(self, job_id: str) -> int:
        """Cancel a job with acmekill."""
        return subprocess.run(["acmekill", "--", job_id], check=False).returncode


class AcmeNode(NodeAdapter):
    """Node adapter of acme: :class:`vtorque_core.api.batch_system.NodeAdapter`."""

    def __init__(self, site: Site) -> None:
        self._settings = site[Settings]

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Read the job from the environment of the hook."""
        try:
            job_id, owner, node = (environ[f"ACME_{name}"] for name in ("JOB", "USER", "NODE"))
            nodes = tuple(environ["ACME_NODES"].split(","))
        except KeyError as error:
            raise HostFault(f"{error.args[0]} is not set: acme did not start this hook") from None
        blob, bad = None, ""
        token = environ.get("ACME_NOTE", "").rpartition(" ")[2]
        if token.startswith("vt1:"):
            try:
                blob = from_token(token)
            except Refused as error:
                blob, bad = b"", str(error)
        return BatchJob(job_id, owner, node, nodes, blob, bad_request=bad, name="acme")

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Set ACME_NODES to the names of the guests."""
        yield EnvVar("ACME_NODES", ",".join(guest.hostname for guest in guests))

    def finish(self, job: BatchJob, outcome: Outcome, reason: str, *, hook_waits: bool) -> int:
        """Fail the hook only after a host fault; acme then starts the job on another node."""
        return 1 if outcome is Outcome.HOST_FAULT else 0

    def job_states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """Return the states of jobs according to acmestat."""
        found = _alive(self._settings)
        if found is None:
            return dict.fromkeys(ids, JobState.UNKNOWN)
        return {each: JobState.ALIVE if each in found else JobState.GONE for each in ids}

    def mark(self, healthy: bool, reason: str) -> None:
        """Do nothing, because acme has no node properties."""

    def account(self, job_id: str, usage: Usage) -> None:
        """Do nothing, because acme has no accounting."""

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """Return a step that installs the hook, which ignores jobs without a request."""
        guard = "case ${ACME_NOTE-} in *vt1:*) ;; *) exit 0 ;; esac"
        content = hook_script(guard, f'exec {shlex.join(place.hook("prologue"))} "$@"')
        return [ReplacedFile(Path(self._settings.hooks, "vtorque"), content)]


class AcmeShell(JobShell):
    """Job shell of acme: :class:`vtorque_core.api.batch_system.JobShell`."""

    host_only = frozenset({"ACME_SOCKET"})
    login = False

    def read_start(
        self, argv: Sequence[str], environ: Mapping[str, str], stdin: int | None
    ) -> ShellStart:
        """Read the script and its arguments from ``argv``."""
        if "ACME_JOB" not in environ or not argv:
            raise UsageError("ACME_JOB is not set: this program is started by acme")
        return ShellStart(environ["ACME_JOB"], Path(argv[0]), tuple(argv[1:]))

    def content(self, script: bytes) -> bytes:
        """Return the script unchanged, because acme stores it unchanged."""
        return script

    def node_command(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return acme's command that runs ``command`` on the nodes of a job."""
        return ["acmerun", "--", *command]


ACME = BatchSystem("acme", AcmeSubmitter, AcmeNode, AcmeShell)


def options_of(rest: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split acmesub's command line into options and operands. Raises UsageError."""
    try:
        options, operands = getopt.getopt(list(rest), OPTIONS)
    except getopt.GetoptError as error:
        raise UsageError(str(error)) from None
    return dict(options), operands


def _alive(settings: Settings) -> list[str] | None:
    done = subprocess.run([settings.acmestat], capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else None
