"""Run a command on a job's node, through the batch system or through the job itself."""

from __future__ import annotations

import functools
import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TextIO

from vtorque_core.api import (
    BatchSystem,
    HostFault,
    Refused,
    UsageError,
    VtorqueError,
    kept_records,
    name_errors,
    printable,
)
from vtorque_core.api.batch_system import JobInfo
from vtorque_core.api.node_job import Site
from vtorque_core.live import kept_jobs, service
from vtorque_login import gathered, state
from vtorque_login.settings import Settings

_ENDED = frozenset({"C", "CG", "E", "F", "X"})  # qstat(1B), squeue(1): its script has ended
_MOST = 1 << 20  # bytes of a line that are shown
RUNUSER = "/usr/sbin/runuser"  # util-linux; runuser(1)
# runuser(1) stops when its child stops. Do not set no_new_privs: PBS's clients need setuid pbs_iff.
_DIES_WITH_US = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "--")


@dataclass(frozen=True)
class RemoteCommand:
    """A vmgr command about a job.

    Attributes:
        command: The command's name, such as ``ssh``.
        job_id: As the user wrote it.
        node: Node of the job; empty for the first.
        options: By parameter name, the words of each given option, such as ``["--level=info"]``.
        operands: By parameter name, the words that follow the job id.
        terminal: True if the command needs a terminal and the user has one.
        output: File for the command's output.
        reads: True if the command reads standard input. Otherwise nothing may read standard input,
            which may belong to a loop such as ``while read id``.
    """

    command: str
    job_id: str
    node: str
    options: Mapping[str, Sequence[str]]
    operands: Mapping[str, Sequence[str]]
    terminal: bool
    output: Path | None = None
    reads: bool = False

    def line(self, *more: str) -> list[str]:
        """Return vmgr's arguments: command, ``more``, options, ``--``, job id, operands."""
        options = [word for given in self.options.values() for word in given]
        operands = [word for given in self.operands.values() for word in given]
        return [self.command, *more, *options, "--", self.job_id, *operands]


def run(asked: RemoteCommand, config: Path) -> int | None:
    """Run the command on the job's node.

    Return its exit code, or None if the command must run on this host, for example because the
    job has ended.

    Raises:
        Refused: The job has not started.
        UsageError: The node does not belong to the job.
        HostFault: The node is unreachable.
    """
    whose = None if os.geteuid() == 0 else os.getuid()
    kept = kept_records.find(service.paths(config), asked.job_id, whose)
    if not asked.job_id:
        return None
    if _can_run_here(kept, asked):
        if whose is not None or kept[-1].uid == 0 or asked.command != "ssh":
            return None
        return _run_as_owner(
            asked, str(kept[-1].facts().get("owner")), config
        )  # the owner has the key
    try:
        site, batch = service.batch_system(config)
        meant = _select_jobs(batch.submitter(site).jobs(), asked.job_id)
    except VtorqueError as error:
        if asked.node and kept and "ended" not in kept[-1].facts():
            raise  # the records on this host are of another part of the job
        if not kept and not _has_records(config, asked.job_id):
            sys.stderr.write(f"vmgr: {error}\n")
        return None
    running = [job for job in meant if job.nodes]
    if running:
        return _run_for_running(asked, running, site, batch, config)
    _check_ended(meant, asked.job_id, config)
    return None


def _run_for_running(
    asked: RemoteCommand, jobs: Sequence[JobInfo], site: Site, batch: BatchSystem, config: Path
) -> int | None:
    job = jobs[0]
    several = len(jobs) > 1 or len(job.nodes) > 1 or not _is_named(job, asked.job_id)
    of_all = several and not asked.node and gathered.reads_all_nodes(asked.command, asked.options)
    if not of_all or job.owner == "root":
        asked = replace(asked, job_id=job.id)
    if os.geteuid() == 0 and job.owner != "root":
        return _run_as_owner(asked, job.owner, config)
    if of_all and os.geteuid() != 0:  # root reads no records from other nodes (live.kept)
        nodes = [(each.id, node) for each in jobs for node in each.nodes if not _is_this(node)]
        gathered.fetch_records(nodes, config, site[Settings].answer_timeout)
        return None
    node = _node(asked, job, site, config)
    if _is_this(node):
        return None
    _print_to(asked.output)
    return _run_on_node(asked, job, node, site, batch, config)


def _check_ended(meant: Sequence[JobInfo], wanted: str, config: Path) -> None:
    """Raise Refused if one of the jobs has not ended.

    A whole array is accepted although some tasks have not ended, if this host has records of the
    array: the command then uses the records of the tasks that have ended.
    """
    for job in meant:
        one = _is_named(job, wanted) and "[]" not in wanted
        if job.state not in _ENDED and (one or not _has_records(config, wanted)):
            reason = f", reason: {printable(job.reason)}" if job.reason else ""
            raise Refused(
                f"job {printable(job.id)} is not running on a node: its state is "
                f"{job.state}{reason}"
            )


def _run_on_node(
    asked: RemoteCommand, job: JobInfo, node: str, site: Site, batch: BatchSystem, config: Path
) -> int:
    if not asked.reads:
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
    step = batch.step(site) if batch.step is not None else None
    if step is not None:
        argv = service.vmgr(config, *asked.line("--here"))
        return _call(step(job.id, node, argv, asked.terminal))
    from vtorque_login import await_answer  # noqa: PLC0415 - rarely needed

    first = node == job.nodes[0]
    return await_answer.ask(
        asked.line(), job.id, node, site, on_first=first, terminal=asked.terminal
    )


def _has_records(config: Path, job_id: str) -> bool:
    try:
        return bool(kept_jobs.jobs(config, job_id))
    except VtorqueError:
        return False


def _print_to(path: Path | None) -> None:
    if path is None or str(path) == "-":
        return
    with name_errors(printable(str(path)), fault=UsageError), path.open("wb") as file:
        os.dup2(file.fileno(), 1)


def _can_run_here(places: Sequence[kept_records.Place], asked: RemoteCommand) -> bool:
    facts = places[-1].facts() if places else {}
    if not facts or "ended" in facts or asked.node not in ("", facts.get("node")):
        return False
    is_whole = bool(asked.node) or len(facts.get("nodes", ())) < 2
    return is_whole or not gathered.reads_all_nodes(asked.command, asked.options)


def _is_named(job: JobInfo, wanted: str) -> bool:
    """Return whether ``wanted`` is this job's id, or the part of the id before the first dot."""
    name = job.known_as or job.id
    return wanted in (name, name.partition(".")[0])


def _select_jobs(jobs: Iterable[JobInfo], wanted: str) -> list[JobInfo]:
    def is_selected(job: JobInfo) -> bool:
        names = {"job": job.id, "known_as": job.known_as}
        return _is_named(job, wanted) or kept_jobs.is_meant(wanted, names)

    return sorted(filter(is_selected, jobs), key=lambda job: job.id != wanted)


def _is_this(node: str) -> bool:
    return node.partition(".")[0] == os.uname().nodename.partition(".")[0]


def _node(asked: RemoteCommand, job: JobInfo, site: Site, config: Path) -> str:
    if asked.node:
        if asked.node not in job.nodes:
            nodes = ", ".join(job.nodes)
            raise UsageError(f"--node {printable(asked.node)}: job {job.id} runs on {nodes}")
        return asked.node
    rank = int(*asked.operands.get("rank", ("0",)))
    if rank == 0 or len(job.nodes) == 1:
        return job.nodes[0]
    for node in job.nodes:
        found = state.query_node(job.id, node, config, site[Settings].answer_timeout)
        states = (found, *(moved for _, moved in found.elsewhere))
        if any(rank == of for each in states for of, _ in each.guests):
            return node  # the job's first node also reports migrated guests
    raise Refused(f"job {printable(job.id)} has no guest {rank}")


def _call(argv: Sequence[str]) -> int:
    with name_errors(argv[0]):
        code = subprocess.run(argv, check=False).returncode
    return code if code >= 0 else 128 - code


# -- admins ------------------------------------------------------------------------------------


def _run_as_owner(asked: RemoteCommand, owner: str, config: Path) -> int:
    """Run the command as the job's owner, because only the owner may run commands in the job.

    The user fully controls the process, so it inherits no descriptor from root. If the command
    needs a terminal, runuser creates a new one. Otherwise the process gets pipes, and control
    sequences from these pipes never reach a terminal. Privileges: root.
    """
    try:
        account = pwd.getpwnam(owner)
    except KeyError:
        raise Refused(f"the job's owner {printable(owner)} is not a user of this host") from None
    node = [f"--node={asked.node}"] if asked.node else []
    argv = service.vmgr(config, *asked.line(*node))
    pty = ["--pty"] if asked.terminal else []
    kept = {name: os.environ[name] for name in ("TERM", "NO_COLOR") if name in os.environ}
    environ = kept | {
        "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": account.pw_dir, "USER": owner,
        "LOGNAME": owner,
    }  # fmt: skip
    command = [RUNUSER, *pty, "-u", owner, "--", *argv]
    if asked.terminal:
        return subprocess.run(command, env=environ, cwd="/", check=False).returncode
    _print_to(asked.output)
    out = _write if asked.output and not os.isatty(1) else functools.partial(_show, sys.stdout)
    return _run_sanitized(command, environ, out)


def _run_sanitized(
    argv: Sequence[str], environ: Mapping[str, str], out: Callable[[bytes], object]
) -> int:
    """Run the command on pipes, and return its exit status.

    Pass the command's standard output to ``out``, and print its standard error without control
    characters. The kernel kills the command when this process ends.
    """
    failed: list[OSError] = []
    argv = [*_DIES_WITH_US, *argv]
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environ, cwd="/", start_new_session=True,
    ) as child:  # fmt: skip
        sides = (child.stdout, out), (child.stderr, functools.partial(_show, sys.stderr))
        readers = [
            threading.Thread(target=_pass_on, args=(*side, failed), daemon=True) for side in sides
        ]
        for reader in readers:
            reader.start()
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.terminate()
            raise
        for reader in readers:
            reader.join()
    for error in failed:
        if isinstance(error, BrokenPipeError):  # the reader of our output has closed it
            raise error
        raise HostFault(f"cannot write the job's output: {error.strerror}")
    return code if code >= 0 else 128 - code


def _pass_on(pipe: IO[bytes], write: Callable[[bytes], object], failed: list[OSError]) -> None:
    try:
        while data := pipe.readline(_MOST):
            write(data)
    except OSError as error:
        failed.append(error)
    finally:
        pipe.close()  # so that the command notices, too


def _show(stream: TextIO, line: bytes) -> None:
    stream.write(f"{printable(line.decode('utf-8', 'replace').rstrip(), _MOST)}\n")
    stream.flush()  # immediately, even into a pipe


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
