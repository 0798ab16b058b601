"""Lines that a process of its own says, now and then, for which nobody waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from vtorque_core.api.children import Child


class Lines:
    """One process at a time, which has so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = float("-inf")
        self._asking: tuple[Child, int] | None = None

    def told(self, work: Callable[[int], None], every: float) -> list[str] | None:
        """Return what one that has ended since has said; None: none has. Begin one if it is time.

        ``work``: is given a descriptor that takes 64 KiB (pipe(7)), then raises BlockingIOError.
        One that fails has said nothing. ``every``: seconds between two. Raises OSError.
        """
        if self._asking is None and time.monotonic() - self._at >= every:
            self._at = time.monotonic()
            self._asking = self._begun(work)
        if self._asking is None or not self._asking[0].check():
            return None
        child, answer = self._asking
        self._asking = None
        with os.fdopen(answer, encoding="utf-8") as file:
            return file.read().splitlines() if not child.error else []

    def _begun(self, work: Callable[[int], None]) -> tuple[Child, int]:
        answer, told = os.pipe()
        os.set_blocking(told, False)
        try:
            return Child(lambda: work(told), self._seconds), answer
        except OSError:
            os.close(answer)
            raise
        finally:
            os.close(told)
