"""Wait for conditions on a busy machine, with long timeouts and short polls."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")
LONG = 120.0  # seconds that suffice even on a busy machine


def eventually(happens: Callable[[], object], seconds: float = LONG) -> None:
    """Return as soon as the condition is true; fail if it never is."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.03)


def wait_for(condition: Callable[[], T], seconds: float, what: str) -> T:
    """Wait until ``condition()`` is true, and return its value. Fail the test after ``seconds``."""
    deadline = time.monotonic() + seconds
    while (begun := time.monotonic()) < deadline:
        if value := condition():
            return value
        rest(begun)
    pytest.fail(f"{what}: not within {seconds} s")


def rest(begun: float, least: float = 0.05) -> None:
    """Sleep twice as long as the check that began at ``begun`` took, at least this many seconds.

    A check may start a command. Without such a pause it would use a whole CPU that the guest of the
    test needs.
    """
    time.sleep(max(least, min(2 * (time.monotonic() - begun), 0.5)))


def with_more_time(attempt: Callable[[float], T], *seconds: float) -> T:
    """Return ``attempt(seconds)``; if it fails, repeat it with the next, longer time.

    For limits that fail on a busy machine if they are short, and take too long if they are long.
    """
    for limit in seconds[:-1]:
        try:
            return attempt(limit)
        except (Exception, pytest.fail.Exception):  # noqa: S112
            continue
    return attempt(seconds[-1])
