"""A whole batch adapter and its harness: the example of ``doc/plugins.md``, run by the tests.

The batch system "acme" is made up. Its users submit with
``acmesub [-n NAME] [-c CPUS] [-m MIB] [-k NOTE] [-a JOBS] [-N NODES] [-i] SCRIPT [ARGUMENT...]``,
its option ``-S PROGRAM`` starts PROGRAM with the script and its arguments, ``acmestat`` lists the
jobs there are, and root's hook has all it needs in its environment.
"""

from __future__ import annotations

import getopt
import itertools
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api.batch_system import (
    BatchJob,
    JobInfo,
    JobShell,
    Life,
    Needs,
    NodeAdapter,
    Outcome,
    PeerGuest,
    Started,
    SubmitArgs,
    Usage,
)
from vtorque_core.api.directives import vm_directives
from vtorque_core.api.guest_context import ContextItem, EnvVar
from vtorque_core.api.node_job import Site
from vtorque_core.api.setup_steps import Installation, ReplacedFile, SetupStep, hook_script
from vtorque_core.api.strategies import BatchSystem
from vtorque_core.api.submission import from_token, to_token
from vtorque_core.base.errors import HostFault, Refused, UsageError
from vtorque_core.base.names import Paths
from vtorque_core.base.record import setting
from vtorque_testing.commands import RecordingCommand
from vtorque_testing.harness import (
    Dialect,
    Ended,
    HookCall,
    OwnValue,
    PluginSite,
    ShellCall,
    StartedJob,
    Submission,
)

OPTIONS = "n:c:m:k:a:N:iS:"
MAX_NOTE = 60_000  # characters of a note

# -- the adapter --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """``[plugin.acme]``."""

    acmesub: str = setting("/usr/bin/acmesub", doc="the submit command")
    acmestat: str = setting("/usr/bin/acmestat", doc="lists the jobs there are")
    hooks: str = setting("/etc/acme/prolog.d", doc="directory of root's hooks")


class AcmeSubmitter:
    """See :class:`vtorque_core.api.batch_system.Submitter`."""

    def __init__(self, site: Site) -> None:
        self._settings, self._jobshell = site[Settings], site.paths.jobshell

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Take ``-vm VALUE`` out of the options; the rest is acmesub's."""
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
        options, operands = _options(rest)
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
        """Add the job shell and the request, at the end of the user's note."""
        extra: list[str] = []
        if blob is not None:
            note = f"{_options(args.rest)[0].get('-k', '')} {to_token(blob)}".lstrip()
            if len(note) > MAX_NOTE:
                raise Refused(f"note and request have {len(note)} characters (limit: {MAX_NOTE})")
            extra = ["-S", str(self._jobshell), "-k", note]
        place = len(args.rest) - len(_options(args.rest)[1])
        words = [*args.rest[:place], *extra, *args.rest[place:]]
        return subprocess.run([self._settings.acmesub, *words], check=False).returncode

    def jobs(self) -> Iterable[JobInfo]:
        """Return the jobs, of which acmestat tells only the ids."""
        return [JobInfo(each, "", "", "R") for each in _alive(self._settings) or ()]

    def cancel(self, job_id: str) -> int:
        """Cancel a job."""
        return subprocess.run(["acmekill", "--", job_id], check=False).returncode


class AcmeNode(NodeAdapter):
    """See :class:`vtorque_core.api.batch_system.NodeAdapter`."""

    def __init__(self, site: Site) -> None:
        self._settings = site[Settings]

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Read the hook's environment."""
        try:
            job_id, owner, node = (environ[f"ACME_{name}"] for name in ("JOB", "USER", "NODE"))
            nodes = tuple(environ["ACME_NODES"].split(","))
        except KeyError as error:
            raise HostFault(f"{error.args[0]} is not set: not a hook of acme's") from None
        blob, bad = None, ""
        token = environ.get("ACME_NOTE", "").rpartition(" ")[2]
        if token.startswith("vt1:"):
            try:
                blob = from_token(token)
            except Refused as error:
                blob, bad = b"", str(error)
        return BatchJob(job_id, owner, node, nodes, blob, bad_request=bad, name="acme")

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Name the guests."""
        yield EnvVar("ACME_NODES", ",".join(guest.hostname for guest in guests))

    def finish(self, job: BatchJob, outcome: Outcome, reason: str) -> int:
        """Acme starts a job elsewhere when its hook fails, and only then."""
        return 1 if outcome is Outcome.HOST_FAULT else 0

    def alive(self, ids: Sequence[str]) -> Mapping[str, Life]:
        """Ask acmestat."""
        found = _alive(self._settings)
        if found is None:
            return dict.fromkeys(ids, Life.UNKNOWN)
        return {each: Life.ALIVE if each in found else Life.GONE for each in ids}

    def mark(self, healthy: bool, reason: str) -> None:
        """Do nothing: acme has no properties of nodes."""

    def account(self, job_id: str, usage: Usage) -> None:
        """Do nothing: acme has no accounting."""

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """One hook, which ends at once for a job without a request."""
        guard = "case ${ACME_NOTE-} in *vt1:*) ;; *) exit 0 ;; esac"
        content = hook_script(guard, f'exec {shlex.join(place.hook("prologue"))} "$@"')
        return [ReplacedFile(Path(self._settings.hooks, "vtorque"), content)]


class AcmeShell(JobShell):
    """See :class:`vtorque_core.api.batch_system.JobShell`."""

    host_only = frozenset({"ACME_SOCKET"})
    login = False

    def started(
        self, argv: Sequence[str], environ: Mapping[str, str], stdin: int | None
    ) -> Started:
        """Read the arguments: the script and its own."""
        if "ACME_JOB" not in environ or not argv:
            raise UsageError("ACME_JOB is not set: this program is started by acme")
        return Started(environ["ACME_JOB"], Path(argv[0]), tuple(argv[1:]))

    def content(self, script: bytes) -> bytes:
        """Acme keeps scripts as they are."""
        return script

    def on_every_node(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return acme's own way to run a command on a job's nodes."""
        return ["acmerun", "--", *command]


ACME = BatchSystem("acme", AcmeSubmitter, AcmeNode, AcmeShell)


def _options(rest: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    try:
        options, operands = getopt.getopt(list(rest), OPTIONS)
    except getopt.GetoptError as error:
        raise UsageError(str(error)) from None
    return dict(options), operands


def _alive(settings: Settings) -> list[str] | None:
    done = subprocess.run([settings.acmestat], capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else None


# -- its harness --------------------------------------------------------------------------------


class AcmeHarness:
    """See :class:`vtorque_testing.harness.BatchHarness`."""

    system = ACME
    dialect = Dialect(
        options=("-n", "name", "-k", "a note"),
        directive="# acme reads no scripts",
        unknown="-z",
        arguments=lambda script, words: [script, *words],
        share=lambda cpus, mib: ["-c", str(cpus), "-m", str(mib)],
        exits={outcome: int(outcome is Outcome.HOST_FAULT) for outcome in Outcome},
        carries=40_000,
        permutes=False,
        takes_stdin=False,
        array=("-a", "2"),
        two_nodes=("-N", "2"),
        interactive=("-i",),
        own=(OwnValue(("-k", "my own"), lambda job: _note(job).startswith("my own")),),
    )

    def __init__(self, root: Path) -> None:
        self.directory, self._spool, self._hooks = root / "home", root / "spool", root / "etc"
        for path in (self.directory, self._spool, self._hooks, root / "bin"):
            path.mkdir()
        (self._hooks / "vtorque").write_text("#!/bin/sh\n# the site's own hook of that name\n")
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(self.directory)}
        self._acmesub = RecordingCommand(root / "bin/acmesub")
        self._acmestat, self._jobs = root / "bin/acmestat", list[str]()
        settings = Settings(str(root / "bin/acmesub"), str(self._acmestat), str(self._hooks))
        self.site = PluginSite(Paths(jobshell=root / "libexec/vtorque-jobshell"), (settings,))
        self._numbers = itertools.count(1)
        self.serve(True)

    def received(self) -> Submission | None:
        """Return the last call of acmesub."""
        calls = self._acmesub.calls()
        if not calls:
            return None
        call, number = calls[-1], next(self._numbers)
        content = next(iter(call.files.values()), None)
        if content is not None:
            (self._spool / str(number)).write_bytes(content)
        self._jobs += [str(number), f"{number}.0", f"{number}.1"]
        self.serve(True)
        return Submission(str(number), call.argv, call.environ, content)

    def answer(self, ended: Ended) -> bool:
        """Have acmesub say so."""
        self._acmesub.answer(ended)
        return True

    def start(
        self, job: Submission, *, nodes: int = 1, element: int = 0, forged: str | None = None
    ) -> StartedJob:
        """Do what acme does with a job."""
        options, operands = _options(job.argv)
        job_id = f"{job.job_id}.{element}" if "-a" in options else job.job_id
        names = [f"n{i}" for i in range(1, nodes + 1)]
        environ = {"ACME_JOB": job_id, "ACME_USER": "ada", "ACME_NODES": ",".join(names)}
        environ["ACME_NOTE"] = _note(job) if forged is None else forged
        node = AcmeNode(self.site)
        hooks = [HookCall(node, (), environ | {"ACME_NODE": name}) for name in names]
        argv = (str(self._spool / job.job_id), *operands[1:])
        return StartedJob(tuple(hooks), ShellCall(argv, environ, None))

    def end(self, job: Submission) -> None:
        """Forget the job."""
        self._jobs.remove(job.job_id)
        self.serve(True)

    def serve(self, up: bool) -> None:
        """Make acmestat answer or fail."""
        words = " ".join(self._jobs)
        self._acmestat.write_text(f"#!/bin/sh\necho {words}\n" if up else "#!/bin/sh\nexit 1\n")
        self._acmestat.chmod(0o755)

    def setup_root(self) -> Path | None:
        """Return the directory of the hooks."""
        return self._hooks


def _note(job: Submission) -> str:
    return _options(job.argv)[0].get("-k", "")
