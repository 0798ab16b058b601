"""A job's log in a directory of its user's, who may have put there whatever they like.

Root opens nothing there: a forked child does, which has become the user for good. It holds no file
of root's and no lock, and ends with its pipe, or seconds after the file system (a FUSE mount of the
user's) has ceased to answer. The kernel lets no other process of the user look into it, since it
has changed its ids (prctl(2), PR_SET_DUMPABLE). Links, FIFOs, quotas are the user's own affair.
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

from vtorque_core.api import HostFault
from vtorque_joblog.api import entry_of, one_line

PATIENCE = 5  # seconds for each of the child's calls to the user's file system
MAX_BYTES = 8 << 20  # that one log adds to a file
_left: list[int] = []  # children that may not have ended
_reaping = threading.Lock()
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class UserFile(logging.Handler):
    """Gives lines to a child that appends them. It may block: each job's has a thread."""

    def __init__(self, path: str, user: pwd.struct_passwd) -> None:
        """Fork the child. Raises OSError."""
        super().__init__()
        self._path = path
        self._room = MAX_BYTES
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        source, self._lines = os.pipe()
        os.set_blocking(self._lines, False)
        self._answer, told = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _be_the_user(path, user, groups, source, told)
        os.close(source)
        os.close(told)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a line on. Raises HostFault once the child has failed."""
        entry = entry_of(record)
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(entry["t"]))
        line = f"{clock} {entry['node']} {one_line(entry)}\n".encode()
        self._room -= len(line)
        try:
            while line and self._room >= 0:
                self._await_room()
                line = line[os.write(self._lines, line) :]
        except BrokenPipeError:
            raise HostFault(f"{self._path}: {self._said()}") from None

    def _await_room(self) -> None:
        """Wait until the child has read; its user can stop it. Raises HostFault."""
        poller = select.poll()
        poller.register(self._lines, select.POLLOUT)
        if not poller.poll(PATIENCE * 1000):
            raise HostFault(f"{self._path}: nothing was written for {PATIENCE:g} s")

    def _said(self) -> str:
        """Return the child's word: "+" if all is written, else what is wrong."""
        ready, _, _ = select.select([self._answer], [], [], PATIENCE)
        said = os.read(self._answer, 500).decode("utf-8", "replace") if ready else ""
        return said or f"no answer from its file system after {PATIENCE:g} s"

    def close(self) -> None:
        """Wait until all is written. Raises HostFault with what went wrong."""
        super().close()
        if self._lines < 0:
            return
        os.close(self._lines)
        self._lines = -1
        said = self._said()
        os.close(self._answer)
        if said != "+":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # if it hangs in the kernel it is left behind
        _left.append(self._pid)
        _reap()
        if said != "+":
            raise HostFault(f"{self._path}: {said}")


def _reap() -> None:
    """Forget children that have ended, of all jobs."""
    with _reaping:
        for pid in list(_left):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            _left.remove(pid)


def _be_the_user(
    path: str, user: pwd.struct_passwd, groups: list[int], source: int, told: int
) -> None:
    """Be the child: nothing of root's is left before the first look at the user's file system."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        low, high = sorted((source, told))
        os.closerange(0, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, 1 << 16)
        if os.geteuid() == 0:
            os.setgroups(groups)
            os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
            os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
        os.umask(0o077)
        os.chdir("/")
        os.write(told, _append(path, source).encode("utf-8", "replace")[:500])
    finally:
        os._exit(0)


def _append(path: str, source: int) -> str:
    """Append what comes from a pipe until its end; return "+" or what is wrong."""
    try:
        signal.alarm(PATIENCE + 1)
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, _FLAGS, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return "is no regular file"
        signal.alarm(0)
        while data := os.read(source, 1 << 16):
            signal.alarm(PATIENCE + 1)
            while data:
                data = data[os.write(descriptor, data) :]
            signal.alarm(0)
        signal.alarm(PATIENCE + 1)
        os.close(descriptor)  # a file system over a network tells only now that it is full
    except OSError as error:
        return error.strerror or "OSError"
    return "+"
