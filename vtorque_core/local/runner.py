"""The life of the jobs of ``local``: prologue, wrapper, epilogue, and how each is ended."""

from __future__ import annotations

import contextlib
import os
import pwd
import selectors
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vtorque_core.batch import pbs_convention as pbs
from vtorque_core.errors import printable
from vtorque_core.local import process
from vtorque_core.local.spool import Job, Spool

KEEP_DONE = 200  # completed jobs whose result can still be asked for
PATH = "/usr/local/bin:/usr/bin:/bin"
_ENTRY = (sys.executable, "-I", "-m", "vtorque_core.cli.vtorque")


@dataclass(frozen=True)
class Commands:
    """What the service runs; the hooks as root, the wrapper as the user.

    ``reap`` runs once, before the first job: it releases what jobs have left that no service knows
    any more. Empty: nothing is run.
    """

    prologue: Sequence[str] = (*_ENTRY, "hook", "prologue")
    epilogue: Sequence[str] = (*_ENTRY, "hook", "epilogue")
    wrapper: Sequence[str] = (*_ENTRY, "jobshell")
    reap: Sequence[str] = ()

    @classmethod
    def with_config(cls, path: Path) -> Commands:
        """Return the commands for the site config at ``path``."""
        hook = (*_ENTRY, "hook", "--config", str(path))
        wrapper = (*_ENTRY, "jobshell", "--config", str(path))
        reap = (*_ENTRY, "reap", "--config", str(path))
        return cls((*hook, "prologue"), (*hook, "epilogue"), wrapper, reap)


@dataclass(frozen=True)
class Limits:
    """Args: slots: jobs at the same time; kill_after: seconds from TERM to KILL of a job, longer
    than the wrapper's own grace; hook_timeout: seconds until a hook is killed.
    """

    slots: int = 1
    kill_after: float = 20.0
    hook_timeout: float = 900.0


@dataclass(frozen=True)
class Step:
    """A process to start for a job: its state, what the child does, and what follows."""

    state: str
    body: Callable[[], None]
    stdio: Sequence[int]
    then: Callable[[Job, int], None]
    limit: float


@dataclass(eq=False)
class Running:
    """What is known of a job's process while this service lives; times are monotonic."""

    pidfd: int
    words: int
    then: Callable[[Job, int], None]
    deadline: float
    kill_at: float = float("inf")


class Runner:
    """All jobs, by id, and their processes. One thread; ``done`` is told every completed job."""

    def __init__(
        self,
        spool: Spool,
        selector: selectors.BaseSelector,
        commands: Commands,
        limits: Limits,
        done: Callable[[Job], None],
    ) -> None:
        self._spool, self._selector, self._commands = spool, selector, commands
        self._limits, self._done = limits, done
        self._host = socket.gethostname()
        self._null = os.open(os.devnull, os.O_RDWR)
        self._running: dict[str, Running] = {}
        self._reaping = False
        self.jobs: dict[str, Job] = {}
        self.terminals: dict[str, list[int]] = {}

    @property
    def busy(self) -> bool:
        """Whether a process of a job is left."""
        return bool(self._running)

    def next_timer(self) -> float:
        """Return when :meth:`timers` must be called at the latest, in monotonic seconds."""
        due = [t for r in self._running.values() for t in (r.deadline, r.kill_at)]
        return min([time.monotonic() + 3600, *due])

    def end_all(self) -> None:
        """End what is running; what is queued stays."""
        for name in list(self._running):
            self.end(self.jobs[name], pbs.STATUS_DELETED, "the batch system was stopped")

    def recover(self) -> None:
        """Keep what was queued; end what was running when the last service died; reap."""
        self._reap()
        for job in self._spool.jobs():
            self.jobs[job.id] = job
            if job.state == "Q" and job.interactive:
                self._finish(job, pbs.STATUS_LOST, "its terminal was lost with the batch system")
            if job.state in ("Q", "C"):
                continue
            if job.pid and job.boot == process.boot_id():
                uids = {os.geteuid(), job.uid if job.state == "R" else os.geteuid()}
                if not process.kill_session(job.pid, uids, job.pid_start, wait=5.0):
                    self._log(job, f"processes of session {job.pid} survive SIGKILL")
            if job.state != "E":
                job.status = pbs.STATUS_LOST
                self._notice(job, "lost: the batch system was restarted while this job was running")
            self._epilogue(job)

    def _reap(self) -> None:
        """Run the reaper; no job starts before it has ended, since it may need what is freed."""

        def ended() -> None:
            self._reaping = False

        if self._commands.reap:
            self._reaping = True
            environ = {"PATH": f"/usr/sbin:/sbin:{PATH}", "LC_ALL": "C"}
            body = partial(process.be_root_program, self._commands.reap, environ)
            self._aside(body, (self._null, 2, 2), ended)

    # -- life of a job ------------------------------------------------------------------------

    def start_queued(self) -> None:
        """Start queued jobs, oldest first, while there are slots."""
        for job in list(self.jobs.values()):
            if self._reaping or len(self._running) >= self._limits.slots:
                return
            if job.state == "Q":
                job.started = time.time()
                argv = [*self._commands.prologue, *self._prologue_args(job).argv()]
                self._hook(job, "P", argv, self._prologue_done)

    def _prologue_args(self, job: Job) -> pbs.PrologueArgs:
        script = str(self._spool.script(job))
        resources = {"nodes": f"1:ppn={job.ppn}" if job.ppn else "1"}
        resources |= {"other": job.token} if job.token else {}
        resources |= {"mem": job.mem} if job.mem else {}
        resources |= {"walltime": pbs.show_walltime(job.walltime)} if job.walltime else {}
        text = pbs.build_resources(resources)
        return pbs.PrologueArgs(job.id, job.user, job.group, job.name, text, "local", "", script)

    def _hook(
        self, job: Job, state: str, argv: Sequence[str], then: Callable[[Job, int], None]
    ) -> None:
        environ = {"PATH": f"/usr/sbin:/sbin:{PATH}", "LC_ALL": "C", "PBS_JOBID": job.id}
        environ |= {"PBS_QUEUE": "local", "PBS_NODENUM": "0"}
        body = partial(process.be_root_program, argv, environ)
        limit = self._limits.hook_timeout
        self._launch(job, Step(state, body, (self._null, 2, 2), then, limit))

    def _prologue_done(self, job: Job, wait_status: int) -> None:
        code = os.waitstatus_to_exitcode(wait_status)
        if code > 0:
            job.status = pbs.STATUS_NO_START
            self._notice(job, f"the node's prologue failed (exit {code}); nothing was run")
        if job.status is not None:
            self._epilogue(job)
            return
        stdio = self.terminals.get(job.id) or (self._null, self._null, self._null)
        limit = job.walltime or float("inf")
        self._launch(job, Step("R", partial(self._be_job, job), stdio, self._job_done, limit))

    def _be_job(self, job: Job) -> None:
        """In the child: become the user, open the files, start the wrapper or, bare, the shell."""
        account = process.become(job.uid)
        os.umask(job.umask)
        os.chdir("/")
        try:
            os.chdir(job.initdir or account.pw_dir)
        except OSError as error:
            if job.token is None or job.initdir is None:  # else a directory of the guest, maybe
                raise OSError(f"working directory: {error.strerror}: {error.filename}") from None
        script = self._spool.script(job)
        if not job.interactive:
            out, err = pbs.output_names(job.name, job.id)
            names = {"n": (job.out, job.err), "oe": (job.out,) * 2, "eo": (job.err,) * 2}
            first, second = names[job.join]
            one = process.open_output(first, err if job.join == "eo" else out, truncate=True)
            two = one if second == first else process.open_output(second, err, truncate=True)
            line = os.fsencode(f"{shlex.quote(str(script))} {job.args}".rstrip() + "\n")
            for target, source in enumerate((process.stdin_line(line), one, two)):
                os.dup2(source, target)
        environ = self._environ(job, account)
        if job.token is not None:
            process.execute(self._commands.wrapper, environ)
        shell = job.shell or account.pw_shell or "/bin/sh"
        process.execute([shell], environ, name="-" + shell.rpartition("/")[2])

    def _environ(self, job: Job, account: pwd.struct_passwd) -> Mapping[str, str]:
        own = {
            "HOME": account.pw_dir,
            "LOGNAME": account.pw_name,
            "USER": account.pw_name,
            "SHELL": job.shell or account.pw_shell or "/bin/sh",
            "ENVIRONMENT": "INTERACTIVE" if job.interactive else "BATCH",
            "PBS_ENVIRONMENT": "PBS_INTERACTIVE" if job.interactive else "PBS_BATCH",
            "PBS_JOBID": job.id,
            "PBS_JOBNAME": job.name,
            "PBS_JOBCOOKIE": os.urandom(16).hex().upper(),
            "PBS_NODEFILE": str(self._spool.nodefile(job)),
            "PBS_NODENUM": "0",
            "PBS_TASKNUM": "1",
            "PBS_VNODENUM": "0",
            "PBS_NUM_NODES": "1",
            "PBS_NUM_PPN": str(job.ppn or 1),
            "PBS_NP": str(job.ppn or 1),
            "PBS_QUEUE": "local",
            "PBS_O_QUEUE": "local",
            "PBS_SERVER": self._host,
            "PBS_WALLTIME": str(job.walltime),
            "PBS_O_WORKDIR": job.workdir,
            "PBS_VERSION": "vtorque-local",
        }
        own |= {"PBS_O_INITDIR": job.initdir} if job.initdir else {}
        return {"PATH": PATH} | job.environ | own

    def _job_done(self, job: Job, wait_status: int) -> None:
        if job.status is None:
            job.status = pbs.status_of(wait_status)
        self._epilogue(job)

    def _epilogue(self, job: Job) -> None:
        p = self._prologue_args(job)
        used = job.used or "cput=00:00:00,mem=0kb,vmem=0kb"
        used += f",walltime={pbs.show_walltime(time.time() - job.started)}"
        first = (p.job_id, p.user, p.group, p.job_name, str(job.session), p.resources, used)
        args = pbs.EpilogueArgs(*first, p.queue, "", str(job.status), p.script)
        self._hook(job, "E", [*self._commands.epilogue, *args.argv()], self._epilogue_done)

    def _epilogue_done(self, job: Job, wait_status: int) -> None:
        if wait_status:
            self._log(job, f"epilogue ended with {os.waitstatus_to_exitcode(wait_status)}")
        self._finish(job, job.status or 0, job.reason)

    def _finish(self, job: Job, status: int, reason: str) -> None:
        job.state, job.status, job.reason, job.pid = "C", status, reason, 0
        job.environ, job.token = {}, None
        self._save(job)
        with contextlib.suppress(OSError):
            self._spool.remove_files(job)
        for fd in self.terminals.pop(job.id, ()):
            os.close(fd)
        self._done(job)
        done = [each for each in self.jobs.values() if each.state == "C"]
        for old in done[: max(0, len(done) - KEEP_DONE)]:
            with contextlib.suppress(OSError):
                self._spool.forget(self.jobs.pop(old.id))

    def end(self, job: Job, status: int, reason: str) -> None:
        """End a job in whatever state; of a prologue only the job after it (as Torque does)."""
        if job.state == "Q":
            self._finish(job, status, reason)
        elif job.status is None:
            job.status, job.reason = status, reason
            self._save(job)
            if job.state == "R":
                self._notice(job, f"job killed: {reason}")
                process.signal_group(job.pid, signal.SIGTERM)
                self._running[job.id].kill_at = time.monotonic() + self._limits.kill_after

    def timers(self) -> None:
        """Do what is due: walltime, KILL after TERM, hooks that hang."""
        now = time.monotonic()
        for name, running in list(self._running.items()):
            job = self.jobs[name]
            if now >= running.deadline:
                running.deadline = float("inf")
                if job.state == "R":
                    limit = pbs.show_walltime(job.walltime)
                    self.end(job, pbs.STATUS_WALLTIME, f"walltime exceeded limit {limit}")
                else:
                    self._log(job, f"hook of state {job.state} takes too long: killed")
                    running.kill_at = now
            if now >= running.kill_at:
                running.kill_at = float("inf")
                process.signal_group(job.pid, signal.SIGKILL)

    # -- processes ----------------------------------------------------------------------------

    def _launch(self, job: Job, step: Step) -> None:
        state = step.state

        def on_pid(pid: int) -> None:
            found = process.stat_of(pid)
            job.state, job.pid, job.boot = state, pid, process.boot_id()
            job.pid_start = found[1] if found else 0
            if state == "R":
                job.session = pid
            if state == "E":
                self._save(job)  # teardown goes on whatever the disk says
            else:
                self._spool.save(job)

        try:
            words = process.launch(step.body, step.stdio, on_pid)
        except OSError as error:
            job.status = pbs.STATUS_NO_START if job.status is None else job.status
            job.reason = f"the batch system cannot start it: {error}"
            self._log(job, job.reason)
            if state == "E":
                self._finish(job, job.status, job.reason)
            else:
                self._epilogue(job)
            return
        pidfd = os.pidfd_open(job.pid)
        self._running[job.id] = Running(pidfd, words, step.then, time.monotonic() + step.limit)
        self._selector.register(pidfd, selectors.EVENT_READ, partial(self._ended, job))

    def _ended(self, job: Job) -> None:
        running = self._running.pop(job.id)
        self._selector.unregister(running.pidfd)
        os.close(running.pidfd)
        if job.state == "R":  # before the leader is reaped: its number is still this session's
            process.kill_session(job.pid, {os.geteuid(), job.uid}, job.pid_start)
        _, wait_status, usage = os.wait4(job.pid, 0)
        os.set_blocking(running.words, False)
        with contextlib.suppress(BlockingIOError):
            words = os.read(running.words, 4096).decode("utf-8", "replace")
            job.reason = words or job.reason
        os.close(running.words)
        if job.state == "R":
            cput = pbs.show_walltime(usage.ru_utime + usage.ru_stime)
            job.used = f"cput={cput},mem={usage.ru_maxrss}kb,vmem=0kb"
        running.then(job, wait_status)

    def _notice(self, job: Job, message: str) -> None:
        """Append a line to the job's error file, as the user, and keep it as the reason."""
        job.reason = message
        if job.interactive:
            return

        def body() -> None:
            process.become(job.uid)
            os.umask(job.umask)
            signal.alarm(5)  # a FIFO, a dead file server
            os.chdir("/")
            out, err = pbs.output_names(job.name, job.id)
            path, name = (job.out, out) if job.join == "oe" else (job.err, err)
            file = process.open_output(path, name, truncate=False)
            os.write(file, f"=>> vtorque: {job.id}: {printable(message)}\n".encode())

        self._aside(body, (self._null, self._null, self._null), lambda: None)

    def _aside(
        self, body: Callable[[], None], stdio: Sequence[int], then: Callable[[], None]
    ) -> None:
        """Run a process that is no step of a job; then call ``then``."""
        pids: list[int] = []
        os.close(process.launch(body, stdio, pids.append))
        pidfd = os.pidfd_open(pids[0])

        def ended() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            os.waitpid(pids[0], 0)
            then()

        self._selector.register(pidfd, selectors.EVENT_READ, ended)

    def _save(self, job: Job) -> None:
        try:
            self._spool.save(job)
        except OSError as error:
            self._log(job, f"state {job.state} is not on disk: {error}")

    def _log(self, job: Job, message: str) -> None:
        sys.stderr.write(f"vtorque local: {job.id}: {printable(message)}\n")
        sys.stderr.flush()
