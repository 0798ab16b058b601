"""What the contracts of exporters and of sinks share: waiting for what was sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_WAIT = 60.0  # seconds until what was sent is there


def until(done: Callable[[], bool], what: str) -> None:
    """Wait until something is so. Raises AssertionError saying ``what`` after a minute."""
    end = time.monotonic() + _WAIT
    while not done():
        assert time.monotonic() < end, f"not after {_WAIT:g} s: {what}"
        time.sleep(0.01)


def ends(work: Callable[[], object]) -> BaseException | None:
    """Call what may hang; return what it raised. Raises AssertionError if it does not end."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_WAIT)
    assert not thread.is_alive(), f"it hangs: no end after {_WAIT:g} s"
    return raised[0] if raised else None
