"""Helpers shared by the contracts of exporters and sinks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_WAIT = 60.0  # seconds until sent data must have arrived


def wait_for_data(harness: object, done: Callable[[], bool], what: Callable[[], str]) -> None:
    """Check that all sent data has arrived. Otherwise raise AssertionError with ``what()``.

    If ``harness.asynchronous`` is true, wait up to one minute; otherwise check once.
    """
    later = getattr(harness, "asynchronous", False)
    hint = "" if later else "; if it arrives later, the harness needs asynchronous = True"
    end = time.monotonic() + (_WAIT if later else 0.0)
    while not done():
        assert time.monotonic() < end, f"{what()}{hint}"
        time.sleep(0.01)


def call_with_timeout(work: Callable[[], object]) -> BaseException | None:
    """Call a function that may hang; return the exception that it raised, or None.

    Raises AssertionError if the function does not return within a minute.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_WAIT)
    assert not thread.is_alive(), f"it hangs: timed out after {_WAIT:g} s"
    return raised[0] if raised else None
