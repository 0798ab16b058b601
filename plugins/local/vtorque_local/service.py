"""The service of ``local``: a queue with slots, and its socket. A thread for each job and client.

The kernel kills hooks and jobs when the service dies; the next service finds them in the spool,
tears them down and goes on with the queue. The protocol is in doc/local.md.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import re
import signal
import socket
import socketserver
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vtorque_core.api import UsageError, VtorqueError, printable, take_lock
from vtorque_core.api.job_files import File, Tree
from vtorque_core.api.setup_steps import make_directories
from vtorque_local import descriptors, mom
from vtorque_local.submitter import describe
from vtorque_pbs import convention as pbs

MAX_MESSAGE = 8 << 20  # bytes of a request: the script is the big part
MAX_TIME = 10.0  # seconds that a client may be silent
MAX_CLIENTS = 100  # connections of one user, with up to four descriptors each
MAX_JOBS = 1000  # of one user
MAX_ARGS = 10_000  # characters of -F: the wrapper's line must fit into a pipe, pipe(7)
MAX_TOKEN = 100_000  # characters of a request: MAX_ARG_STRLEN is 128 KiB, execve(2)
_TOKEN = re.compile(r"(vt1:[!-+.-~-]+)?", re.ASCII)


@dataclass(frozen=True)
class Setup:
    """Directories of socket and queue, what is run (``reap``: first of all), jobs at once.

    ``root_jobs``: accept jobs of root, as Torque does not. ``lock_wait``: seconds for another
    service to stop; ``poll``: seconds between looks whether this one has to.
    """

    run: Path
    spool: Path
    programs: mom.Programs
    reap: Sequence[str]
    slots: int = 1
    root_jobs: bool = False
    lock_wait: float = 5.0
    poll: float = 0.1


class Entry(mom.Task):
    """A job, queued or at work; ``directory`` is its own in the spool."""

    def __init__(self, directory: Path, job: mom.Job, *args: Any) -> None:
        super().__init__(job, *args)
        self.directory, self.done = directory, threading.Event()

    def save(self) -> None:
        """Put the job on disk. Raises HostFault."""
        _replace(self.directory / "job", self.job.encode())


class Service:
    """The batch system."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.spool, self.host = setup, setup.spool / "jobs", socket.gethostname()
        self.lock = threading.RLock()  # of the entries, and of what a queued job becomes
        self.entries: dict[str, Entry] = {}
        self.clients: list[int] = []  # uid of each connection
        self.stopping = False
        self._queue: queue.SimpleQueue[Entry] = queue.SimpleQueue()

    def open(self) -> None:
        """Take spool and socket. Raises HostFault if another service has them."""
        os.umask(0o077)
        for directory, mode in ((self.setup.run, 0o755), (self.setup.spool, 0o711)):
            make_directories(directory)
            directory.chmod(mode)  # a reap before us may have made it, for root alone
        self.spool.mkdir(exist_ok=True)
        self.spool.chmod(0o711)
        # One that is stopping still has it.
        take_lock(self.setup.spool / "lock", self.setup.lock_wait)
        path = self.setup.run / "local.sock"
        path.unlink(missing_ok=True)
        self._server = _Server(str(path), partial(_Client, self))
        path.chmod(0o666)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())

    def serve(self) -> None:
        """Run until told to stop: queued jobs stay queued, running ones are ended."""
        numbers = [int(path.name) for path in self.spool.iterdir() if path.name.isdecimal()]
        for directory in (self.spool / str(number) for number in sorted(numbers)):
            with contextlib.suppress(OSError, ValueError, TypeError):  # not quite a job
                job = mom.Job.decode((directory / "job").read_bytes())
                entry = self.entries[job.id] = Entry(directory, job, self.setup.programs)
                if job.state != "Q":
                    _thread(self._work, entry, entry.tear_down)
                elif job.want.interactive:  # its terminal has gone
                    self._finish(entry)
                else:
                    self._queue.put(entry)
        _thread(self._begin)
        self._server.serve_forever(poll_interval=self.setup.poll)
        running = [entry for entry in self.entries.values() if entry.job.state != "Q"]
        for entry in running:
            self.end(entry, "job killed: the batch system was stopped")
        for entry in running:
            entry.done.wait()
        self._server.server_close()  # waits until all clients have been told

    def stop(self) -> None:
        """Have :meth:`serve` return; no job starts any more."""
        self.stopping = True
        _thread(self._server.shutdown)

    def submit(self, message: dict[str, Any], uid: int, terminal: Sequence[int]) -> Entry:
        """Queue a job. Only what reaches a hook is checked: all else is used as the user."""
        script = base64.b64decode(message["script"], validate=True)
        want = describe(pbs.split_qsub([str(word) for word in message["argv"]]), script)
        environ = {str(name): str(value) for name, value in message["environ"].items()}
        if not _TOKEN.fullmatch(message["token"]):
            raise UsageError("the -vm request is damaged")
        for what, text, limit in (
            ("the -vm request, with the files it names,", message["token"], MAX_TOKEN),
            ("-F", want.args, MAX_ARGS),
        ):
            if len(text) > limit:
                raise UsageError(f"{what} has {len(text)} characters (limit: {limit})")
        if want.interactive != (len(terminal) == 3):
            raise UsageError("an interactive job, and no other, needs a terminal")
        if uid == 0 and not self.setup.root_jobs:
            raise UsageError("jobs of root are not accepted: submit as an ordinary user")
        if os.geteuid() not in (0, uid):
            raise UsageError(f"this batch system runs as uid {os.geteuid()} and for it only")
        with self.lock:
            if sum(entry.job.uid == uid for entry in self.entries.values()) >= MAX_JOBS:
                raise UsageError(f"you have {MAX_JOBS} jobs: wait for some to end")
            counter = self.setup.spool / "counter"
            taken = [int(path.name) for path in self.spool.iterdir() if path.name.isdecimal()]
            number = max(*taken, int(counter.read_text()) if counter.exists() else 0, 0) + 1
            job_id, directory = f"{number}.{self.host}", self.spool / str(number)
            files = (directory / f"{job_id}.SC", directory / "nodes")
            place = mom.Place("local", self.host, str(message["cwd"]), *files)
            job = mom.make_job(job_id, want, environ, message["token"], uid, place)
            _replace(counter, str(number).encode())  # never given out again
            nodes = f"{self.host}\n".encode() * (want.ppn or 1)
            Tree(str(directory)).create()
            File(str(files[0]), mode=0o500, uid=uid, content=script).create()
            File(str(files[1]), mode=0o444, content=nodes).create()
            entry = Entry(directory, job, self.setup.programs, terminal)
            entry.save()
            self.entries[job_id] = entry
            self._queue.put(entry)
        return entry

    def end(self, entry: Entry, reason: str) -> None:
        """End a job in whatever state."""
        with self.lock:
            entry.end(pbs.STATUS_DELETED, reason)
            if entry.job.state == "Q":
                self._finish(entry)

    def _begin(self) -> None:
        """Release what jobs have left that nobody knows any more, then let jobs run."""
        mom.run_root(self.setup.reap)
        for _ in range(self.setup.slots):
            _thread(self._slot)

    def _slot(self) -> None:
        while True:
            entry = self._queue.get()
            with self.lock:
                start = not self.stopping and entry.job.status is None
                entry.job.state = "P" if start else "Q"
            if start:
                self._work(entry, entry.run)

    def _work(self, entry: Entry, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a defect, which must not take the slot with it
            traceback.print_exc()
        self._finish(entry)

    def _finish(self, entry: Entry) -> None:
        with self.lock, contextlib.suppress(VtorqueError):
            if self.entries.pop(entry.job.id, None):
                Tree(str(entry.directory)).release()
        entry.done.set()


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    request_queue_size = 64


class _Client(socketserver.StreamRequestHandler):
    """One request, one line as the answer; who submits a job gets another at its end."""

    timeout = MAX_TIME

    def __init__(self, service: Service, *args: Any) -> None:
        self._service = service
        super().__init__(*args)

    def handle(self) -> None:
        """Serve the client; one that is slow or hostile holds up nobody else."""
        peer = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        uid = struct.unpack("3i", peer)[1]  # unix(7)
        self._service.clients.append(uid)
        terminal: list[int] = []
        with contextlib.ExitStack() as stack:
            stack.callback(_thread, self._let_go, uid, terminal)
            stack.enter_context(contextlib.suppress(OSError))  # it has gone
            entry = None
            try:
                if self._service.clients.count(uid) > MAX_CLIENTS:
                    raise UsageError(f"you have {MAX_CLIENTS} connections: wait for some to end")
                first, terminal[:] = descriptors.receive(self.connection, 3, mom.forking)
                message = json.loads(first + self.rfile.readline(MAX_MESSAGE))
                if message["op"] == "submit":
                    entry = self._service.submit(message, uid, terminal)
                    if terminal:  # before they are closed: the next client gets their numbers
                        stack.callback(entry.done.wait)
                        gone = "job killed: its terminal went away"
                        stack.callback(self._service.end, entry, gone)
                answer = {"id": entry.job.id} if entry else self._ask(uid, message)
            except VtorqueError as error:
                answer = {"error": str(error)}
            except Exception as error:  # whatever a hostile client sends
                answer = {"error": f"bad request: {type(error).__name__}: {printable(str(error))}"}
            self.connection.sendall(json.dumps(answer).encode() + b"\n")
            if entry:
                self._follow(entry)

    def _let_go(self, uid: int, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)  # blocks for as long as the client likes, with SO_LINGER, say
        self._service.clients.remove(uid)

    def _ask(self, uid: int, message: dict[str, Any]) -> dict[str, Any]:
        with self._service.lock:
            mine = [e for e in self._service.entries.values() if uid in (0, e.job.uid)]
        if message["op"] == "list":
            return {"jobs": [_line(entry.job) for entry in mine]}
        if message["op"] == "stop" and uid in (0, os.geteuid()):
            self._service.stop()
            return {}
        if message["op"] != "cancel":
            raise UsageError("only root may stop the batch system")
        found = [e for e in mine if message["id"] in (e.job.id, e.directory.name)]
        if not found:
            raise UsageError(f"{printable(str(message['id']), 80)}: you have no job of that id")
        self._service.end(found[0], "job killed: cancelled")
        return {}

    def _follow(self, entry: Entry) -> None:
        """Tell the client how the job ends, if it waits for that."""
        while not entry.done.wait(0.5) and not (self._service.stopping and entry.job.state == "Q"):
            self.connection.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                if not self.connection.recv(1):
                    return
        if entry.done.is_set():
            self.connection.settimeout(MAX_TIME)
            result = {"code": pbs.shell_code(entry.job.status or 0), "reason": entry.job.reason}
            self.connection.sendall(json.dumps(result).encode() + b"\n")


def _line(job: mom.Job) -> dict[str, Any]:
    seconds = time.time() - job.started if job.started else 0.0
    state = "R" if job.state == "P" else job.state  # as Torque shows it
    shown = {"id": job.id, "name": job.want.name, "owner": job.hook[1], "state": state}
    return shown | {"seconds": seconds}


def _replace(path: Path, content: bytes) -> None:
    File(str(path), replace=True, content=content).create()


def _thread(work: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=work, args=args, daemon=True).start()
