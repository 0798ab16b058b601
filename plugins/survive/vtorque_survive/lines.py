"""Run a short-lived process at intervals, and read its output lines without blocking."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from vtorque_core.api.children import Child


class LineReader:
    """A reader of output lines from a process that is started at intervals.

    Only one process runs at a time. A process that runs for ``seconds`` is killed.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = float("-inf")
        self._asking: tuple[Child, int] | None = None

    def read_lines(self, work: Callable[[int], None], every: float) -> list[str] | None:
        """Return the lines of the process that ended since the last call, or None.

        Start a new process if it is due.

        Args:
            work: Runs in the process and writes lines to the given descriptor. After 64 KiB
                (pipe(7)), writes raise BlockingIOError. If ``work`` fails, its lines are discarded.
            every: Seconds between two processes.
        """
        if self._asking is None and time.monotonic() - self._at >= every:
            self._at = time.monotonic()
            self._asking = self._start(work)
        if self._asking is None or not self._asking[0].check():
            return None
        child, answer = self._asking
        self._asking = None
        with os.fdopen(answer, encoding="utf-8") as file:
            return file.read().splitlines() if not child.error else []

    def _start(self, work: Callable[[int], None]) -> tuple[Child, int]:
        answer, told = os.pipe()
        os.set_blocking(told, False)
        try:
            return Child(lambda: work(told), self._seconds), answer
        except OSError:
            os.close(answer)
            raise
        finally:
            os.close(told)
