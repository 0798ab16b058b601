"""Read and write a caller's file descriptors without blocking the event loop.

The caller shares the open file description with other processes (the batch system, the user's
shell), so this module never sets O_NONBLOCK. It reopens a pipe or terminal through /proc. If that
open(2) fails, it polls the descriptor and writes pieces of at most PIPE_BUF bytes (pipe(7)).
"""

import array
import fcntl
import os
import socket
import stat
from collections.abc import Callable

PIPE_BUF = 4096
CHUNK = 32768
_CTRL_D = b"\x04"


class OutputQueue:
    """A queue of output for one descriptor, without a size limit."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.pending = bytearray()
        self.error: OSError | None = None
        self.discard = False
        self._close: Callable[[], None] | None = None
        self._write: Callable[[memoryview], int] = self._write_plain
        mode = os.fstat(fd).st_mode
        self.polled = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)
        self.instant = True
        """True if a write without poll does not block, except to wait for a disk."""
        if stat.S_ISSOCK(mode):
            duplicate = socket.socket(fileno=os.dup(fd))
            self._close = duplicate.close
            self._write = lambda data: duplicate.send(data, socket.MSG_DONTWAIT)
        elif self.polled:
            self._reopen()

    def _reopen(self) -> None:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            own = os.open(f"/proc/self/fd/{self.fd}", flags)
        except OSError:
            self.instant = False
            self._write = lambda data: os.write(self.fd, data[:PIPE_BUF])
            return
        self._close = lambda: os.close(own)
        self._write = lambda data: os.write(own, data)

    def _write_plain(self, data: memoryview) -> int:
        return os.write(self.fd, data)

    def add(self, data: bytes) -> None:
        """Queue bytes, or discard them after a write has failed."""
        if not self.discard:
            self.pending += data

    def flush(self) -> int:
        """Write once and return the number of bytes written. A failure sets `error`."""
        if not self.pending:
            return 0
        try:
            with memoryview(self.pending) as view:
                written = self._write(view[: 8 * CHUNK])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self.error = error
            self.pending = bytearray()  # not clear(): the traceback still holds a view
            return 0
        del self.pending[:written]
        return written

    def close(self) -> None:
        """Close the descriptor that this object opened. The caller's descriptor stays open."""
        if self._close is not None:
            self._close()
            self._close = None


class InputSource:
    """Standard input: polled if reads can block, otherwise always ready."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        mode = os.fstat(fd).st_mode
        terminal = os.isatty(fd)
        self.polled = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or terminal
        self._typed = _typed_ahead(fd) if terminal else 0

    def read(self, limit: int) -> bytes | None:
        """Return up to `limit` bytes, b"" at the end or on an error, None if no bytes are ready."""
        try:
            data = os.read(self.fd, min(limit, CHUNK))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""
        early, self._typed = data[: self._typed], max(0, self._typed - len(data))
        return early.replace(b"\0", _CTRL_D) + data[len(early) :] if early else data


def _typed_ahead(terminal: int) -> int:
    """Return the number of bytes that were typed before a terminal became raw.

    The kernel stores each Ctrl-D (end of input) among these bytes as a NUL (n_tty.c,
    ``__DISABLED_CHAR``). :meth:`InputSource.read` replaces each such NUL by a Ctrl-D.
    """
    import termios  # noqa: PLC0415 - few jobs have a terminal

    held = array.array("i", [0])
    fcntl.ioctl(terminal, termios.FIONREAD, held)
    return held[0]
