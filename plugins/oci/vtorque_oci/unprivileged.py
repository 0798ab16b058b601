"""Read the layers of an untrusted image in a process without privileges.

The process is forked from root's process, which has loaded the modules and opened the files. The
new process changes to the user nobody, closes all other files, and limits its memory, CPU time and
file size. Root reads a limited number of lines of limited length from the new process. Privileges:
root, in tests also an ordinary user.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NoReturn

from vtorque_core.api import HostFault, Refused, closing, name_errors, printable
from vtorque_core.api.children import wait_readable
from vtorque_core.api.unprivileged_parser import close_files, drop_privileges

MEMORY = 1 << 30  # bytes in addition to those of root's process
CPU = 900  # seconds of CPU time
_WALL = 4 * CPU  # seconds: a disk can be slow
_END = 60.0  # seconds to end after the last line
_LINE, _LINES = 4096, 1000  # bytes of a line, lines
_STEP, _READY, _DONE, _REFUSED, _FAULT = b"+", b"?", b".", b"-", b"!"
_BROKEN = "the unprivileged parser has failed"


@dataclass(frozen=True)
class RootConnection:
    """The connection from the unprivileged process to root."""

    answers: int
    go: int

    def step(self, text: str) -> None:
        """Report the start of a step."""
        self.send_line(_STEP, text)

    def wait(self) -> None:
        """Let root call ``meanwhile`` (see :func:`run`), and wait until ``meanwhile`` returns.

        If ``meanwhile`` raises an error, this process exits.
        """
        self.send_line(_READY, "")
        if not os.read(self.go, 1):
            os._exit(0)

    def send_line(self, kind: bytes, text: str) -> None:
        """Send a line. ``kind`` is its first byte."""
        line = text.encode("utf-8", "replace").replace(b"\n", b" ")[: _LINE - 2]
        os.write(self.answers, kind + line + b"\n")  # at most PIPE_BUF bytes: in one piece


def run(
    work: Callable[[RootConnection], None],
    keep: Collection[int],
    most: int,
    progress: Callable[[str], None],
    meanwhile: Callable[[], None],
) -> None:
    """Run ``work`` in an unprivileged process, and wait for the end of the process.

    Args:
        work: the function to run, which must call :meth:`RootConnection.wait` once.
        keep: descriptors to keep open.
        most: maximum size of a written file in bytes.
        progress: called with each reported step.
        meanwhile: function that runs as root while ``work`` waits.

    Raises:
        Refused: the process refuses the image, or exceeds a limit.
        HostFault: the process cannot be started, or fails.
    """
    (answers, say), (go, start) = os.pipe(), os.pipe()
    with name_errors("cannot fork"):
        pid = os.fork()
    if pid == 0:
        _run_as_nobody(work, RootConnection(say, go), {say, go, *keep}, most)
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
        if not _wait_for_end(pid):
            raise Refused("the unprivileged parser closed its pipe but did not end")
        _, status = os.waitpid(pid, 0)
        raise Refused(_exit_reason(os.waitstatus_to_exitcode(status)))
    finally:
        os.close(answers)
        os.close(start)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _wait_for_end(pid: int) -> bool:
    with closing(os.pidfd_open(pid)) as ended:
        return bool(wait_readable([ended], _END))


def _exit_reason(code: int) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than {CPU} s of CPU time to parse"
    return f"the unprivileged parser ended with exit code {code}"


def _lines(descriptor: int) -> Iterator[bytes]:
    until, data = time.monotonic() + _WALL, b""
    for _ in range(_LINES):
        while b"\n" not in data:
            if len(data) > _LINE or not wait_readable([descriptor], until - time.monotonic()):
                raise Refused(f"was not read within {_WALL} s")
            part = os.read(descriptor, _LINE)
            if not part:
                return
            data += part
        line, _, data = data.partition(b"\n")
        yield line
    raise Refused("the unprivileged parser sent too much data")


def _run_as_nobody(
    work: Callable[[RootConnection], None], root: RootConnection, keep: Collection[int], most: int
) -> NoReturn:
    try:
        kind, text = _DONE, ""
        try:
            close_files(keep)
            drop_privileges(MEMORY, most)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
            work(root)
        except Refused as error:
            kind, text = _REFUSED, str(error)
        except MemoryError:
            kind, text = _REFUSED, f"needs more than {MEMORY >> 20} MiB of memory to parse"
        except BaseException as error:
            kind, text = _FAULT, str(error) if isinstance(error, HostFault) else repr(error)
        root.send_line(kind, text)
    finally:
        os._exit(0)
