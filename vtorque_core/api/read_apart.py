"""Public: read what a user or a guest wrote in a process without rights. On the node, as root.

Root parses nothing of theirs: it has :func:`read_apart` run a function that does, and takes bytes
from it, each of which it checks as the value that it is to be.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from vtorque_core.base.errors import HostFault, printable
from vtorque_core.base.run_tool import NOBODY
from vtorque_core.base.trust import effective_root

MAX_VALUE = 128 << 10  # bytes of one value
CPU = 10  # seconds of CPU time for one reading
_MEMORY = 256 << 20  # bytes of address space beside what its starter has
_MAX_CALL = 192 << 10  # bytes: below what one message may have (net.core.wmem_max, 212992)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38  # prctl(2)
_asking: tuple[int, socket.socket] | None = None  # whose process's, and where it asks


class Unreadable(HostFault):
    """What was to be read is not what it should be; the reader's words, printable."""


@contextlib.contextmanager
def reader() -> Iterator[None]:
    """Have a process of nobody's that reads. To be entered without threads, before any secret.

    Raises HostFault if the host cannot fork.
    """
    global _asking  # noqa: PLW0603 - one for all who read in this process
    before, parent = _asking, os.getpid()
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with its:
            try:
                pid = os.fork()
            except OSError as error:
                raise HostFault(f"cannot fork: {error.strerror}") from None
            if pid == 0:
                _serve(its, parent)
        _asking = parent, ours
        try:
            yield
        finally:
            _asking = before
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)  # and with it what it has started
                os.waitpid(pid, 0)


def read_apart(
    work: Callable[..., Iterable[bytes]], *args: object, until: float, files: Sequence[int] = ()
) -> Iterator[bytes]:
    """Yield what ``work(*args, *files)`` yields in a process of its own, one after the other.

    Args:
        work: a function of a module's, which parses; it is nobody, and has 10 s of CPU time.
        args: what can be pickled, at most 192 KiB.
        until: when it must have ended, in time.monotonic() seconds.
        files: descriptors that it gets copies of.

    At most 128 KiB each. Raises Unreadable: with the reader's reason, or it is late or broken.
    """
    if _asking is None or _asking[0] != os.getpid():
        with reader():
            yield from read_apart(work, *args, until=until, files=files)
        return
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with its:
            socket.send_fds(_asking[1], [pickle.dumps((work, args))], [its.fileno(), *files])
        waiting = select.poll()
        waiting.register(ours, select.POLLIN)
        while waiting.poll(max(0.0, until - time.monotonic()) * 1000):
            said = ours.recv(MAX_VALUE + 1)
            if said == b".":
                return
            if said[:1] != b"+":
                raise Unreadable(printable(said[1:].decode("utf-8", "replace"), 2000) or "it broke")
            yield said[1:]
    raise Unreadable(f"{getattr(work, '__name__', 'reading')} has not ended in time")


def _serve(source: socket.socket, parent: int) -> NoReturn:
    """Be the process: fork one that works for each message, until killed."""
    try:
        _have_no_rights(source.fileno())
        _die_with(parent)
        mine = os.getpid()
        while True:
            call, files, _, _ = socket.recv_fds(source, _MAX_CALL, 16)
            if not call:
                break
            if os.fork() == 0:
                _die_with(mine)
                _work(call, *files)
            for file in files:
                os.close(file)
    finally:
        os._exit(1)


def _work(call: bytes, answer: int, *files: int) -> NoReturn:
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
        with socket.socket(fileno=answer) as told:
            try:
                work, args = pickle.loads(call)  # noqa: S301 - root's word
                for value in work(*args, *files):
                    told.send(b"+" + value)
                told.send(b".")
            except Exception as error:
                said = str(error) or type(error).__name__
                told.send(b"-" + said.encode("utf-8", "replace")[:8000])
    finally:
        os._exit(0)


def _have_no_rights(source: int) -> None:
    """Be nobody, with no file but the socket; what the caller has got stays the caller's."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, source)
    os.closerange(source + 1, 1 << 16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])  # proc(5)
    memory = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if effective_root():
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _die_with(parent: int) -> None:
    """Be killed with who has forked this one; a change of ids takes that back, so after it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
