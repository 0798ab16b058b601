"""Accept the service's clients and start a process with the user's uid for each.

``python -I -m vtorque_local.acceptor LISTENER CHANNEL``, started by the service as root. It is
single-threaded and has no secrets in memory. It reads nothing from clients, and closes a connection
only while another process has the connection open, too. The last close(2) can block, if a client
has sent descriptors of a FUSE file system or set SO_LINGER. Therefore the client's process
(:mod:`vtorque_local.client`) reads from the connection and closes it last.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pwd
import resource
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from vtorque_local import client

HEAD = struct.Struct("=II")  # message to the service with a client's descriptors: uid, pid
MAX_CLIENTS = 100  # connections of one user
MAX_STUCK = 4  # processes of one user that survive SIGKILL
READ_TIME = 30.0  # seconds that a client's process may take to read its request
KILL_TIME = 2.0  # seconds until a killed process counts as stuck
LEAVE_TIME = 2.0  # seconds for a process to report the service's end to its client
MAX_TRAY = 256  # maximum number of refused connections that one process closes
TRAY_TIME = 1.0  # seconds until refused connections are closed, at most
LIMITS = {  # limits of a client's process, which parses input
    resource.RLIMIT_AS: 256 << 20,  # bytes of address space
    resource.RLIMIT_CPU: 10,  # seconds
    resource.RLIMIT_FSIZE: 9 << 20,  # bytes of one file: script, environment
    resource.RLIMIT_CORE: 0,
}
_PR_SET_PDEATHSIG = 1


@dataclass
class ClientProcess:
    """A process that serves one client (:mod:`vtorque_local.client`).

    Attributes:
        reading: Pipe that the process closes after its answer; -1 once it is closed.
        until: Monotonic time at which the process is killed. After the kill, the time at which the
            process counts as stuck.
    """

    pid: int
    uid: int
    reading: int
    until: float
    killed: bool = False


class Acceptor:
    """The state of the acceptor: client processes, and connections that wait or were refused."""

    def __init__(self, listener: socket.socket, channel: socket.socket) -> None:
        self._listener, self._channel = listener, channel
        self._children: dict[int, ClientProcess] = {}
        self._trays: dict[int, list[socket.socket]] = {}
        self._waiting: dict[int, list[socket.socket]] = {}
        listener.setblocking(False)
        self._tray_end = 0.0
        self._listening = True
        self._poll = select.poll()
        for each in (listener, channel):
            self._poll.register(each, select.POLLIN)

    def run(self) -> None:
        """Accept clients until the service ends, then wait until all client processes have ended.

        Does not wait for processes that survive SIGKILL.
        """
        while self._listening or any(child.until for child in self._children.values()):
            self._start_next()
            ready = [descriptor for descriptor, _ in self._poll.poll(self._wait())]
            # Handle events that close descriptors first: new ones could reuse numbers in ``ready``.
            for descriptor in sorted(ready, key=self._is_listener):
                if self._listening and descriptor == self._channel.fileno():
                    self._stop_listening()
                elif self._is_listener(descriptor):
                    self._accept()
                elif descriptor in self._children:
                    self._reap(descriptor)
                elif descriptor in (child.reading for child in self._children.values()):
                    self._forget_reader(descriptor)
            self._look_at_the_clock()

    def _is_listener(self, descriptor: int) -> bool:
        return self._listening and descriptor == self._listener.fileno()

    def _stop_listening(self) -> None:
        self._listening = False
        for each in (self._channel, self._listener):
            self._poll.unregister(each)
            each.close()
        for child in self._children.values():
            child.until = child.until or time.monotonic() + LEAVE_TIME

    def _wait(self) -> int | None:
        if self._waiting:
            return 0
        ends = [child.until for child in self._children.values() if child.until]
        if self._trays:
            ends.append(self._tray_end)
        return max(0, int((min(ends) - time.monotonic()) * 1000) + 1) if ends else None

    def _accept(self) -> None:
        """Accept or refuse pending connections; `_start_next` serves the users in turn."""
        with contextlib.suppress(OSError):  # none is left, or the client has disconnected
            for _ in range(MAX_TRAY):
                connection, _ = self._listener.accept()
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                uid = struct.unpack("3i", peer)[1]  # unix(7)
                if reason := self._refusal(uid):
                    self._refuse(connection, uid, reason)
                else:
                    self._waiting.setdefault(uid, []).append(connection)

    def _start_next(self) -> None:
        if not self._waiting:
            return
        uid = next(iter(self._waiting))
        mine = self._waiting.pop(uid)
        connection = mine.pop(0)
        if mine:
            self._waiting[uid] = mine  # reinserted at the end
        try:
            self._start(connection, uid)
        except OSError as error:
            reason = f"the batch system cannot start a process: {error.strerror}"
            self._refuse(connection, uid, reason)

    def _refusal(self, uid: int) -> str:
        mine = [child for child in self._children.values() if child.uid == uid]
        if os.geteuid() not in (0, uid):
            return f"this batch system accepts jobs of uid {os.geteuid()} only"
        stuck = [str(child.pid) for child in mine if child.killed and not child.until]
        if len(stuck) > MAX_STUCK:
            return (
                f"your processes {', '.join(stuck)} survive SIGKILL: they wait for a file "
                "system or a socket; unmount or close it first"
            )
        if len(mine) + len(self._waiting.get(uid, ())) >= MAX_CLIENTS:
            return f"you have {MAX_CLIENTS} connections: wait for some to end"
        return ""

    def _refuse(self, connection: socket.socket, uid: int, reason: str) -> None:
        with contextlib.suppress(OSError):
            connection.send(json.dumps({"error": reason}).encode() + b"\n", socket.MSG_DONTWAIT)
            connection.shutdown(socket.SHUT_RDWR)
        if not self._trays:
            self._tray_end = time.monotonic() + TRAY_TIME
        tray = self._trays.setdefault(uid, [])
        tray.append(connection)
        if len(tray) >= MAX_TRAY:
            self._start_closer(uid)

    def _start_closer(self, uid: int) -> None:
        tray = self._trays.pop(uid)
        try:
            self._fork(uid, tray, ())
        except OSError:  # no process available: retry later
            self._trays[uid] = tray
            self._tray_end = time.monotonic() + TRAY_TIME

    def _start(self, connection: socket.socket, uid: int) -> None:
        kind = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        opened = _pipes(2)
        asked, ask, heard, tell = opened
        try:
            opened += [os.memfd_create(name, kind) for name in ("script", "rest")]
            pid = self._fork(uid, [connection], (ask, heard, *opened[4:]))
            with contextlib.suppress(OSError):  # the service is ending
                handle = next(each for each, child in self._children.items() if child.pid == pid)
                its = [asked, tell, handle, *opened[4:]]
                socket.send_fds(self._channel, [HEAD.pack(uid, pid)], its)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _fork(self, uid: int, connections: list[socket.socket], service: tuple[int, ...]) -> int:
        """Start a process of the user that takes over the connections; return its pid.

        ``service``: the descriptors of the child's ``ServiceChannel``; if empty, the child only
        closes the connections. The acceptor must never block, but closing the last descriptor of a
        connection can block. Therefore the child keeps the connections open, and waits until the
        acceptor has closed its own descriptors of the connections.
        """
        reading, read, ready, say_ready, go, say_go = pipes = _pipes(3)
        try:
            pid = os.fork()
        except OSError:
            for descriptor in pipes:
                os.close(descriptor)
            raise
        if pid == 0:
            _be_the_users(uid, connections, service, (read, say_ready, go))
        for descriptor in (read, say_ready, go):
            os.close(descriptor)
        os.read(ready, 1)
        for connection in connections:
            connection.close()
        with contextlib.suppress(BrokenPipeError):  # the child was killed
            os.write(say_go, b"g")
        for descriptor in (ready, say_go):
            os.close(descriptor)
        handle = os.pidfd_open(pid)
        self._children[handle] = ClientProcess(pid, uid, reading, time.monotonic() + READ_TIME)
        for descriptor in (handle, reading):
            self._poll.register(descriptor, select.POLLIN)
        return pid

    def _forget_reader(self, reading: int) -> None:
        for child in self._children.values():
            if child.reading == reading:
                child.until, child.reading = 0.0, -1
        self._forget(reading)

    def _reap(self, handle: int) -> None:
        child = self._children.pop(handle)
        os.waitid(os.P_PIDFD, handle, os.WEXITED)
        self._forget(handle)
        if child.reading >= 0:
            self._forget(child.reading)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        os.close(descriptor)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for handle, child in self._children.items():
            if child.until and now >= child.until:
                child.until = 0.0 if child.killed else now + KILL_TIME
                child.killed = True
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        if self._trays and now >= self._tray_end:
            for uid in list(self._trays):
                self._start_closer(uid)


def _pipes(count: int) -> list[int]:
    ends: list[int] = []
    try:
        for _ in range(count):
            ends += os.pipe()
    except OSError:
        for end in ends:
            os.close(end)
        raise
    return ends


def _be_the_users(
    uid: int,
    connections: list[socket.socket],
    service: tuple[int, ...],
    pipes: tuple[int, int, int],
) -> NoReturn:
    try:
        read, say_ready, go = pipes
        _close_all_but({read, say_ready, go, *service, *(each.fileno() for each in connections)})
        os.write(say_ready, b"r")
        os.read(go, 1)
        before = _switch_user(uid)
        if service:
            client.serve(connections[0], client.ServiceChannel(*service), read, before)
    finally:
        if os.geteuid() == 0:  # _switch_user failed: switch at least before close(2)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os._exit(0)


def _close_all_but(kept: set[int]) -> None:
    null = os.open(os.devnull, os.O_RDWR)  # also for tracebacks, which may contain user text
    for target in range(3):
        os.dup2(null, target)
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _switch_user(uid: int) -> client.Limits:
    """Switch to the user, and lower this process's soft limits to :data:`LIMITS`.

    Returns the previous limits, which the job gets.
    """
    if os.geteuid() == 0:
        account = pwd.getpwuid(uid)
        os.setgroups(os.getgrouplist(account.pw_name, account.pw_gid))
        os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
        os.setresuid(uid, uid, uid)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chdir("/")
    os.umask(0o077)
    before = {kind: resource.getrlimit(kind) for kind in LIMITS}
    for kind, (_, hard) in before.items():
        resource.setrlimit(kind, (LIMITS[kind] if hard < 0 else min(LIMITS[kind], hard), hard))
    return before


_prctl = ctypes.CDLL(None).prctl


def main() -> None:
    """Run the acceptor."""
    listener, channel = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.freeze()  # avoids copies of present objects after a fork
    Acceptor(listener, channel).run()


if __name__ == "__main__":
    main()
