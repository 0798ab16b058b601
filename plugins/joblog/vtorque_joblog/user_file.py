"""A job's log in a directory of its user's, who may have put there whatever they like.

Root opens nothing there: a forked child does, which has become the user for good. It holds no file
of root's and no lock, ends by itself after seconds, and is left behind if the file system hangs (a
FUSE mount of the user's). The kernel lets no other process of the user look into it, since it has
changed its ids (prctl(2), PR_SET_DUMPABLE). Links, FIFOs, quotas are then the user's own affair.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import select
import signal
import stat
import threading
import time
from pathlib import Path

from vtorque_core.api_log import entry_of, one_line
from vtorque_core.api_node import HostFault

PAUSE = 1.0  # seconds from one child to the next, while lines come
PATIENCE = 5.0  # seconds for one child
MAX_BYTES = 8 << 20  # that one log adds to a file
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class UserFile(logging.Handler):
    """Collects lines and has a child append them, at most one a second."""

    def __init__(self, path: str, user: pwd.struct_passwd) -> None:
        super().__init__()
        self._path = path
        self._user = user
        self._lines: list[bytes] = []
        self._room = MAX_BYTES
        self._timer: threading.Timer | None = None
        self._broken = ""
        self._groups = os.getgrouplist(user.pw_name, user.pw_gid)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line; write it now, or with the next ones. Raises HostFault if that fails."""
        if self._broken:
            raise HostFault(self._broken)
        entry = entry_of(record)
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(entry["t"]))
        line = f"{clock} {entry['node']} {one_line(entry)}\n".encode()
        self._room -= len(line)
        if self._room >= 0:
            self._lines.append(line)
        if self._timer is None:
            self._timer = threading.Timer(PAUSE, self._later)
            self._timer.daemon = True
            self._timer.start()

    def _later(self) -> None:
        with self.lock or contextlib.nullcontext():
            self._timer = None
            with contextlib.suppress(HostFault):
                self._write()

    def close(self) -> None:
        """Write what is left. Raises HostFault."""
        super().close()
        if self._timer is not None:
            self._timer.cancel()
        with self.lock or contextlib.nullcontext():
            self._write()
        if self._broken:
            raise HostFault(self._broken)

    def _write(self) -> None:
        data, self._lines = b"".join(self._lines), []
        if data and not self._broken:
            error = append(self._path, data, self._user, self._groups)
            self._broken = f"{self._path}: {error}" if error else ""


def append(path: str, data: bytes, user: pwd.struct_passwd, groups: list[int]) -> str:
    """Append to a file as a user, in a child; return what went wrong, empty if nothing."""
    answer, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_the_user(path, data, user, groups, told)
    os.close(told)
    try:
        ready, _, _ = select.select([answer], [], [], PATIENCE)
        said = os.read(answer, 500).decode("utf-8", "replace") if ready else ""
    finally:
        os.close(answer)
    if not said:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _reap(pid)
    return {"+": "", "": f"no answer from its file system after {PATIENCE:g} s"}.get(said, said)


def _reap(pid: int) -> None:
    """Wait shortly for the end; one that hangs in the kernel is init's in the end."""
    end = time.monotonic() + 0.2
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < end:
        time.sleep(0.002)


def _be_the_user(
    path: str, data: bytes, user: pwd.struct_passwd, groups: list[int], told: int
) -> None:
    """Be the child: nothing of root's is left before the first look at the user's file system."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(PATIENCE) + 1)
        os.closerange(0, told)
        os.closerange(told + 1, 1 << 16)
        if os.geteuid() == 0:
            os.setgroups(groups)
            os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
            os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
        os.umask(0o077)
        os.chdir("/")
        os.write(told, _append(path, data).encode("utf-8", "replace")[:500])
    finally:
        os._exit(0)


def _append(path: str, data: bytes) -> str:
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, _FLAGS, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return "is no regular file"
        while data:
            data = data[os.write(descriptor, data) :]
        os.close(descriptor)  # a file system over a network tells only now that it is full
    except OSError as error:
        return error.strerror or "OSError"
    return "+"
