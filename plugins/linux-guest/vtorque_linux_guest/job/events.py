"""Queue signals and window sizes for the job, from signal handlers."""

import contextlib
import os
import signal
import struct
from collections import deque
from types import TracebackType
from typing import Self

from vtorque_linux_guest.job.frames import FrameKind, frame, winsize


class Events:
    """External events for the job. The methods are safe to call in signal handlers."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._queue: deque[bytes] = deque(maxlen=256)
        self.stopped = ""
        self._told: int | None = None

    def signal(self, number: int) -> None:
        """Send a signal, by its number in Linux, to all processes of the job's session."""
        self._put(frame(FrameKind.SIGNAL, 0, struct.pack("<I", number)))

    def winsize(self, rows: int, columns: int) -> None:
        """Send the job a new window size."""
        self._put(frame(FrameKind.WINSIZE, 0, winsize(rows, columns)))

    def stop(self, reason: str) -> None:
        """Abort: `Session.run` raises RunAbandoned with this reason."""
        self.stopped = reason or "stopped"
        self._wake()

    def _put(self, data: bytes) -> None:
        self._queue.append(data)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so poll wakes anyway
            os.write(self._write, b"!")

    def fileno(self) -> int:
        """Return a descriptor for poll, readable when there are events."""
        return self._read

    def wake_by_signals(self) -> None:
        """Make each signal wake poll(2), even before its handler runs.

        Call it only in the main thread. Python runs handlers between bytecode instructions, so the
        handler of a signal that arrives just before poll(2) would run only when poll(2) returns. A
        previous descriptor of signal.set_wakeup_fd still gets the signals.
        """
        self._told = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def take(self) -> bytes:
        """Return the queued events as frames."""
        self._drain_signals()
        parts = [self._queue.popleft() for _ in range(len(self._queue))]
        return b"".join(parts)

    def _drain_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._read, 4096).replace(b"!", b"")  # 33 is not used as a signal
            if self._told is not None and self._told >= 0 and numbers:
                os.write(self._told, numbers)

    def close(self) -> None:
        """Close the pipe, and restore the previous descriptor of signal.set_wakeup_fd.

        Before this call, the caller must restore the signal handlers that use this object.
        """
        if self._told is not None:
            signal.set_wakeup_fd(self._told)
            self._drain_signals()
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
