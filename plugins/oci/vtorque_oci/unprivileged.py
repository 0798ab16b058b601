"""Read the layers of an untrusted image in a process without privileges.

The process is forked from root's process, which has loaded the modules and opened the files. It
changes to the user nobody, closes all other files, and has limits for memory, CPU time and file
size. Root reads lines of text from it, of limited number and length. Runs as root; in tests also as
an ordinary user.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vtorque_core.api import HostFault, Refused, printable
from vtorque_core.api.children import readable

MEMORY = 1 << 30  # bytes beside what this process has already
CPU = 900  # seconds of CPU time
_WALL = 4 * CPU  # seconds: a disk can be slow
_END = 60.0  # seconds to end after the last line
_NOBODY = 65534
_LINE, _LINES = 4096, 1000  # bytes of a line, lines
_STEP, _READY, _DONE, _REFUSED, _FAULT = b"+", b"?", b".", b"-", b"!"
_BROKEN = "the process that reads it is broken"
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Root:
    """Root, as the unprivileged process reaches it."""

    answers: int
    go: int

    def step(self, text: str) -> None:
        """Report that a step begins."""
        self.say(_STEP, text)

    def wait(self) -> None:
        """Wait until root has done its own part. Ends the process if root has failed."""
        self.say(_READY, "")
        if not os.read(self.go, 1):
            os._exit(0)

    def say(self, kind: bytes, text: str) -> None:
        """Send a line of a kind."""
        line = text.encode("utf-8", "replace").replace(b"\n", b" ")[: _LINE - 2]
        os.write(self.answers, kind + line + b"\n")  # at most PIPE_BUF bytes: in one piece


def run(
    work: Callable[[Root], None],
    keep: Collection[int],
    most: int,
    progress: Callable[[str], None],
    meanwhile: Callable[[], None],
) -> None:
    """Run ``work`` in a process without rights, and wait for its end.

    Args:
        work: calls ``wait`` of its argument once.
        keep: the descriptors that it needs.
        most: bytes of the largest file that it may write.
        progress: gets the steps that it reports.
        meanwhile: root's part, which runs while ``work`` waits.

    Raises Refused: it refuses the source, or needs too much for it; HostFault.
    """
    (answers, say), (go, start) = os.pipe(), os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        raise HostFault(f"cannot fork: {error.strerror}") from None
    if pid == 0:
        _be_nobody(work, Root(say, go), {say, go, *keep}, most)
    os.close(say)
    os.close(go)
    status, ready = None, False
    try:
        for line in _lines(answers):
            kind, text = line[:1], printable(line[1:].decode("utf-8", "replace"), _LINE)
            if kind == _STEP:
                progress(text)
            elif kind == _READY and not ready:
                ready = True
                meanwhile()
                with contextlib.suppress(BrokenPipeError):  # it has ended: its status says why
                    os.write(start, b"!")
            elif kind == _DONE and ready:
                return
            else:
                raise HostFault(text) if kind == _FAULT else Refused(text or _BROKEN)
        if not _ends(pid):
            raise Refused("the process that reads it has closed its pipe and does not end")
        _, status = os.waitpid(pid, 0)
        raise Refused(_why(os.waitstatus_to_exitcode(status)))
    finally:
        os.close(answers)
        os.close(start)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _ends(pid: int) -> bool:
    """Wait for the end of a child that has nothing more to say; return whether it came in time."""
    ended = os.pidfd_open(pid)
    try:
        return readable([ended], _END)
    finally:
        os.close(ended)


def _why(code: int) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than {CPU} s of CPU time to read"
    return f"the process that reads it has ended with {code}"


def _lines(descriptor: int) -> Iterator[bytes]:
    """Yield the lines of a pipe. Raises Refused for too many, or if they do not end in time."""
    until, data = time.monotonic() + _WALL, b""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    for _ in range(_LINES):
        while b"\n" not in data:
            if len(data) > _LINE or not waiting.poll(max(0, until - time.monotonic()) * 1000):
                raise Refused(f"was not read within {_WALL} s")
            part = os.read(descriptor, _LINE)
            if not part:
                return
            data += part
        line, _, data = data.partition(b"\n")
        yield line
    raise Refused("the process that reads it says too much")


def _be_nobody(
    work: Callable[[Root], None], root: Root, keep: Collection[int], most: int
) -> NoReturn:
    try:
        kind, text = _DONE, ""
        try:
            _give_up_rights(keep, most)
            work(root)
        except Refused as error:
            kind, text = _REFUSED, str(error)
        except MemoryError:
            kind, text = _REFUSED, f"needs more than {MEMORY >> 20} MiB of memory to read"
        except BaseException as error:
            kind, text = _FAULT, str(error) if isinstance(error, HostFault) else repr(error)
        root.say(kind, text)
    finally:
        os._exit(0)


def _give_up_rights(keep: Collection[int], most: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    last = 2
    for descriptor in sorted({*keep, (1 << 31) - 1}):
        os.closerange(last + 1, descriptor)
        last = descriptor
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])  # proc(5)
    limits = {
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + MEMORY,
        resource.RLIMIT_CPU: CPU,
        resource.RLIMIT_FSIZE: most,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
