"""The service of ``local``: a queue in one thread, driven by its socket, pidfds and timers.

Protocol: one JSON object for each line (at most MAX_MESSAGE bytes), one line as the answer. The
kernel says who asks (SO_PEERCRED, unix(7)). See doc/local.md.
"""

from __future__ import annotations

import base64
import fcntl
import grp
import json
import os
import pwd
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vtorque_core.batch import pbs_convention as pbs
from vtorque_core.errors import HostFault, UsageError, printable
from vtorque_core.local.runner import Commands, Limits, Runner
from vtorque_core.local.spool import Job, Spool

MAX_MESSAGE = 6 << 20  # bytes of one request: the script is the big part
MAX_TOKEN = 100_000  # characters: one argument has at most 128 KiB (MAX_ARG_STRLEN, execve(2))
MAX_CLIENTS = 256  # connections of one user
MAX_JOBS = 1000  # queued and running jobs of one user
MAX_WALLTIME = 10**8  # seconds
Handler = Callable[["Client", dict[str, Any]], dict[str, Any] | None]

_OPTIONAL = {"initdir": str, "shell": str, "token": str}
_GIVEN: dict[str, type[Any]] = dict.fromkeys(("name", "workdir", "out", "err", "join", "args"), str)
_GIVEN |= {"umask": int, "walltime": int, "ppn": int, "mem": str, "interactive": bool}


@dataclass(eq=False)
class Client:
    """One connection; ``job`` is what it waits for."""

    sock: socket.socket
    uid: int
    buffer: bytearray = field(default_factory=bytearray)
    fds: list[int] = field(default_factory=list)
    job: Job | None = None


class Service:
    """The batch system.

    Args:
        run: directory of ``local.sock``.
        spool: the queue's directory.
        limits: slots and times.
        commands: replaced in tests.
        root_jobs: accept jobs of root (Torque refuses them too).
    """

    def __init__(
        self,
        run: Path,
        spool: Path,
        *,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        commands: Commands = Commands(),  # noqa: B008
        root_jobs: bool = False,
    ) -> None:
        self._run, self._spool, self._root_jobs = run, Spool(spool), root_jobs
        self._host = socket.gethostname()
        self._clients: set[Client] = set()
        self._selector = selectors.DefaultSelector()
        self._runner = Runner(self._spool, self._selector, commands, limits, self._tell)
        self._jobs = self._runner.jobs
        self._stopping = False

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lock and the socket, read the spool. Raises HostFault if another runs."""
        self._spool.create()
        self._run.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._lock = os.open(self._spool.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HostFault(f"another service has {self._spool.root}; stop that one") from None
        path = self._run / "local.sock"
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o666)
        self._socket.listen(64)
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def serve(self) -> None:
        """Run until told to stop: queued jobs stay queued, running ones are ended."""
        wake = socket.socketpair()
        for end in wake:
            end.setblocking(False)
        signal.set_wakeup_fd(wake[1].fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self._selector.register(wake[0], selectors.EVENT_READ, partial(wake[0].recv, 64))
        self._runner.recover()
        while self._runner.busy or not self._stopping:
            if self._stopping:
                self._runner.end_all()
            else:
                self._runner.start_queued()
            timeout = self._runner.next_timer() - time.monotonic()
            for key, _ in self._selector.select(max(0.0, timeout)):
                key.data()
            self._runner.timers()
        (self._run / "local.sock").unlink(missing_ok=True)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    # -- clients ------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if sum(c.uid == uid for c in self._clients) >= MAX_CLIENTS:
            sock.close()
            return
        client = Client(sock, uid)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, client))

    def _drop(self, client: Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        for fd in client.fds:
            os.close(fd)
        if client.job is not None and client.job.interactive:
            self._runner.end(client.job, pbs.STATUS_DELETED, "the submitting terminal went away")

    def _read(self, client: Client) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(client.sock, 1 << 16, 3)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        client.fds += fds
        client.buffer += data
        if not data or len(client.fds) > 3 or len(client.buffer) > MAX_MESSAGE:
            self._drop(client)
            return
        while b"\n" in client.buffer and client in self._clients:
            line, _, client.buffer = client.buffer.partition(b"\n")
            self._send(client, self._answer(client, bytes(line)))

    def _tell(self, job: Job) -> None:
        for client in [c for c in self._clients if c.job is job]:
            client.job = None
            self._send(client, _result(job))

    def _send(self, client: Client, answer: dict[str, Any] | None) -> None:
        """Send without ever waiting: a client that does not read is dropped."""
        data = json.dumps(answer).encode() + b"\n"
        try:
            if answer is not None and client.sock.send(data) < len(data):
                self._drop(client)
        except OSError:
            self._drop(client)

    def _answer(self, client: Client, line: bytes) -> dict[str, Any] | None:
        handlers: dict[str, Handler] = {
            "submit": self._submit,
            "list": self._list,
            "cancel": self._cancel,
            "wait": self._wait,
            "shutdown": self._shutdown,
        }
        try:
            message = json.loads(line)
            return handlers[message["op"]](client, message)
        except UsageError as error:
            return {"error": str(error)}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return {"error": f"bad request: {type(error).__name__}: {printable(str(error))}"}
        except OSError as error:
            return {"error": f"the batch system cannot do it: {error}"}

    def _submit(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        job = _checked(message)
        script = base64.b64decode(message["script"], validate=True)
        account = pwd.getpwuid(client.uid)  # KeyError: no such user
        if self._stopping:
            raise UsageError("the batch system is shutting down")
        if client.uid == 0 and not self._root_jobs:
            raise UsageError("jobs of root are not accepted: submit as an ordinary user")
        if os.geteuid() not in (0, client.uid):
            raise UsageError(f"this batch system runs as uid {os.geteuid()} and for it only")
        if sum(j.uid == client.uid and j.state != "C" for j in self._jobs.values()) >= MAX_JOBS:
            raise UsageError(f"{account.pw_name} has {MAX_JOBS} jobs: wait for some to end")
        if job.interactive and len(client.fds) != 3:
            raise UsageError("an interactive job needs a terminal")
        job.number = self._spool.next_number()
        job.id, job.uid, job.submitted = f"{job.number}.{self._host}", client.uid, time.time()
        job.user, job.group = account.pw_name, _group(account.pw_gid)
        out, err = pbs.output_names(job.name, job.id)
        job.out = os.path.join(job.workdir, job.out or out)  # noqa: PTH118 (the user's text)
        job.err = os.path.join(job.workdir, job.err or err)  # noqa: PTH118
        self._spool.write_files(job, script, f"{self._host}\n" * (job.ppn or 1))
        self._spool.save(job)
        self._jobs[job.id] = job
        if job.interactive:
            self._runner.terminals[job.id], client.fds, client.job = client.fds, [], job
        return {"id": job.id}

    def _list(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        mine = [j for j in self._jobs.values() if client.uid in (0, j.uid) and j.state != "C"]
        return {"jobs": [_line(job) for job in mine]}

    def _cancel(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        self._runner.end(self._own(client, message), pbs.STATUS_DELETED, "cancelled")
        return {}

    def _wait(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        job = self._own(client, message)
        if job.state == "C":
            return _result(job)
        client.job = job
        return None

    def _shutdown(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        if client.uid not in (0, os.geteuid()):
            raise UsageError("only root may stop the batch system")
        self._stop()
        return {}

    def _own(self, client: Client, message: dict[str, Any]) -> Job:
        wanted = str(message["id"])
        job = self._jobs.get(wanted) or self._jobs.get(f"{wanted}.{self._host}")
        if job is None or client.uid not in (0, job.uid):
            raise UsageError(f"{printable(wanted, 80)}: you have no job of that id")
        return job


def _checked(message: dict[str, Any]) -> Job:
    """Return the job that a message asks for, every field checked.

    Raises UsageError, ValueError.
    """
    given = {key: _typed(message[key], kind, key) for key, kind in _GIVEN.items()}
    for key, kind in _OPTIONAL.items():
        given[key] = None if message[key] is None else _typed(message[key], kind, key)
    environ = _typed(message["environ"], dict, "environ")
    for name, value in environ.items():
        if not name or "=" in name or "\0" in name + _typed(value, str, name):
            raise ValueError("a variable cannot be one")
    job = Job(environ=environ, **given)
    job.name = pbs.default_job_name(job.name)
    if job.token is not None and pbs.request_token({"other": job.token}) != job.token:
        raise ValueError("token is not a request")
    if len(job.token or "") > MAX_TOKEN:
        raise UsageError(f"the -vm request has {len(job.token or '')} characters of {MAX_TOKEN}")
    if not 0 <= job.walltime <= MAX_WALLTIME or not 0 <= job.ppn <= 4096:
        raise UsageError("-l: walltime or ppn is too large")
    if job.mem:
        pbs.mem_mib(job.mem)
    if job.join not in ("n", "oe", "eo") or not 0 <= job.umask <= 0o777:
        raise ValueError("join or umask")
    if not job.workdir.startswith("/"):
        raise ValueError("workdir is not absolute")
    return job


def _typed(value: Any, kind: type[Any], key: str) -> Any:
    if type(value) is not kind or (kind is str and "\0" in value):
        raise ValueError(f"{key} is not {kind.__name__}")
    return value


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _line(job: Job) -> dict[str, Any]:
    seconds = time.time() - job.started if job.started else 0.0
    state = "R" if job.state == "P" else job.state  # Torque: R begins with the prologue
    return {"id": job.id, "name": job.name, "owner": job.user, "state": state, "seconds": seconds}


def _result(job: Job) -> dict[str, Any]:
    status = job.status or 0
    return {"status": status, "code": pbs.shell_code(status), "reason": job.reason}
