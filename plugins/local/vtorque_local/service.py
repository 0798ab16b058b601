"""The service of ``local``, which queues jobs and runs a limited number of them at a time.

For each client (such as ``vsub``), a process with the client's uid parses the client's input. One
thread of the service waits for these processes. Each running job has its own thread. If the service
dies, the kernel kills hooks and jobs. The next service tears these jobs down and continues the
queue. For the protocol, see :mod:`vtorque_local.client`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import Paths, UsageError, VtorqueError, printable, take_lock
from vtorque_core.api.job_files import Tree
from vtorque_core.api.setup_steps import make_directories
from vtorque_local import acceptor, mom, order
from vtorque_local.entry import GIVEN, LocalClient, QueueEntry, number_of, replace_file
from vtorque_local.job import LocalJob, is_meant, keep_end, make_job, put_files
from vtorque_pbs import convention as pbs

MAX_JOBS = 1000  # of one user
MAX_SPOOL = 64 << 20  # bytes of all scripts and environments of one user's jobs
BACKLOG = 4096  # pending connections
WAIT_TIME = 10.0  # seconds until a waiting job is retried, unless a job ends first
LEAVE_TIME = 5.0  # seconds to notify clients of the service's end
ACCEPTOR = (sys.executable, "-I", "-m", "vtorque_local.acceptor")


@dataclass(frozen=True)
class Setup:
    """Configuration of the service.

    Attributes:
        run: Directory of the socket.
        spool: Directory of the queue.
        reap: Command that releases resources of ended jobs. Runs before any job.
        slots: Maximum number of running jobs.
        root_jobs: True to accept jobs of root, unlike Torque.
        lock_wait: Seconds to wait for another service to stop.
        idle: Exit after this many seconds without jobs and clients.
        acceptor: Command that runs :mod:`vtorque_local.acceptor`, without its arguments.
    """

    run: Path
    spool: Path
    programs: mom.JobPrograms
    reap: Sequence[str]
    slots: int = 1
    root_jobs: bool = False
    lock_wait: float = 5.0
    idle: float | None = None
    acceptor: Sequence[str] = ACCEPTOR


class LocalService:
    """The service: its queue, its clients and its running jobs."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.spool, self.host = setup, setup.spool / "jobs", socket.gethostname()
        self.entries: dict[str, QueueEntry] = {}
        self.stuck: dict[int, list[mom.UserProcess]] = {}
        self._clients: dict[int, LocalClient] = {}
        self._working: set[QueueEntry] = set()
        self._ended: queue.SimpleQueue[tuple[QueueEntry, bool]] = queue.SimpleQueue()
        self._served: dict[int, int] = {}  # uid: number of its last start
        self._reaped = self._stopping = False
        # Signals, too, write to this pipe (signal.set_wakeup_fd): a handler in Python does not end
        # the wait for events if the signal arrives just before that wait.
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def open(self) -> None:
        """Lock the spool and open the socket. Raise HostFault if another service is running."""
        os.umask(0o077)
        for directory, mode in ((self.setup.run, 0o755), (self.setup.spool, 0o711)):
            make_directories(directory)
            directory.chmod(_mode(mode))  # an earlier reap may have created it with mode 0700
        self.spool.mkdir(exist_ok=True)
        self.spool.chmod(_mode(0o711))
        # A service that is stopping still holds the lock.
        self._lock = take_lock(self.setup.spool / "lock", self.setup.lock_wait)
        self._listen()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Run until the idle time or :meth:`stop`. End running jobs; queued jobs stay queued."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client needs several
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)  # the daemon, not its parent
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._handle_wake)
        self._start_acceptor()
        self._find_jobs()
        _thread(self._reap)
        while not (self._stopping and not self._working):
            self._begin_jobs()
            if not self._wait_event():
                (self.setup.run / "local.sock").unlink(
                    missing_ok=True
                )  # new clients start another service
                break
        self._channel.shutdown(socket.SHUT_WR)  # the acceptor stops and exits
        for client in list(self._clients.values()):
            self._let_go(client)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._acceptor.wait(LEAVE_TIME)

    def stop(self) -> None:
        """Start no more jobs, and make :meth:`serve` return."""
        self._stopping = True
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so it wakes the service
            os.write(self._waker, b"\0")

    def submit(self, client: LocalClient, want: order.LocalSubmission) -> str:
        """Queue a job, or the tasks of an array. Return the id."""
        uid = client.uid
        if uid == 0 and not self.setup.root_jobs:
            raise UsageError("jobs of root are not accepted: submit as an ordinary user")
        script, rest, size = client.files()
        names = [f"[{task}]" for task in want.tasks()[0]] or [""]
        self._check_budget(uid, len(names), size)
        counter = self.setup.spool / "counter"
        given = int(counter.read_text()) if counter.exists() else 0
        number = max([given, *(number_of(path)[0] for path in self._directories())]) + 1
        replace_file(counter, str(number).encode())  # never reused
        entries: list[QueueEntry] = []
        try:
            for name in names:
                job_id = f"{number}{name}.{self.host}"
                directory = self.spool / pbs.sequence(job_id)
                job = make_job(job_id, want, uid, self.host, directory, size)
                entries.append(self._entry(client, job, directory))
                put_files(directory, job, script, rest, self.host, want.ppn or 1)
                entries[-1].save()
        except BaseException:
            for entry in entries:
                self._remove(entry.directory)
            raise
        client.close_files()
        client.entries = entries
        self.entries |= {entry.job.id: entry for entry in entries}
        return entries[0].job.array

    def end(self, entry: QueueEntry, reason: str) -> None:
        """End a job in any state."""
        entry.end(pbs.STATUS_DELETED, reason)
        if entry not in self._working:
            self._finish(entry)

    def _check_budget(self, uid: int, more: int, size: int) -> None:
        mine = [entry.job.size for entry in self.entries.values() if entry.job.uid == uid]
        if len(mine) + more > MAX_JOBS:
            raise UsageError(
                f"you have {len(mine)} jobs and submit {more} more, but the limit is {MAX_JOBS}: "
                "wait until some of them end"
            )
        if (total := sum(mine) + more * size) > MAX_SPOOL:
            raise UsageError(
                f"scripts and environments of your jobs have {total} bytes "
                f"(limit: {MAX_SPOOL}): wait for some to end, or submit without -V"
            )
        if left := self._stuck_processes(uid):
            pids = ", ".join(str(process.session) for process in left)
            raise UsageError(
                f"your processes {pids} survived SIGKILL: submit again after they have ended"
            )

    def _stuck_processes(self, uid: int) -> list[mom.UserProcess]:
        """Return the user's processes that survived SIGKILL, or [] if at most MAX_STUCK did."""
        left = []
        for process in self.stuck.pop(uid, []):
            if process.wait_end(0):
                process.result()
            else:
                left.append(process)
        if left:
            self.stuck.setdefault(uid, []).extend(left)
        return left if len(left) > acceptor.MAX_STUCK else []

    def _directories(self) -> list[Path]:
        return sorted(filter(number_of, self.spool.iterdir()), key=number_of)

    def _entry(self, client: LocalClient | None, job: LocalJob, directory: Path) -> QueueEntry:
        return QueueEntry(client, job, self.setup.programs, directory, self.stuck)

    def _listen(self) -> None:
        path = self.setup.run / "local.sock"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(BACKLOG)
        path.chmod(_mode(0o666))

    def _start_acceptor(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine = (self._listener.fileno(), theirs.fileno())
        self._acceptor = subprocess.Popen(
            [*self.setup.acceptor, *map(str, mine)],
            env=mom.HOOK_ENVIRON,
            pass_fds=mine,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._listener.close()
        theirs.close()
        self._selector.register(self._channel, selectors.EVENT_READ, self._accept_client)

    def _find_jobs(self) -> None:
        for directory in self._directories():
            with contextlib.suppress(OSError, ValueError, TypeError):  # an incomplete job
                job = LocalJob.decode((directory / "job").read_bytes())
                entry = self.entries[job.id] = self._entry(None, job, directory)
                if job.state == "Q" and job.interactive:  # its terminal is gone
                    self._finish(entry)

    def _reap(self) -> None:
        mom.run_root(self.setup.reap)
        self._reaped = True
        self._wake_up()

    def _wait_event(self) -> bool:
        """Wait for an event, or until a waiting job must be retried.

        Return False after the idle time.
        """
        idle = self._reaped and not self.entries and not self._clients
        times = [entry.again for entry in self.entries.values() if entry.again]
        full = self._stopping or len(self._working) >= self.setup.slots
        left = max(0.0, min(times) - time.monotonic()) if times and not full else None
        if idle:
            left = self.setup.idle
        came = self._selector.select(left)
        for key, _ in came:
            key.data()
        return bool(came) or not idle

    def _handle_wake(self) -> None:
        os.read(self._wake, 4096)
        with contextlib.suppress(queue.Empty):
            while True:
                entry, done = self._ended.get_nowait()
                self._working.discard(entry)
                entry.again = 0.0 if done else time.monotonic() + WAIT_TIME
                if done:
                    self._finish(entry)
        if self._stopping:
            for entry in list(self._working):
                entry.end(pbs.STATUS_DELETED, "job killed: the batch system was stopped")

    def _accept_client(self) -> None:
        message, found, *_ = socket.recv_fds(self._channel, acceptor.HEAD.size, GIVEN)
        if not message:
            sys.stderr.write("vtorque: the process that accepts clients ended; starting another\n")
            self._selector.unregister(self._channel)
            self._channel.close()
            self._listen()
            self._start_acceptor()
            return
        if len(found) != GIVEN:  # too many open files: the closed pipes end the client's process
            for descriptor in found:
                os.close(descriptor)
            return
        uid, pid = acceptor.HEAD.unpack(message)
        client = LocalClient(uid, pid, found)
        self._clients[client.asked] = client
        self._selector.register(
            client.asked, selectors.EVENT_READ, lambda: self._handle_input(client)
        )

    def _handle_input(self, client: LocalClient) -> None:
        try:
            data = os.read(client.asked, order.MAX_RECORD)
        except OSError:
            data = b""
        client.data += data
        try:
            words, client.data = order.unpack(client.data)
            if words and client.answered:
                self._record_user_end(client, order.exit_status(words))
            elif words:
                client.answered = True
                client.send(self._answer(client, words))
        except VtorqueError as error:
            client.send({"error": str(error)})
            data = b""
        except Exception as error:  # caused by the client's input
            client.send({"error": f"bad request: {printable(str(error), 200)}"})
            data = b""
        if not data:
            self._drop_client(client)

    def _record_user_end(self, client: LocalClient, code: int) -> None:
        terminal = client.terminal()
        if not terminal:
            raise UsageError("bad request: there is no such job")
        terminal.tell_end(code)

    def _drop_client(self, client: LocalClient) -> None:
        for entry in [entry for entry in client.entries if entry.job.interactive]:
            if entry.terminal:
                entry.terminal.tell_end(None)
            self.end(entry, "job killed: the terminal was closed")
        self._let_go(client)

    def _let_go(self, client: LocalClient) -> None:
        if self._clients.pop(client.asked, None):
            self._selector.unregister(client.asked)
            client.close()

    def _answer(self, client: LocalClient, words: list[str]) -> dict[str, Any]:
        uid, what = client.uid, words[0]
        mine = [e for e in self.entries.values() if uid in (0, e.job.uid)]
        if what == "submit":
            return {"id": self.submit(client, order.LocalSubmission.parse(words))}
        if what == "list":
            return {"jobs": [_line(entry.job, self._why_queued(entry.job)) for entry in mine]}
        if what == "stop" and uid in (0, os.geteuid()):
            self.stop()
            return {}
        if what == "cancel" and len(words) == 2:
            found = [entry for entry in mine if is_meant(words[1], entry.job.id)]
            if not found:
                raise UsageError(f"{printable(words[1], 80)}: you have no job with this id")
            for entry in found:
                self.end(entry, "job killed: cancelled")
            return {}
        if what == "stop":
            raise UsageError("only root may stop the batch system")
        raise UsageError(f"bad request: {printable(what, 80)}")

    def _why_queued(self, job: LocalJob) -> str:
        at_work = [entry.job.array for entry in self._working]
        if job.reason:
            return job.reason
        if not self._reaped:
            return "the batch system is starting"
        if job.at_once and at_work.count(job.array) >= job.at_once:
            return f"{job.at_once} tasks of its array run already (-t ...%{job.at_once})"
        full = len(at_work) >= self.setup.slots
        return f"all slots are in use ([plugin.local] slots = {self.setup.slots})" if full else ""

    def _begin_jobs(self) -> None:
        """Tear down jobs of a killed service, and start queued jobs up to the limit ``slots``.

        Each started job is the oldest of the least recently served user.
        """
        now = time.monotonic()
        ready = [e for e in self.entries.values() if e not in self._working and e.again <= now]
        for entry in ready:
            if entry.job.state != "Q":  # lost by the previous service
                self._work(entry)
        held = {uid for uid in {entry.job.uid for entry in ready} if self._stuck_processes(uid)}
        queued = [e for e in ready if e.job.state == "Q" and e.job.uid not in held]
        while self._reaped and not self._stopping and len(self._working) < self.setup.slots:
            at_work = Counter(entry.job.array for entry in self._working)
            queued = [e for e in queued if at_work[e.job.array] < (e.job.at_once or MAX_JOBS)]
            if not queued:
                return
            entry = min(queued, key=lambda e: (self._served.get(e.job.uid, 0), e.number))
            self._served[entry.job.uid] = max(self._served.values(), default=0) + 1
            queued.remove(entry)
            self._work(entry)

    def _work(self, entry: QueueEntry) -> None:
        def run() -> None:
            done = True
            try:
                done = entry.work()
            except Exception:  # a bug must not occupy the slot forever
                traceback.print_exc()
            self._ended.put((entry, done))
            self._wake_up()

        entry.again = 0.0
        self._working.add(entry)
        try:
            _thread(run)
        except RuntimeError:  # too many processes: retry later
            self._working.discard(entry)
            entry.again = time.monotonic() + WAIT_TIME

    def _finish(self, entry: QueueEntry) -> None:
        if self.entries.pop(entry.job.id, None) is None:
            return
        job = entry.job
        keep_end(job, Paths(self.setup.spool.parent, self.setup.run), self.host)
        self._remove(entry.directory)
        if entry.client:
            entry.client.tell_end(entry, pbs.shell_code(job.status or 0), job.reason)
        for each in self.entries.values():  # resources may be free now
            each.again = 0.0

    def _remove(self, directory: Path) -> None:
        """Truncate and remove a job's files. An open file would keep its disk blocks otherwise."""
        for path in directory.glob("*"):
            with contextlib.suppress(OSError):
                os.truncate(path, 0)
        with contextlib.suppress(VtorqueError):
            Tree(str(directory)).release()


def _mode(ours: int) -> int:
    """Return mode ``ours``; in a personal service, without permissions of group and others."""
    return ours if os.geteuid() == 0 else ours & 0o700


def _line(job: LocalJob, why_queued: str) -> dict[str, Any]:
    seconds = time.time() - job.started if job.started else 0.0
    state = "R" if job.state == "P" else job.state  # as Torque shows it
    shown = {"id": job.id, "name": job.name, "owner": job.hook[1], "state": state}
    reason = why_queued if state == "Q" else ""
    return shown | {"seconds": seconds, "reason": reason}


def _thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()
