"""Signals and window sizes on their way to the job, from any signal handler."""

import contextlib
import os
import signal
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
        self._told: int | None = None

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

    def wake_by_signals(self) -> None:
        """Be woken by each signal, also by one whose handler is not called yet. Main thread only.

        Python calls a handler between two of its own steps: one for a signal that comes after the
        last of these before poll(2) is called when poll(2) ends, which may be never. Whoever was
        told of signals before (signal.set_wakeup_fd) still is.
        """
        self._told = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def take(self) -> bytes:
        """The frames of what has happened since."""
        self._empty()
        parts = [self._queue.popleft() for _ in range(len(self._queue))]
        return b"".join(parts)

    def _empty(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._read, 4096).replace(b"!", b"")  # 33 is no signal of anybody's
            if self._told is not None and self._told >= 0 and numbers:
                os.write(self._told, numbers)

    def close(self) -> None:
        """Close the pipe. Restore signal handlers before."""
        if self._told is not None:
            signal.set_wakeup_fd(self._told)
            self._empty()
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
