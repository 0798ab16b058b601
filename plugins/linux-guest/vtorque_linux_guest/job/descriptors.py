"""Writing to and reading from a caller's file descriptors without ever blocking the loop.

O_NONBLOCK belongs to the open file, which the caller shares with others (the batch system, the
user's shell), so it is never set on it. A pipe or terminal is opened anew through /proc instead;
where that is refused, it is polled and written in pieces that a ready pipe takes (PIPE_BUF in
pipe(7)).
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


class Sink:
    """The bytes on their way to one descriptor; how many may wait is the caller's to bound."""

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
        """It may be written without asking poll first: it does not block (a file: for the disk)."""
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
        """Queue bytes, or drop them once writing has failed (`discard`)."""
        if not self.discard:
            self.pending += data

    def flush(self) -> int:
        """Write once if there is something; how many bytes left. An error is kept in `error`."""
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
        """Close what was opened here; the caller's descriptor stays open."""
        if self._close is not None:
            self._close()
            self._close = None


class Source:
    """Standard input: polled if it can block, else always ready."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        mode = os.fstat(fd).st_mode
        terminal = os.isatty(fd)
        self.polled = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or terminal
        self._typed = _typed_ahead(fd) if terminal else 0

    def read(self, limit: int) -> bytes | None:
        """Up to `limit` bytes, empty at the end (an unreadable input ends), None for not yet."""
        try:
            data = os.read(self.fd, min(limit, CHUNK))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""
        early, self._typed = data[: self._typed], max(0, self._typed - len(data))
        return early.replace(b"\0", _CTRL_D) + data[len(early) :] if early else data


def _typed_ahead(terminal: int) -> int:
    """Return how many bytes a raw terminal holds, which were typed before it was raw.

    Among these the kernel has put a NUL for each Ctrl-D (n_tty.c, ``__DISABLED_CHAR``). Without it
    the guest's shell would wait for ever for the end of input, as from script(1) in a service.
    """
    import termios  # noqa: PLC0415 - few jobs have a terminal

    held = array.array("i", [0])
    fcntl.ioctl(terminal, termios.FIONREAD, held)
    return held[0]
