"""Submit, list and cancel jobs with sbatch, salloc, squeue and scancel.

Privileges: the user.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vtorque_core.api import UsageError, printable
from vtorque_core.api.batch_system import JobInfo, Needs, SubmitArgs
from vtorque_core.api.directives import strip_pbs_vm, vm_directives
from vtorque_core.api.submission import exec_command, to_token
from vtorque_slurm import (
    gres,
    hostlist,
    options,
    pbs_options,
    request_channel,
    resources,
    script,
)
from vtorque_slurm.added_options import additions, bare_components
from vtorque_slurm.options import CommandLine
from vtorque_slurm.resources import SlurmRequest
from vtorque_slurm.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.batch_system import Submitter
    from vtorque_core.api.node_job import Site
    from vtorque_core.api.strategies import StepOf

MAX_SCRIPT = 4 << 20  # bytes; Slurm's own limit, SchedulerParameters=max_script_size
STDIN = "/dev/stdin"
REQUEST = "--request"
NONE = "none"

_WRAP = "#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{}\n\n"  # as sbatch does
_ONE_TASK = ("--nodes=1", "--ntasks=1", "--relative=0", "--overlap")
_FIELDS = "%A|%i|%u|%t|%M|%N|%r|%j"  # squeue(1), --format; the name comes last: it may be any text
_RUNNING = ("R", "CG", "CF", "S")


class SlurmSubmitter:
    """Implementation of :class:`vtorque_core.api.batch_system.Submitter` for Slurm."""

    naming = "-J"

    def __init__(self, settings: Settings, jobshell: Path) -> None:
        self._settings = settings
        self._jobshell = jobshell

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Parse sbatch's command line, and read the script that sbatch would use.

        With ``--request`` (from the SPANK plugin), parse ``-vm`` options instead. If a key is
        repeated, its last value applies.
        """
        if list(argv[:1]) == [REQUEST]:
            return SubmitArgs((merge_vm(argv[2::2]),), (REQUEST,))
        line = options.split(argv, self._settings.options)
        pbs_options.refuse(line)
        rest = (*line.words, *line.operands)
        if _is_sbatchs(line):
            return SubmitArgs(line.vm, rest, interactive=line.interactive)
        found: tuple[str, ...] = ()
        if line.interactive:
            if line.operands:
                raise UsageError(
                    f"{printable(line.operands[0])}: -I starts a shell and takes no command"
                )
            if line.more:
                raise UsageError("-I: a heterogeneous job of virtual machines needs a script")
            given = self._parse_request(line, b"")
            content, name = None, None
        else:
            name = line.operands[0] if line.operands else None
            content = _read(line)
            found = vm_directives(content)
            given = self._parse_request(line, content)
        return SubmitArgs(
            vm=line.vm,
            rest=rest,
            script=name,
            content=content,
            interactive=line.interactive,
            vcpus_given=resources.cpus_per_node(given),
            mib_given=resources.mib_per_node(given),
            directives=found,
            facts=resources.facts(given),
            resources_given=gres.requested_gres(given),
            nodes_given=resources.least_nodes(given),
        )

    def submit(self, args: SubmitArgs, blob: bytes | None, needs: Needs | None) -> int:
        """Replace this process with sbatch or salloc.

        With ``--request``, instead print the request, and the CPUs and MiB per node (0 means
        Slurm's default).
        """
        if args.rest == (REQUEST,):
            if blob is not None and needs is not None:
                sys.stdout.write(f"{to_token(blob)} {needs.cpus} {needs.mib or 0}\n")
            return 0
        return self._submit(args, blob, needs)

    def _submit(self, args: SubmitArgs, blob: bytes | None, needs: Needs | None) -> NoReturn:
        flag = ["-I"] if args.interactive else []
        line = options.split([*flag, *args.rest], self._settings.options)
        if _is_sbatchs(line):
            self._exec_command(["salloc" if args.interactive else "sbatch", *args.rest])
        if args.interactive:
            if blob is not None and not line.has_option("x11"):
                os.environ["DISPLAY"] = ""  # the job shell must use only the display of --x11
            self._exec_command(self.interactive(line, blob, needs))
        content = args.content or b""
        self._exec_command(*self.batch(line, content, blob, needs))

    def batch(
        self, line: CommandLine, content: bytes, blob: bytes | None, needs: Needs | None
    ) -> tuple[list[str], bytes | None]:
        """Return the sbatch command and its standard input.

        For a bare-metal job, the command is the user's. For any job, ``#PBS -vm`` lines are removed
        from the script, because sbatch rejects them.
        """
        body = strip_pbs_vm(content)
        given, *others = self._components(line, content)
        added: list[str] = []
        bare: list[str] = []
        if blob is None or needs is None:
            if body == content and (line.operands or line.has_option("wrap")):
                return ["sbatch", *line.words, *line.operands], None
        else:
            word = to_token(blob)
            extra = b""
            if _has_files(blob) or not request_channel.fits_comment(
                given.last_value("comment"), word
            ):
                extra = request_channel.LINE + word.encode() + b"\n"
                word = request_channel.IN_SCRIPT
            if others:  # sbatch would request the memory for each component
                needs = replace(needs, mib=None)
            added = additions(given, needs, word, self._settings)
            bare = bare_components(given, others, needs, self._settings.feature)
            if script.looks_like_script(body):  # otherwise sbatch reports an error
                body = b"#!" + os.fsencode(self._jobshell) + b"\n" + extra + body
        if not given.has_option("job-name") and "job-name" not in given.others:
            if line.has_option("wrap"):
                added.insert(0, "--job-name=wrap")
            elif line.operands:
                added.insert(0, f"--job-name={Path(line.operands[0]).name}")
        # Only if the script has arguments. Without operands, sbatch reads standard input.
        operands = ["--", STDIN, *line.operands[1:]] if line.operands[1:] else []
        return [
            "sbatch",
            *line.plain,
            *added,
            *(bare or _further_components(line)),
            *operands,
        ], body

    def interactive(self, line: CommandLine, blob: bytes | None, needs: Needs | None) -> list[str]:
        """Return the command for ``-I``: an allocation with the job shell on its first node."""
        srun = [self.program("srun"), "--pty", *_ONE_TASK]
        if blob is None or needs is None:
            shell = os.environ.get("SHELL") or "/bin/sh"
            return ["salloc", *line.plain, "--", *srun, shell, "-i"]
        if _has_files(blob):
            raise UsageError(
                "-I: vm_prologue and vm_epilogue would be in the job's comment, which all users "
                "can read: submit a script, or leave them out"
            )
        word = to_token(blob)
        added = additions(self._parse_request(line, b""), needs, word, self._settings)
        return ["salloc", *line.plain, *added, "--", *srun, str(self._jobshell)]

    def jobs(self) -> Iterable[JobInfo]:
        """Return the jobs that squeue lists, one for each task of an array.

        A random word separates squeue's records, because job names may contain line ends.
        """
        word = secrets.token_hex(16)
        argv = [self.program("squeue"), "--noheader", "--array", f"--format={word}{_FIELDS}"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
        if done.returncode != 0:
            raise UsageError(f"squeue ended with exit code {done.returncode}")
        return _infos(done.stdout.decode("utf-8", "replace").split(word)[1:])

    def cancel(self, job_id: str) -> int:
        """Run scancel and return its exit status."""
        argv = [self.program("scancel"), "--", job_id]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode

    def step(self, job_id: str, node: str, command: Sequence[str], terminal: bool) -> list[str]:
        """Return an srun command line that runs ``command`` beside the job's other steps.

        The options override the user's SLURM_ variables, which srun reads.
        """
        group = ("--het-group=0",) if self._is_heterogeneous(job_id) else ()
        which = (f"--jobid={job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap")
        plain = (
            "--mpi=none",
            "--quiet",
            "--unbuffered",
            "--chdir=/",
            "--export=TERM,NO_COLOR,VTORQUE_TASK=host",
        )
        pty = ("--pty",) if terminal else ()
        return [self.program("srun"), *which, *group, *plain, *pty, *command]

    def _is_heterogeneous(self, job_id: str) -> bool:
        argv = [self.program("squeue"), "--noheader", f"--jobs={job_id}", "--format=%i"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        return b"+" in done.stdout

    def _parse_request(self, line: CommandLine, content: bytes) -> SlurmRequest:
        return self._components(line, content)[0]

    def _components(self, line: CommandLine, content: bytes) -> list[SlurmRequest]:
        prefix = "SALLOC" if line.interactive else "SBATCH"
        lines = [line, *line.more]
        scripts = script.components(content, options.SBATCH.add_options(self._settings.options))
        lines += lines[-1:] * (len(scripts) - len(lines))
        scripts += [CommandLine()] * (len(lines) - len(scripts))
        found = [
            SlurmRequest(on_line, os.environ, in_script, prefix)
            for on_line, in_script in zip(lines, scripts, strict=True)
        ]
        if found[0].has_option("ignore-pbs"):
            return found
        return [replace(each, others=script.options_of_dialects(content)) for each in found]

    def program(self, name: str) -> str:
        """Return the path of a Slurm command."""
        where = self._settings.bindir
        found = str(Path(where, name)) if where else shutil.which(name)
        if found is None or not os.access(found, os.X_OK):
            raise UsageError(f"{found or name} was not found: set [plugin.slurm] bindir")
        return found

    def _exec_command(self, argv: Sequence[str], stdin: bytes | None = None) -> NoReturn:
        os.environ.pop("VTORQUE_SLURM_SBATCH", None)  # see qsub
        exec_command([self.program(argv[0]), *argv[1:]], stdin)


def merge_vm(values: Sequence[str]) -> str:
    """Merge several values of ``-vm`` into one.

    If several pairs (``KEY=VALUE``) have one key, the last of them applies. ``none`` replaces all
    earlier pairs, and a later pair replaces ``none``.
    """
    pairs: dict[str, str] = {}
    for word in (word.strip() for value in values for word in value.split(",")):
        if word == NONE or NONE in pairs:
            pairs.clear()
        pairs[word.partition("=")[0].strip()] = word
    return ",".join(pairs.values())


def _further_components(line: CommandLine) -> list[str]:
    return [word for each in line.more for word in (options.COLON, *each.plain)]


def _has_files(blob: bytes) -> bool:
    """Return whether a request contains the user's files, and must be hidden from other users.

    ``blob`` is JSON text without blanks.
    """
    return b'"files":{}' not in blob


def _is_sbatchs(line: CommandLine) -> bool:
    return line.has_option("help", "usage", "version") or (
        line.has_option("wrap") and bool(line.operands)
    )


def _read(line: CommandLine) -> bytes:
    wrap = line.last_value("wrap")
    if wrap is not None:
        return os.fsencode(_WRAP.format(wrap))
    return read_script(line.operands[0] if line.operands else None)


def read_script(name: str | None) -> bytes:
    """Return a script's content. ``name`` is looked up as by sbatch; None means standard input."""
    try:
        if name is None:
            content = sys.stdin.buffer.read(MAX_SCRIPT + 1)
        else:
            with open(_find(name), "rb", opener=_open_at_once) as file:
                content = file.read(MAX_SCRIPT + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"Unable to open file {printable(name or 'stdin')}: {reason}") from None
    if len(content) > MAX_SCRIPT:
        raise UsageError(f"the script is longer than {MAX_SCRIPT >> 20} MiB")
    return content


def _find(name: str) -> str:
    """Return the script's path. Like sbatch, look up a plain name in PATH, too."""
    if "/" in name or Path(name).exists():
        return name
    return shutil.which(name) or name


def _open_at_once(path: str, flags: int) -> int:
    # A FIFO without a writer would block forever, open(2).
    return os.open(path, flags | os.O_NONBLOCK)


def _infos(records: Iterable[str]) -> Iterable[JobInfo]:
    for record in records:
        raw, shown, owner, state, elapsed, nodes, reason, name = record.split("|", 7)
        job_id = raw if state in _RUNNING else shown
        name = printable(name.removesuffix("\n"), 200)
        reason = "" if reason == "None" else reason
        each = _hosts(nodes) if state in ("R", "CF") else ()
        called = "" if shown == job_id or "+" in shown else shown
        yield JobInfo(
            job_id, name, owner, state, nodes, _parse_elapsed(elapsed), reason, each, called
        )


def _hosts(nodes: str) -> tuple[str, ...]:
    try:
        return hostlist.expand(nodes) if nodes else ()
    except ValueError:
        return ()


def _parse_elapsed(text: str) -> float:
    days, _, clock = text.rpartition("-")
    total = 0
    try:
        for part in clock.split(":"):
            total = total * 60 + int(part)
        return total + 86400.0 * int(days or 0)
    except ValueError:
        return 0.0


def create_submitter(site: Site) -> Submitter:
    """Return the submitter for the site's command: sbatch, or Slurm's qsub."""
    sbatch = SlurmSubmitter(site[Settings], site.paths.jobshell)
    if site[Settings].command == "sbatch":
        return sbatch
    from vtorque_slurm.qsub import QsubSubmitter, is_inner  # noqa: PLC0415 - imports this module

    return sbatch if is_inner() else QsubSubmitter(sbatch)


def step(site: Site) -> StepOf:
    """Return :meth:`SlurmSubmitter.step`, with which ``vmgr`` runs commands on a job's node."""
    return SlurmSubmitter(site[Settings], site.paths.jobshell).step
