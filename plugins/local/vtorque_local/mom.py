"""What pbs_mom does: prologue, the user's part and epilogue of a job, by Torque's conventions.

For a batch system that has no pbs_mom of its own. Runs as root; as another user it runs
that user's jobs. The kernel kills hooks and job when the thread that runs them ends with its
process (PR_SET_PDEATHSIG of prctl(2), by setpriv(1)), and they do not begin if it has ended before;
the next one then has to call :meth:`Task.tear_down`.
"""

from __future__ import annotations

import abc
import contextlib
import grp
import json
import os
import pwd
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vtorque_core.api import EXIT_HOST_FAULT, VtorqueError, guarded, printable
from vtorque_local import become_job
from vtorque_local.qsub import QsubJob, output_paths, variables
from vtorque_pbs import convention as pbs

COOKIE = "PBS_JOBCOOKIE"  # in the environment of every process of a job, and different for each
_GUARD = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "--")  # ``start`` looks who its parent is
HOOK_ENVIRON = {"PATH": "/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
LOST = "lost: the batch system was restarted while this job was running"
KILL_TIME = 10.0  # seconds to find and kill what a job has left
NOTE_TIME = 5.0  # seconds to write the reason into the user's file
MAX_SAID = 8192  # bytes of what an epilogue says that go into the user's file
MAX_WORD = 300  # characters of one line there
forking = threading.Lock()
"""Held while a process is forked. It closes what it has of this process's descriptors, and of a
user's FUSE file system that takes as long as the user likes: hold this lock while such a one is
here, and only so long."""
_CLOSED: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)


@dataclass(frozen=True)
class Programs:
    """What is run: the hooks as root, the wrapper (the job shell) as the user; times in seconds.

    ``kill_after``: from TERM to KILL of a job, longer than the wrapper's own grace.
    """

    prologue: Sequence[str]
    epilogue: Sequence[str]
    wrapper: Sequence[str]
    kill_after: float = 20.0
    hook_timeout: float = 900.0


@dataclass
class Job:
    """One job, fit for JSON. ``state``: Q queued, P prologue, R running, E epilogue.

    Args:
        uid: whose job it is.
        hook: the prologue's arguments.
        outputs: stdout's and stderr's file, see ``become_job.open_output``.
        in_guest: the wrapper runs it; else, on bare metal, the user's shell does.
        want: what the user asked for.
        environ: the environment of its processes.
        status: Torque's exit_status, None until it is known; ``reason`` for the user.
        session, started: leader and time of the start, in seconds of the epoch.
    """

    uid: int
    hook: list[str]
    outputs: list[tuple[str, str]]
    in_guest: bool
    want: QsubJob
    environ: dict[str, str]
    state: str = "Q"
    status: int | None = None
    reason: str = ""
    session: int = 0
    started: float = 0.0

    @property
    def id(self) -> str:
        """The job id."""
        return self.hook[0]

    def encode(self) -> bytes:
        """Return the job as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Job:
        """Return what :meth:`encode` wrote."""
        found = json.loads(data)
        return cls(**found | {"want": QsubJob(**found["want"])})


class Task(abc.ABC):
    """The work on one job; its state changes as the work goes on.

    Args:
        job: the job.
        programs: what is run.
        terminal: the three descriptors of an interactive job's terminal.
    """

    def __init__(self, job: Job, programs: Programs, terminal: Sequence[int] = ()) -> None:
        self.job, self._programs, self._terminal = job, programs, terminal
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed_at = 0.0  # when KILL follows a TERM

    @abc.abstractmethod
    def save(self) -> None:
        """Have the job on disk: called before a process of its new state starts.

        May raise OSError and VtorqueError; then the job is not started.
        """

    def run(self) -> None:
        """Run the job to its end. Blocks."""
        try:
            if self._enter("P"):
                self.job.started = time.time()
                self._run_prologue()
                if self._enter("R"):
                    self._run_job()
        except (OSError, ValueError, LookupError, VtorqueError) as error:
            self.end(pbs.STATUS_NO_START, f"the job cannot be started: {error}")
        self.tear_down()

    def tear_down(self) -> None:
        """Run the epilogue and say why the job ended; all there is to do for a lost job. Blocks."""
        job = self.job
        if job.status is None:
            job.status, job.reason = pbs.STATUS_LOST, LOST
        kill_all(job.environ[COOKIE])
        with self._lock, contextlib.suppress(OSError, VtorqueError):  # whatever the disk says
            job.state = "E"
            self.save()
        args = pbs.EpilogueArgs.after(
            pbs.PrologueArgs.parse(job.hook), job.session, time.time() - job.started, job.status
        )
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            with os.fdopen(os.memfd_create("epilogue"), "rb") as said:
                self._hook([*self._programs.epilogue, *args.argv()], said.fileno())
                said.seek(0)
                lines = said.read(MAX_SAID).decode("utf-8", "replace").splitlines()
            words = [word for word in (job.reason, *lines) if word]
            if words and not job.want.interactive:
                path, name = job.outputs[1]
                mark = f"=>> vtorque: {job.id}: "
                text = "".join(f"{mark}{printable(word, MAX_WORD)}\n" for word in words)
                note = _start({"path": path, "name": name, "text": text})
                with contextlib.suppress(ValueError, LookupError):
                    _run(note, NOTE_TIME, **_CLOSED, **_as_user(job))

    def end(self, status: int, reason: str) -> None:
        """End the job, with TERM and then KILL; of a prologue only the job after it, as Torque."""
        with self._lock:
            if self.job.status is None:
                self.job.status, self.job.reason = status, reason
                if self.job.state == "R" and self._process:
                    os.killpg(self._process.pid, signal.SIGTERM)
                    self._killed_at = time.monotonic() + self._programs.kill_after
                    _later(self._programs.kill_after, partial(self._kill, self._process))

    def _enter(self, state: str) -> bool:
        with self._lock:
            if self.job.status is None:
                self.job.state = state
                self.save()
            return self.job.status is None

    def _run_prologue(self) -> None:
        code = self._hook([*self._programs.prologue, *self.job.hook])
        failed = "the node's prologue {}; nothing was run".format
        if code > 0:
            self.end(pbs.STATUS_NO_START, failed(f"failed (exit {code})"))
        elif code < 0 and self.job.in_guest:  # nobody is left to start its guests or say why not
            self.end(EXIT_HOST_FAULT, failed(f"was killed (signal {-code})"))

    def _run_job(self) -> None:
        job, seconds = self.job, self.job.want.walltime
        argv, name = list(self._programs.wrapper), self._programs.wrapper[0]
        if not job.in_guest:
            argv, name = [job.environ["SHELL"]], "-" + Path(job.environ["SHELL"]).name
        what = {
            "argv": argv,
            "name": name,
            "directory": job.want.initdir or job.environ["HOME"],
            "needed": not (job.want.initdir and job.in_guest),  # else one of the guest, maybe
            "outputs": [] if job.want.interactive else job.outputs,
        }
        limit = f"job killed: walltime exceeded limit {pbs.show_walltime(seconds)}"
        late = partial(self.end, pbs.STATUS_WALLTIME, limit)
        line, end = os.pipe()
        os.write(end, os.fsencode(f"{shlex.quote(job.hook[7])} {job.want.args}".rstrip() + "\n"))
        os.close(end)
        said, say = os.pipe()  # what is wrong with the start; no file: the user would have it open
        os.set_blocking(said, False)
        with os.fdopen(line, "rb"), os.fdopen(said, "rb", buffering=0) as heard:
            stdio = self._terminal or (line, say, say)
            how = _as_user(job) | dict(zip(("stdin", "stdout", "stderr"), stdio, strict=True))
            try:
                code = self._wait(_start(what), seconds or threading.TIMEOUT_MAX, late, **how)
            finally:
                os.close(say)
            words = (heard.read(1000) or b"").decode("utf-8", "replace").strip()
        with self._lock:
            if job.status is None:
                job.status = pbs.status_of(code)
                job.reason = words

    def _hook(self, argv: Sequence[str], stdout: int = 2) -> int:
        environ = HOOK_ENVIRON | {"PBS_JOBID": self.job.id, "PBS_QUEUE": self.job.hook[5]}
        how = {"env": environ, "stdin": subprocess.DEVNULL, "cwd": "/", "umask": 0o022}
        code = self._wait(guarded(*argv), self._programs.hook_timeout, None, stdout=stdout, **how)
        if code:
            sys.stderr.write(f"vtorque: job {self.job.id}: {argv[:4]} ended with {code}\n")
        return code

    def _wait(
        self, argv: Sequence[str], seconds: float, late: Callable[[], None] | None, **how: Any
    ) -> int:
        """Run a process to its end; return its exit code, or minus its signal.

        After ``seconds`` it calls ``late``; without one it kills the process.
        """
        with self._lock:
            if self.job.state == "R" and self.job.status is not None:
                return 0  # ended just now
            process = self._process = _popen(argv, start_new_session=True, **how)
            if self.job.state == "R":
                self.job.session = process.pid
        timer = _later(seconds, late or partial(self._kill, process))
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        timer.cancel()
        while time.monotonic() < self._killed_at and processes(self.job.environ[COOKIE]):
            time.sleep(0.05)  # the job's leader has ended, others are still at it
        with self._lock:  # until it is reaped the number is its own
            if self.job.state == "R":
                os.killpg(process.pid, signal.SIGKILL)  # what it has left
            self._process = None
            return process.wait()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._process is process:
                os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Place:
    """Where a job runs: its queue, this host, the directory of submission, its root-owned files."""

    queue: str
    host: str
    workdir: str
    script: Path
    nodefile: Path


def make_job(
    job_id: str, want: QsubJob, environ: Mapping[str, str], token: str, uid: int, place: Place
) -> Job:
    """Return the job that qsub and pbs_mom would make of what a user wants.

    Args:
        job_id: ``number.host``.
        environ: the submitter's environment.
        token: the request, as it goes into the resource list; empty on bare metal.

    Raises UsageError (variables, paths), KeyError if there is no such user.
    """
    account, workdir = pwd.getpwuid(uid), place.workdir
    initdir = want.initdir and os.path.join(workdir, want.initdir)  # noqa: PTH118 (user's text)
    want = replace(want, initdir=initdir)
    resources = {"nodes": "1", **want.resources} | ({"other": token} if token else {})
    hook = pbs.PrologueArgs(
        job_id,
        account.pw_name,
        grp.getgrgid(account.pw_gid).gr_name,
        want.name,
        pbs.build_resources(resources),
        place.queue,
        script=str(place.script),
    )
    own = {"PATH": "/usr/local/bin:/usr/bin:/bin"} | variables(want, environ, place.host, workdir)
    own |= _environ(hook, want, account, place)
    outputs = output_paths(want, job_id, place.host, workdir)
    return Job(uid, hook.argv(), outputs, bool(token), want, own)


def _environ(
    hook: pbs.PrologueArgs, job: QsubJob, account: pwd.struct_passwd, place: Place
) -> dict[str, str]:
    """Return what pbs_mom tells the first task of a job on one node."""
    kind = "INTERACTIVE" if job.interactive else "BATCH"
    return {
        "HOME": account.pw_dir,
        "LOGNAME": account.pw_name,
        "USER": account.pw_name,
        "SHELL": job.shell or account.pw_shell or "/bin/sh",
        "ENVIRONMENT": kind,
        "PBS_ENVIRONMENT": f"PBS_{kind}",
        COOKIE: os.urandom(16).hex().upper(),
        "PBS_JOBID": hook.job_id,
        "PBS_JOBNAME": hook.job_name,
        "PBS_NODEFILE": str(place.nodefile),
        "PBS_NODENUM": "0",
        "PBS_NP": str(job.ppn or 1),
        "PBS_NUM_NODES": "1",
        "PBS_NUM_PPN": str(job.ppn or 1),
        "PBS_O_QUEUE": place.queue,
        "PBS_QUEUE": place.queue,
        "PBS_SERVER": place.host,
        "PBS_TASKNUM": "1",
        "PBS_VNODENUM": "0",
        "PBS_WALLTIME": str(job.walltime),
    } | ({"PBS_O_INITDIR": job.initdir} if job.initdir else {})


def run_root(argv: Sequence[str]) -> None:
    """Run a program as a hook is run, for no job, to its end."""
    with contextlib.suppress(OSError):
        _run(guarded(*argv), None, env=HOOK_ENVIRON, stdout=2, cwd="/")


def _popen(argv: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    with forking:
        return subprocess.Popen(argv, **how)


def _run(argv: Sequence[str], seconds: float | None, **how: Any) -> None:
    process = _popen(argv, **how)
    try:
        process.wait(seconds)
    finally:
        process.kill()
        process.wait()


def processes(cookie: str, among: Iterable[int] | None = None) -> set[int]:
    """Return the processes that have this cookie, as far as this user may see them."""
    mark, found = f"{COOKIE}={cookie}".encode(), set()
    if among is None:
        among = [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208
    for pid in among:
        with contextlib.suppress(OSError):  # ended, or not ours
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def kill_all(cookie: str) -> None:
    """SIGKILL all processes that have this cookie, until no more turn up or KILL_TIME is over."""
    killed: set[int] = set()
    end = time.monotonic() + KILL_TIME  # a job may make processes faster than they are found
    while (new := processes(cookie) - killed) and time.monotonic() < end:
        for pid in new:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    if pid in processes(cookie, (pid,)):  # its number may be another's by now
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        killed |= new


def _start(what: dict[str, Any]) -> list[str]:
    """Return the command of :mod:`vtorque_local.become_job`, with the job's own environment as it
    is: no shell."""
    given = json.dumps(what | {"starter": os.getpid()})
    return [*_GUARD, sys.executable, "-I", "-S", become_job.__file__, given]


def _as_user(job: Job) -> dict[str, Any]:
    how: dict[str, Any] = {"env": job.environ, "umask": 0o077, "cwd": "/"}
    if os.geteuid() == 0:
        account = pwd.getpwuid(job.uid)
        groups = os.getgrouplist(account.pw_name, account.pw_gid)
        how |= {"user": job.uid, "group": account.pw_gid, "extra_groups": groups}
    return how


def _later(seconds: float, work: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
    return timer
