"""What pbs_mom does: prologue, the user's part and epilogue of a job, by Torque's conventions.

For a batch system that has no pbs_mom of its own. Runs as root; as another user it runs
that user's jobs. The kernel kills hooks and job when the thread that runs them ends with its
process (PR_SET_PDEATHSIG of prctl(2), by setpriv(1)), and they do not begin if it has ended before;
the next one then has to call :meth:`Task.tear_down`. Nothing here waits for a process of the user's
without an end: one that even SIGKILL does not end is left behind, and counted.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vtorque_core.api import EXIT_HOST_FAULT, VtorqueError, guarded, printable
from vtorque_core.live.service import own_variables
from vtorque_local import become_job, job_processes
from vtorque_local.client import GUARD
from vtorque_local.job import Job
from vtorque_local.node import WAITS
from vtorque_pbs import convention as pbs

HOOK_ENVIRON = {"PATH": "/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
LOST = "lost: the batch system was restarted while this job was running"
NOTE_TIME = 5.0  # seconds to write the reason into the user's file
STUCK_TIME = 2.0  # seconds until a killed process counts as one that cannot be ended
MAX_SAID = 8192  # bytes of what a hook says; an epilogue's go into the user's file
MAX_WORD = 300  # characters of one line there


@dataclass(frozen=True)
class Programs:
    """What is run: the hooks as root, the wrapper (the job shell) as the user; times in seconds.

    ``kill_after``: from TERM to KILL of a job, longer than the wrapper's own grace. ``pids``: the
    limit of a job's processes and threads on the node; 0: none.
    """

    prologue: Sequence[str]
    epilogue: Sequence[str]
    wrapper: Sequence[str]
    kill_after: float = 20.0
    hook_timeout: float = 900.0
    pids: int = 0


class Leader(abc.ABC):
    """The first process of the user's part of a job; ``session``: its number, or its parent's."""

    session: int

    @abc.abstractmethod
    def fileno(self) -> int:
        """Return what poll(2) shows as readable when it has ended."""

    @abc.abstractmethod
    def result(self) -> tuple[int, str]:
        """Return exit code, or minus the signal, and what was wrong with the start. Once."""

    @abc.abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM to it and to what it has started."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to it and to what it has started, as far as that is known."""


class Task(abc.ABC):
    """The work on one job; its state changes as the work goes on.

    Args:
        job: the job.
        programs: what is run.
        directory: the job's files, see :func:`vtorque_local.job.put_files`.
        stuck: what was left behind of each user's, by uid.
    """

    def __init__(
        self, job: Job, programs: Programs, directory: Path, stuck: dict[int, list[Process]]
    ) -> None:
        self.job, self.directory = job, directory
        self._programs, self._stuck = programs, stuck
        self._lock = threading.RLock()
        self._wake = -1  # an eventfd(2) while the job is at work

    @abc.abstractmethod
    def save(self) -> None:
        """Have the job on disk: called before a process of its new state starts.

        May raise OSError and VtorqueError; then the job is not started.
        """

    def spared(self) -> int:
        """Return the process in the job's cgroup that is not the job's; 0: there is none."""
        return 0

    def work(self) -> bool:
        """Run the job to its end, or tear down one that was lost; False: it waits for others."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            return self.run() if self.job.state == "Q" else self.tear_down()
        finally:
            with self._lock:
                os.close(self._wake)
                self._wake = -1

    def run(self) -> bool:
        """Run the job to its end; return False if it has to wait for others. Blocks."""
        try:
            if self._enter("P"):
                self.job.started = time.time()
                if self._run_prologue() and self._wait():
                    return False
                if self._enter("R"):
                    self._run_job()
        except (OSError, ValueError, LookupError, VtorqueError) as error:
            self.end(pbs.STATUS_NO_START, f"the job cannot be started: {error}")
        return self.tear_down()

    def tear_down(self) -> bool:
        """Run the epilogue and say why the job ended; all there is to do for a lost job. Blocks."""
        job = self.job
        if job.status is None:
            job.status, job.reason = pbs.STATUS_LOST, LOST
        self._end_processes(0.0)
        with self._lock, contextlib.suppress(OSError, ValueError, VtorqueError):  # whatever it says
            job.state = "E"
            self.save()
        args = pbs.EpilogueArgs.after(
            pbs.PrologueArgs.parse(job.hook), job.session, time.time() - job.started, job.status
        )
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _, lines = self._hook([*self._programs.epilogue, *args.argv()])
            self._note([word for word in (job.reason, *lines) if word])
        return True

    def end(self, status: int, reason: str) -> None:
        """End the job, with TERM and then KILL; of a prologue only the job after it, as Torque."""
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
        """Go back into the queue, unless somebody has ended the job meanwhile."""
        with self._lock:
            if self.job.status is None:
                self.job.state, self.job.started = "Q", 0.0
                self.save()
            return self.job.status is None

    def _run_prologue(self) -> bool:
        """Return whether the job has to wait for what others have; ``reason`` says for what."""
        code, lines = self._hook([*self._programs.prologue, *self.job.hook])
        waits = code == WAITS and self.job.in_guest
        with self._lock:
            if self.job.status is None:  # else the reason of its end stays
                self.job.reason = printable(" ".join(lines[-1:]), MAX_WORD) if waits else ""
        if waits:
            return True
        failed = "the node's prologue {}; nothing was run".format
        if code > 0:
            self.end(pbs.STATUS_NO_START, failed(f"failed (exit {code})"))
        elif code < 0 and self.job.in_guest:  # nobody is left to start its guests or say why not
            self.end(EXIT_HOST_FAULT, failed(f"was killed (signal {-code})"))
        return False

    def start(self) -> Leader:
        """Start the user's part. Raises OSError, LookupError (no such user)."""
        return Process.of(self.job, self.directory, self._programs.wrapper)

    def _run_job(self) -> None:
        leader = self.start()
        self.job.session = leader.session
        if not self._watch(leader):
            self.end(pbs.STATUS_SIGNAL + signal.SIGKILL, "its process cannot be ended")
            if isinstance(leader, Process):
                self._stuck.setdefault(self.job.uid, []).append(leader)
            return
        code, words = leader.result()
        with self._lock:
            if self.job.status is None:
                self.job.status, self.job.reason = pbs.status_of(code), words

    def _watch(self, leader: Leader) -> bool:
        """Wait for the leader's end, and what its end leaves; return whether there was one."""
        poll = select.poll()
        for each in (leader.fileno(), self._wake):
            poll.register(each, select.POLLIN)
        late = time.monotonic() + self.job.walltime if self.job.walltime else math.inf
        kill_at = math.inf
        while not _ready(poll, leader.fileno(), min(late, kill_at)):
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
        return _ready(poll, leader.fileno(), time.monotonic() + STUCK_TIME)

    def _end_processes(self, grace: float) -> None:
        """Give what the job has left these seconds, then kill it."""
        job = self.job
        if job.cgroup:
            ended = job_processes.end_members(job.cgroup, grace, self.spared())
        else:
            command = job_processes.ending_marked(job.environ[job_processes.COOKIE], grace)
            ended = self._as_user(command, grace + 2 * job_processes.KILL_TIME)
        if not ended:
            sys.stderr.write(f"vtorque: job {job.id}: has processes that cannot be ended\n")

    def _note(self, words: Sequence[str]) -> None:
        if not words or self.job.interactive:
            return
        mark = f"=>> vtorque: {self.job.id}: "
        text = "".join(f"{mark}{printable(word, MAX_WORD)}\n" for word in words)
        with _opened(self.job.order((), text), self.directory) as (order, rest):
            self._as_user([*GUARD, *become_job.command(order, rest)], NOTE_TIME, (order, rest))

    def _as_user(self, argv: Sequence[str], seconds: float, fds: Sequence[int] = ()) -> bool:
        """Run a program as the job's user; return whether it has ended by itself.

        It is killed when its time is up, and left behind if it does not end then.
        """
        with contextlib.suppress(OSError, LookupError):
            # Not the job's environment: who looks for its cookie would find itself.
            process = Process([*_as(self.job.uid), *argv], HOOK_ENVIRON, fds)
            if process.ended(seconds):
                process.result()
                return True
            process.kill()
            if not process.ended(STUCK_TIME):
                self._stuck.setdefault(self.job.uid, []).append(process)
        return False

    def _hook(self, argv: Sequence[str]) -> tuple[int, list[str]]:
        """Run a hook to its end; return its exit code, or minus its signal, and what it said."""
        environ = hook_environ() | {"PBS_JOBID": self.job.id, "PBS_QUEUE": self.job.hook[5]}
        with os.fdopen(os.memfd_create("said"), "rb") as said:
            process = Process(guarded(*argv), environ, stdout=said.fileno(), stderr=2, umask=0o022)
            if not process.ended(self._programs.hook_timeout):
                process.kill()
            code, _ = process.result()
            said.seek(0)
            lines = said.read(MAX_SAID).decode("utf-8", "replace").splitlines()
        if code:
            sys.stderr.write(f"vtorque: job {self.job.id}: {argv[:4]} ended with {code}\n")
        return code, lines


class Process(Leader):
    """A process in a session of its own."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], fds: Sequence[int] = (), **how: Any
    ) -> None:
        """Start it. ``how``: of ``subprocess.Popen``; its streams are closed if not given."""
        closed = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        more = {"umask": 0o077, **closed, **how}
        self._process = subprocess.Popen(
            argv, env=environ, cwd="/", pass_fds=fds, start_new_session=True, **more
        )
        self._handle = os.pidfd_open(self._process.pid)
        self._heard: BinaryIO | None = None
        self.session = self._process.pid

    @classmethod
    def of(cls, job: Job, directory: Path, wrapper: Sequence[str]) -> Process:
        """Start the user's part of a job. Raises OSError, LookupError (no such user)."""
        said, say = os.pipe()  # what is wrong with the start; no file: the user would have it open
        os.set_blocking(said, False)
        try:
            with _opened(job.order(wrapper), directory) as (order, rest):
                argv = [*job_processes.joining(job.cgroup), *_as(job.uid)]
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
        """Return its pidfd."""
        return self._handle

    def ended(self, seconds: float) -> bool:
        """Wait these seconds at most; return whether it has ended."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return _ready(poll, self._handle, time.monotonic() + seconds)

    def result(self) -> tuple[int, str]:
        """Wait for it, kill what it has left in its group, return code and words."""
        os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOWAIT)
        self.kill()  # until it is reaped the number is its own
        words = b""
        if self._heard:
            with self._heard:
                words = self._heard.read(1000) or b""
        os.close(self._handle)
        return self._process.wait(), words.decode("utf-8", "replace").strip()

    def terminate(self) -> None:
        """Send SIGTERM to its process group."""
        os.killpg(self.session, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to its process group. Not after :meth:`result`."""
        os.killpg(self.session, signal.SIGKILL)


def hook_environ() -> dict[str, str]:
    """Return what root's programs have as environment, or those of a user's own site."""
    return HOOK_ENVIRON | own_variables()


def run_root(argv: Sequence[str]) -> None:
    """Run a program as a hook is run, for no job, to its end."""
    with contextlib.suppress(OSError):
        Process(guarded(*argv), hook_environ(), stdout=2, stderr=2, umask=0o022).result()


def _ready(poll: select.poll, descriptor: int, until: float) -> bool:
    """Wait until something is ready, or the time is up; return whether this one is."""
    left = None if until == math.inf else max(0, int((until - time.monotonic()) * 1000) + 1)
    return any(number == descriptor for number, _ in poll.poll(left))


@contextlib.contextmanager
def _opened(order: Mapping[str, Any], directory: Path) -> Any:
    """Give descriptors of what root says of the job and of what its client has left of it."""
    given = os.memfd_create("order")
    try:
        os.write(given, json.dumps(order).encode())
        rest = os.open(directory / "rest", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield given, rest
        finally:
            os.close(rest)
    finally:
        os.close(given)


def _as(uid: int) -> list[str]:
    """Return the command that runs another one as a user, with all groups and no capability."""
    if os.geteuid() != 0:
        return []
    account = pwd.getpwuid(uid)
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    ids = ["--reuid", str(uid), "--regid", str(account.pw_gid)]
    return ["/usr/bin/setpriv", *ids, "--groups", ",".join(map(str, groups)), "--"]
