"""Run a job like pbs_mom: prologue, user process and epilogue, by Torque's conventions.

Runs as root, or as a user for that user's jobs. The kernel kills hooks and jobs when the service
ends (PR_SET_PDEATHSIG of prctl(2), by setpriv(1)). The next service must then call
:meth:`JobTask.tear_down`. The service waits only a limited time for a user's process that survives
SIGKILL.
"""

from __future__ import annotations

import abc
import contextlib
import json
import math
import os
import pwd
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vtorque_core.api import EXIT_HOST_FAULT, VtorqueError, closing, guard_command, printable
from vtorque_core.live.service import own_variables
from vtorque_local import become_job, job_processes
from vtorque_local.client import GUARD
from vtorque_local.job import LocalJob
from vtorque_local.node import PLACED, WAITS
from vtorque_pbs import convention as pbs

HOOK_ENVIRON = {"PATH": "/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
LOST = "lost: the batch system was restarted while this job was running"
NOTE_TIME = 5.0  # seconds to append the reason to the user's output
STUCK_TIME = 2.0  # seconds after SIGKILL until a process counts as unkillable
MAX_SAID = 8192  # bytes of a hook's output; an epilogue's output is appended to the user's file
MAX_WORD = 300  # characters of a line of that output


@dataclass(frozen=True)
class JobPrograms:
    """Programs of a job: the hooks run as root, the job shell (``wrapper``) as the user.

    Attributes:
        kill_after: Seconds from SIGTERM to SIGKILL, longer than ``[node] grace``.
        hook_timeout: Seconds for a hook.
        pids: Limit of a job's processes and threads on the node; 0 means unlimited.
    """

    prologue: Sequence[str]
    epilogue: Sequence[str]
    wrapper: Sequence[str]
    kill_after: float = 20.0
    hook_timeout: float = 900.0
    pids: int = 0


class Leader(abc.ABC):
    """The first of a job's processes that run as the user.

    ``session`` is the pid of this process, or the pid of its parent in an interactive job.
    """

    session: int

    @abc.abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process ends."""

    @abc.abstractmethod
    def result(self) -> tuple[int, str]:
        """Return the exit code (or minus the signal) and any start error. Call this only once."""

    @abc.abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM to the process and its children."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to the process and its known children."""


class JobTask(abc.ABC):
    """The execution of one job.

    ``directory`` is the job's directory in the spool. ``stuck`` lists, for each uid, the processes
    that survived SIGKILL.
    """

    def __init__(
        self,
        job: LocalJob,
        programs: JobPrograms,
        directory: Path,
        stuck: dict[int, list[UserProcess]],
    ) -> None:
        self.job, self.directory = job, directory
        self._programs, self._stuck = programs, stuck
        self._lock = threading.RLock()
        self._wake = -1  # an eventfd(2) while :meth:`work` runs
        self._leader: Leader | None = None  # started before the end of the prologue

    @abc.abstractmethod
    def save(self) -> None:
        """Write the job to disk, before each start of prologue, script and epilogue.

        If this method raises OSError or VtorqueError, only the epilogue is still started.
        """

    def spared_process(self) -> int:
        """Return the pid of a process in the job's cgroup that must not be killed, or 0."""
        return 0

    def work(self) -> bool:
        """Run a queued job, or tear down a job whose service was killed.

        Return False if the job must wait for other jobs.
        """
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            return self.run() if self.job.state == "Q" else self.tear_down()
        finally:
            with self._lock:
                os.close(self._wake)
                self._wake = -1

    def run(self) -> bool:
        """Run the job to its end. Return False if it must wait for other jobs. Blocks."""
        try:
            if self._enter("P"):
                self.job.started = time.time()
                if self._run_prologue() and self._wait():
                    return False
                if self._leader is not None or self._enter("R"):
                    self._run_job(self._leader or self.start())
        except (OSError, ValueError, LookupError, VtorqueError) as error:
            self.end(pbs.STATUS_NO_START, f"the job cannot be started: {error}")
        return self.tear_down()

    def tear_down(self) -> bool:
        """Run the epilogue; append the reason of the job's end to the job's stderr. Blocks.

        Always returns True. If a service was killed, the next service calls this method for each
        job that was running.
        """
        job = self.job
        if job.status is None:
            job.status, job.reason = pbs.STATUS_LOST, LOST
        self._end_processes(0.0)
        with self._lock, contextlib.suppress(OSError, ValueError, VtorqueError):  # ignore all
            job.state = "E"
            self.save()
        args = pbs.EpilogueArgs.from_prologue(
            pbs.PrologueArgs.parse(job.hook), job.session, time.time() - job.started, job.status
        )
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _, lines = self._hook([*self._programs.epilogue, *args.argv()])
            self._note([word for word in (job.reason, *lines) if word])
        return True

    def end(self, status: int, reason: str) -> None:
        """End the job with SIGTERM and then SIGKILL; record its exit status and the reason.

        As in Torque, a running prologue finishes first.
        """
        with self._lock:
            if self.job.status is None:
                self.job.status, self.job.reason = status, reason
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)

    def _enter(self, state: str) -> bool:
        with self._lock:
            if self.job.status is None:
                self.job.state = state
                if state == "R" and os.geteuid() == 0:
                    self.job.cgroup = job_processes.make_cgroup(
                        f"job-{self.job.id}-{self.job.environ[job_processes.COOKIE][:8]}",
                        self._programs.pids,
                    )
                self.save()
            return self.job.status is None

    def _wait(self) -> bool:
        with self._lock:
            if self.job.status is None:
                self.job.state, self.job.started = "Q", 0.0
                self.save()
            return self.job.status is None

    def _run_prologue(self) -> bool:
        """Run the prologue. Return whether the job must wait for other jobs.

        If it must wait, the job's ``reason`` says why.
        """
        early = self.job.in_guest and not self.job.interactive
        prologue = [*self._programs.prologue, *self.job.hook]
        code, lines = self._hook(prologue, self._start_early if early else None)
        waits = code == WAITS and self.job.in_guest and self._leader is None
        with self._lock:
            if self.job.status is None:  # otherwise keep the reason of its end
                self.job.reason = printable(" ".join(lines[-1:]), MAX_WORD) if waits else ""
        if waits:
            return True
        failed = "the node's prologue {}; nothing was run".format
        if code > 0:
            self.end(pbs.STATUS_NO_START, failed(f"failed (exit {code})"))
        elif code < 0 and self.job.in_guest:  # nothing can start guests or report
            self.end(EXIT_HOST_FAULT, failed(f"was killed (signal {-code})"))
        return False

    def start(self) -> Leader:
        """Start the job as its user. Raise OSError, or LookupError for an unknown user."""
        return UserProcess.start(self.job, self.directory, self._programs.wrapper)

    def _start_early(self) -> None:
        """Start the job shell, whose imports take time, while the prologue runs."""
        with contextlib.suppress(OSError, ValueError, LookupError, VtorqueError):
            if self._enter("R"):
                self._leader = self.start()

    def _run_job(self, leader: Leader) -> None:
        self.job.session = leader.session
        if not self._watch(leader):
            self.end(pbs.STATUS_SIGNAL + signal.SIGKILL, "its process cannot be ended")
            if isinstance(leader, UserProcess):
                self._stuck.setdefault(self.job.uid, []).append(leader)
            return
        code, words = leader.result()
        with self._lock:
            if self.job.status is None:
                self.job.status, self.job.reason = pbs.status_of(code), words

    def _watch(self, leader: Leader) -> bool:
        """Wait for the leader. At the walltime, or after :meth:`end`, kill the job's processes.

        Return False if the leader cannot be killed.
        """
        poll = select.poll()
        for each in (leader.fileno(), self._wake):
            poll.register(each, select.POLLIN)
        late = time.monotonic() + self.job.walltime if self.job.walltime else math.inf
        kill_at = math.inf
        while not _wait_readable(poll, leader.fileno(), min(late, kill_at)):
            now = time.monotonic()
            if now >= kill_at:
                leader.kill()
                break
            if now >= late:
                limit = f"walltime exceeded limit {pbs.show_walltime(self.job.walltime)}"
                self.end(pbs.STATUS_WALLTIME, f"job killed: {limit}")
            if self.job.status is not None:
                leader.terminate()
                late, kill_at = math.inf, now + self._programs.kill_after
                poll.unregister(self._wake)
        if kill_at < math.inf:
            self._end_processes(max(0.0, kill_at - time.monotonic()))
        return _wait_readable(poll, leader.fileno(), time.monotonic() + STUCK_TIME)

    def _end_processes(self, grace: float) -> None:
        job = self.job
        if job.cgroup:
            ended = job_processes.end_members(job.cgroup, grace, self.spared_process())
        else:
            command = job_processes.ending_marked(job.environ[job_processes.COOKIE], grace)
            ended = self._run_as_user(command, grace + 2 * job_processes.KILL_TIME)
        if not ended:
            sys.stderr.write(f"vtorque: job {job.id}: has processes that cannot be ended\n")

    def _note(self, words: Sequence[str]) -> None:
        if not words or self.job.interactive:
            return
        mark = f"=>> vtorque: {self.job.id}: "
        text = "".join(f"{mark}{printable(word, MAX_WORD)}\n" for word in words)
        with _write_order(self.job.order((), text), self.directory) as (order, rest):
            self._run_as_user([*GUARD, *become_job.command(order, rest)], NOTE_TIME, (order, rest))

    def _run_as_user(self, argv: Sequence[str], seconds: float, fds: Sequence[int] = ()) -> bool:
        """Run a program as the job's user; return whether it ended within the time."""
        with contextlib.suppress(OSError, LookupError):
            # Without the job's environment, because ``ending_marked`` would find its own process.
            process = UserProcess([*_switch_user_command(self.job.uid), *argv], HOOK_ENVIRON, fds)
            if process.wait_end(seconds):
                process.result()
                return True
            process.kill()
            if not process.wait_end(STUCK_TIME):
                self._stuck.setdefault(self.job.uid, []).append(process)
        return False

    def _hook(
        self, argv: Sequence[str], placed: Callable[[], None] | None = None
    ) -> tuple[int, list[str]]:
        """Run a hook; return its exit code and its lines of output.

        If ``placed`` is given, call it when the hook signals the eventfd in VTORQUE_PLACED.
        """
        environ = hook_environ() | {"PBS_JOBID": self.job.id, "PBS_QUEUE": self.job.hook[5]}
        until = time.monotonic() + self._programs.hook_timeout
        come = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with os.fdopen(come, "rb"), os.fdopen(os.memfd_create("said"), "rb") as said:
            fds = [come] if placed else []
            environ |= {PLACED: str(come)} if placed else {}
            out = said.fileno()
            guarded = guard_command(*argv)
            process = UserProcess(guarded, environ, fds, stdout=out, stderr=2, umask=0o022)
            poll = select.poll()
            for each in (*fds, process.fileno()):
                poll.register(each, select.POLLIN)
            if placed and _wait_readable(poll, come, until):
                placed()
            if not process.wait_end(max(0.0, until - time.monotonic())):
                process.kill()
            code, _ = process.result()
            said.seek(0)
            lines = said.read(MAX_SAID).decode("utf-8", "replace").splitlines()
        if code:
            sys.stderr.write(f"vtorque: job {self.job.id}: {argv[:4]} ended with {code}\n")
        return code, lines


class UserProcess(Leader):
    """A process in a new session."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], fds: Sequence[int] = (), **how: Any
    ) -> None:
        """Start the process.

        ``how`` is passed to ``subprocess.Popen``; streams default to /dev/null.
        """
        closed = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        more = {"umask": 0o077, **closed, **how}
        self._process = subprocess.Popen(
            argv, env=environ, cwd="/", pass_fds=fds, start_new_session=True, **more
        )
        self._handle = os.pidfd_open(self._process.pid)
        self._heard: BinaryIO | None = None
        self.session = self._process.pid

    @classmethod
    def start(cls, job: LocalJob, directory: Path, wrapper: Sequence[str]) -> UserProcess:
        """Start the job as its user. ``wrapper`` is the command of the job shell.

        Raise OSError, or LookupError for an unknown user.
        """
        said, say = os.pipe()  # start errors; a pipe, because the user could keep a file open
        os.set_blocking(said, False)
        try:
            with _write_order(job.order(wrapper), directory) as (order, rest):
                argv = [*job_processes.join_command(job.cgroup), *_switch_user_command(job.uid)]
                argv += [*GUARD, *become_job.command(order, rest)]
                null = subprocess.DEVNULL
                one = cls(argv, HOOK_ENVIRON, (order, rest), stdin=null, stdout=say, stderr=say)
        except BaseException:
            os.close(said)
            raise
        finally:
            os.close(say)
        one._heard = os.fdopen(said, "rb", buffering=0)
        return one

    def fileno(self) -> int:
        """Return the pidfd, which is readable after the process has ended."""
        return self._handle

    def wait_end(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether the process has ended."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return _wait_readable(poll, self._handle, time.monotonic() + seconds)

    def result(self) -> tuple[int, str]:
        """Wait for the process and kill the rest of its group. Return exit code and start error."""
        os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOWAIT)
        self.kill()  # before reaping, while the pid is not reused
        words = b""
        if self._heard:
            with self._heard:
                words = self._heard.read(1000) or b""
        os.close(self._handle)
        return self._process.wait(), words.decode("utf-8", "replace").strip()

    def terminate(self) -> None:
        """Send SIGTERM to the process group."""
        os.killpg(self.session, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process group. Do not call this after :meth:`result`."""
        os.killpg(self.session, signal.SIGKILL)


def hook_environ() -> dict[str, str]:
    """Return the environment of hooks."""
    return HOOK_ENVIRON | own_variables()


def run_root(argv: Sequence[str]) -> None:
    """Run a program with the privileges and environment of a hook; wait for its end."""
    with contextlib.suppress(OSError):
        UserProcess(guard_command(*argv), hook_environ(), stdout=2, stderr=2, umask=0o022).result()


def _wait_readable(poll: select.poll, descriptor: int, until: float) -> bool:
    left = None if until == math.inf else max(0, int((until - time.monotonic()) * 1000) + 1)
    return any(number == descriptor for number, _ in poll.poll(left))


@contextlib.contextmanager
def _write_order(order: Mapping[str, Any], directory: Path) -> Any:
    with closing(os.memfd_create("order")) as given:
        os.write(given, json.dumps(order).encode())
        with closing(
            os.open(directory / "rest", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        ) as rest:
            yield given, rest


def _switch_user_command(uid: int) -> list[str]:
    """Return a command prefix that switches to the user, with all groups and no capabilities."""
    if os.geteuid() != 0:
        return []
    account = pwd.getpwuid(uid)
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    ids = ["--reuid", str(uid), "--regid", str(account.pw_gid)]
    return ["/usr/bin/setpriv", *ids, "--groups", ",".join(map(str, groups)), "--"]
