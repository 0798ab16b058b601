"""Waiting on a machine that may be very busy: long when it has to be, never longer than needed."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")
LONG = 30.0  # seconds in which even a busy machine gets round to it


def eventually(happens: Callable[[], object], seconds: float = LONG) -> None:
    """Return as soon as it is true; fail if it never is."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.01)


def with_more_time(attempt: Callable[[float], T], *seconds: float) -> T:
    """Return ``attempt(seconds)``; one that fails is made again with the next, longer time.

    For limits that are in vain if they are short on a busy machine, and a waste if they are long.
    """
    for limit in seconds[:-1]:
        try:
            return attempt(limit)
        except (Exception, pytest.fail.Exception):  # noqa: S112
            continue
    return attempt(seconds[-1])


def at_best(attempt: Callable[[], float], limit: float, least: int = 1) -> float:
    """Return the smallest of what ``attempt()`` gives: a cost that a busy machine only adds to.

    At least ``least`` attempts; then it goes on only as long as all were over the limit, for LONG.
    """
    end = time.monotonic() + LONG
    best = min(attempt() for _ in range(least))
    while best >= limit and time.monotonic() < end:
        best = min(best, attempt())
    return best
