"""Parse data of users or guests in an unprivileged helper process. The caller is root."""

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

from vtorque_core.api.children import wait_readable
from vtorque_core.base import safefs
from vtorque_core.base._launch import die_with
from vtorque_core.base.errors import HostFault, printable
from vtorque_core.base.run_tool import NOBODY
from vtorque_core.base.trust import effective_root

MAX_VALUE = 128 << 10  # bytes of one value
CPU = 10  # seconds of CPU time for one call
_MOST = 1 << 20  # bytes of all values of a call
_MEMORY = 256 << 20  # bytes of address space in addition to the parent's
_MAX_CALL = 192 << 10  # bytes: less than the limit of a message (net.core.wmem_max, 212992)
_HEAD = struct.Struct("=cI")  # type and length in bytes of the following data
_VALUE, _END, _FAULT = b"+", b".", b"-"
# linux/prctl.h, linux/sched.h
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_CLONE_NEWIPC, _CLONE_NEWPID, _CLONE_NEWNET = 0x08000000, 0x20000000, 0x40000000
_libc = ctypes.CDLL(None)
_asking: tuple[int, socket.socket] | None = None  # owner pid and socket of the helper process


class Unreadable(HostFault):
    """The data is invalid. The message comes from the parser, made printable."""


class HelperDied(HostFault):
    """The helper process was killed, not necessarily because of the data."""

    blames_node = False


@contextlib.contextmanager
def helper_process() -> Iterator[None]:
    """Start the unprivileged helper process for a ``with`` block.

    Enter the block before this process has threads or secrets. Raises HostFault.
    """
    global _asking  # noqa: PLW0603 - one helper per process
    before = _asking
    with _start_helper() as asking:
        _asking = os.getpid(), asking
        try:
            yield
        finally:
            _asking = before


def parse_unprivileged(
    work: Callable[..., Iterable[bytes]],
    *args: object,
    until: float | None = None,
    files: Sequence[int] = (),
    most: int = _MOST,
) -> Iterator[bytes]:
    """Run ``work(*args, *files)`` unprivileged, and yield the values that ``work`` yields.

    The caller must validate the values.

    Args:
        work: a module-level function; runs as nobody, with 10 s of CPU time. A value has at most
            128 KiB.
        args: picklable arguments, at most 192 KiB.
        until: deadline in ``time.monotonic()`` seconds; None: 20 s from now.
        files: descriptors that ``work`` gets copies of.
        most: maximum size of all values together in bytes. Each value counts 5 bytes more.

    Raises:
        Unreadable: ``work`` raises, exceeds a limit or the deadline, or crashes.
        HelperDied: the process of :func:`helper_process` was killed.
        HostFault: fork fails.
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
                raise Unreadable("the unprivileged parser's output is larger than its limit")
            said = _exactly(answers, length, until, asked)
            if kind == _END:
                return
            if kind != _VALUE:
                raise Unreadable(printable(said.decode("utf-8", "replace"), 2000))
            yield said


def _ask(call: bytes, files: Sequence[int], stack: contextlib.ExitStack) -> socket.socket:
    owner, asked = _asking or (0, None)
    if asked is not None and owner != os.getpid():
        with contextlib.suppress(OSError):  # the helper of the process that forked this one
            socket.send_fds(asked, [call], files)
            return asked
        asked = None
    if asked is None:
        asked = stack.enter_context(_start_helper())
    try:
        socket.send_fds(asked, [call], files)
    except OSError as error:
        raise HelperDied(f"no connection to the unprivileged parser: {error.strerror}") from None
    return asked


def _exactly(answers: int, count: int, until: float, asked: socket.socket) -> bytes:
    data = b""
    while len(data) < count:
        if not wait_readable([answers], until - time.monotonic()):
            raise Unreadable("the unprivileged parser did not finish in time")
        part = os.read(answers, count - len(data))
        if not part:
            if _has_ended(asked):
                raise HelperDied("the unprivileged parser was killed")
            raise Unreadable("the unprivileged parser crashed")
        data += part
    return data


def _has_ended(asked: socket.socket) -> bool:
    other_end = select.poll()
    other_end.register(asked, 0)
    return bool(other_end.poll(0))  # POLLHUP, which poll(2) always reports


@contextlib.contextmanager
def _start_helper() -> Iterator[socket.socket]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    with ours:
        ours.shutdown(socket.SHUT_RD)
        with its:
            with safefs.name_errors("cannot fork"):
                pid = os.fork()
            if pid == 0:
                _run_helper(its, parent)
        try:
            yield ours
        finally:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)  # its pid namespace dies with it
                os.waitpid(pid, 0)


def _run_helper(source: socket.socket, parent: int) -> None:
    try:
        close_files({source.fileno()})
        die_with(parent)
        if effective_root():
            if _libc.unshare(_CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWNET):
                return
            first = os.fork()
            if first:  # if it dies, its whole namespace dies (pid_namespaces(7))
                source.close()
                os.waitpid(first, 0)
                os._exit(0)
        drop_privileges(_MEMORY)
        _serve(source)
    finally:
        os._exit(1)


def _serve(source: socket.socket) -> None:
    while True:
        call, files, _, _ = socket.recv_fds(source, _MAX_CALL, 16)
        if not call:
            return
        with contextlib.suppress(OSError):  # fork failed: the caller reads end of file
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
            work, args = pickle.loads(call)  # noqa: S301 - root wrote it
            for value in work(*args, *files):
                _send(answers, _VALUE, value)
            _send(answers, _END, b"")
        except Exception as error:
            said = str(error) or type(error).__name__
            _send(answers, _FAULT, said.encode("utf-8", "replace")[:8000])
    finally:
        os._exit(0)


def _send(answers: int, kind: bytes, value: bytes) -> None:
    data = _HEAD.pack(kind, len(value)) + value
    while data:
        data = data[os.write(answers, data) :]


def close_files(keep: Collection[int]) -> None:
    """Close all inherited descriptors except ``keep``.

    Also starts a new session, in the directory ``/``.
    """
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for kept, following in pairwise([2, *sorted(keep), (1 << 31) - 1]):
        os.closerange(kept + 1, following)


def drop_privileges(memory: int, largest_file: int = 0) -> None:
    """Switch to user nobody without capabilities, and die with the parent process.

    Limits in bytes: ``memory`` for additional address space, ``largest_file`` for a written file.
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
