"""Public: read what a user or a guest wrote in a process without rights. On the node, as root.

Root parses nothing of theirs: it has :func:`read_apart` run a function that does, and takes bytes
from it, each of which it checks as the value that it is to be. Answers come through pipes, since a
socket could bring root a descriptor that is slow to close (SCM_RIGHTS, SO_LINGER).
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
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from vtorque_core.base import safefs
from vtorque_core.base._launch import die_with
from vtorque_core.base.errors import HostFault, printable
from vtorque_core.base.run_tool import NOBODY
from vtorque_core.base.trust import effective_root

MAX_VALUE = 128 << 10  # bytes of one value
CPU = 10  # seconds of CPU time for one reading
_MOST = 1 << 20  # bytes of all values of a reading
_MEMORY = 256 << 20  # bytes of address space beside what its starter has
_MAX_CALL = 192 << 10  # bytes: below what one message may have (net.core.wmem_max, 212992)
_HEAD = struct.Struct("=cI")  # what follows, and how many bytes of it
_VALUE, _END, _FAULT = b"+", b".", b"-"
# linux/prctl.h, linux/sched.h
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_CLONE_NEWIPC, _CLONE_NEWPID, _CLONE_NEWNET = 0x08000000, 0x20000000, 0x40000000
_libc = ctypes.CDLL(None)
_asking: tuple[int, socket.socket] | None = None  # whose process's, and where it asks


class Unreadable(HostFault):
    """What was to be read is not what it should be; the reader's words, printable."""


class ReaderGone(HostFault):
    """The process that reads was killed. What it was to read need not be the cause."""

    blames_node = False


@contextlib.contextmanager
def reader() -> Iterator[None]:
    """Have a process of nobody's that reads. To be entered without threads, before any secret.

    Raises HostFault if the host cannot fork.
    """
    global _asking  # noqa: PLW0603 - one for all who read in this process
    before = _asking
    with _reading() as asking:
        _asking = os.getpid(), asking
        try:
            yield
        finally:
            _asking = before


def read_apart(
    work: Callable[..., Iterable[bytes]],
    *args: object,
    until: float | None = None,
    files: Sequence[int] = (),
    most: int = _MOST,
) -> Iterator[bytes]:
    """Yield what ``work(*args, *files)`` yields in a process of its own, one after the other.

    Args:
        work: a function of a module's, which parses; it is nobody, and has 10 s of CPU time.
        args: what can be pickled, at most 192 KiB.
        until: when it must have ended, in time.monotonic() seconds; None: 20 s from now.
        files: descriptors that it gets copies of.
        most: bytes of all that it yields; each has five more.

    At most 128 KiB each. Raises Unreadable: with the reader's reason, or it is late or broken;
    ReaderGone if something killed the process of :func:`reader`; HostFault if the host cannot fork.
    """
    until = time.monotonic() + 2 * CPU if until is None else until
    with contextlib.ExitStack() as stack:
        answers, told = os.pipe()
        stack.callback(os.close, answers)
        with safefs.closing(told):
            asked = _ask(pickle.dumps((work, args)), [told, *files], stack)
        while True:
            kind, length = _HEAD.unpack(_exactly(answers, _HEAD.size, until, asked))
            most -= _HEAD.size + length
            if length > MAX_VALUE or most < 0:
                raise Unreadable("it says too much")
            said = _exactly(answers, length, until, asked)
            if kind == _END:
                return
            if kind != _VALUE:
                raise Unreadable(printable(said.decode("utf-8", "replace"), 2000))
            yield said


def _ask(call: bytes, files: Sequence[int], stack: contextlib.ExitStack) -> socket.socket:
    """Send a call to the process that reads; to a new one until ``stack`` ends, if there is none.

    A forked child uses its parent's process, which does not have the child's later secrets. Returns
    the socket of the process that was asked. Raises ReaderGone, HostFault.
    """
    if _asking is not None:
        try:
            socket.send_fds(_asking[1], [call], files)
        except OSError as error:
            if _asking[0] == os.getpid():
                raise ReaderGone(f"the process that reads: {error.strerror}") from None
        else:
            return _asking[1]
    asked = stack.enter_context(_reading())
    try:
        socket.send_fds(asked, [call], files)
    except OSError as error:
        raise ReaderGone(f"the process that reads: {error.strerror}") from None
    return asked


def _exactly(answers: int, count: int, until: float, asked: socket.socket) -> bytes:
    """Return so many bytes of a pipe. Raises Unreadable: not in time, or never; ReaderGone."""
    data = b""
    waiting = select.poll()
    waiting.register(answers, select.POLLIN)
    while len(data) < count:
        left = until - time.monotonic()
        if left <= 0 or not waiting.poll(left * 1000):
            raise Unreadable("it has not ended in time")
        part = os.read(answers, count - len(data))
        if not part:
            if _has_ended(asked):
                raise ReaderGone("the process that reads was killed")
            raise Unreadable("it broke")
        data += part
    return data


def _has_ended(asked: socket.socket) -> bool:
    """Return whether no process has the other end of a socket any more."""
    other_end = select.poll()
    other_end.register(asked, 0)
    return bool(other_end.poll(0))  # POLLHUP, which poll(2) always tells


@contextlib.contextmanager
def _reading() -> Iterator[socket.socket]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    with ours:
        ours.shutdown(socket.SHUT_RD)
        with its:
            with safefs.naming("cannot fork"):
                pid = os.fork()
            if pid == 0:
                _live(its, parent)
        try:
            yield ours
        finally:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)  # and with it all that it has started
                os.waitpid(pid, 0)


def _live(source: socket.socket, parent: int) -> None:
    """Be the process: as root only long enough to have a world of processes of its own.

    Without one it ends: whoever asks is told that it broke. Never returns to its caller.
    """
    try:
        close_files({source.fileno()})
        die_with(parent)
        if effective_root():
            if _libc.unshare(_CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWNET):
                return
            first = os.fork()
            if first:  # its death is the death of all in there (pid_namespaces(7))
                source.close()
                os.waitpid(first, 0)
                os._exit(0)
        drop_privileges(_MEMORY)
        _serve(source)
    finally:
        os._exit(1)


def _serve(source: socket.socket) -> None:
    """Fork one that works for each message, until there are no more."""
    while True:
        call, files, _, _ = socket.recv_fds(source, _MAX_CALL, 16)
        if not call:
            return
        with contextlib.suppress(OSError):  # no more processes: the asking one sees its pipe's end
            if os.fork() == 0:
                source.close()
                _work(call, *files)
        for file in files:
            os.close(file)


def _work(call: bytes, answers: int, *files: int) -> NoReturn:
    try:
        die_with(os.getppid())
        resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        try:
            work, args = pickle.loads(call)  # noqa: S301 - root's word
            for value in work(*args, *files):
                _tell(answers, _VALUE, value)
            _tell(answers, _END, b"")
        except Exception as error:
            said = str(error) or type(error).__name__
            _tell(answers, _FAULT, said.encode("utf-8", "replace")[:8000])
    finally:
        os._exit(0)


def _tell(answers: int, kind: bytes, value: bytes) -> None:
    data = _HEAD.pack(kind, len(value)) + value
    while data:
        data = data[os.write(answers, data) :]


def close_files(keep: Collection[int]) -> None:
    """Close all files, the terminal and the directory of the caller's, but these descriptors."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for kept, following in pairwise([2, *sorted(keep), (1 << 31) - 1]):
        os.closerange(kept + 1, following)


def drop_privileges(memory: int, largest_file: int = 0) -> None:
    """Become nobody, without capabilities, and end with the process that forked this one.

    ``memory``: bytes of address space beside what the process has. ``largest_file``: bytes that a
    file may have that it writes. An ordinary user (in tests) keeps the user ID.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])  # proc(5)
    memory += pages * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if effective_root():
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    die_with(os.getppid())
