"""Signals and window sizes on their way to the job, from any signal handler."""

import contextlib
import os
import struct
from collections import deque
from types import TracebackType
from typing import Self

from vtorque_linux_guest.job.frames import Kind, frame, winsize


class Events:
    """What happens to the job from outside. Its methods may be called from signal handlers."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._queue: deque[bytes] = deque(maxlen=256)
        self.stopped = ""

    def signal(self, number: int) -> None:
        """Send a signal (guest's Linux number) to all processes of the job's session."""
        self._put(frame(Kind.SIGNAL, 0, struct.pack("<I", number)))

    def winsize(self, rows: int, columns: int) -> None:
        """The user's terminal has a new size."""
        self._put(frame(Kind.WINSIZE, 0, winsize(rows, columns)))

    def stop(self, reason: str) -> None:
        """Give up: `Session.run` raises RunAbandoned with this reason."""
        self.stopped = reason or "stopped"
        self._wake()

    def _put(self, data: bytes) -> None:
        self._queue.append(data)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._write, b"!")

    def fileno(self) -> int:
        """For poll: readable when there is something to take."""
        return self._read

    def take(self) -> bytes:
        """The frames of what has happened since."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        parts = [self._queue.popleft() for _ in range(len(self._queue))]
        return b"".join(parts)

    def close(self) -> None:
        """Close the pipe. Restore signal handlers before."""
        os.close(self._read)
        os.close(self._write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()
