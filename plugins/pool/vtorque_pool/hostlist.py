"""Expand node lists like Slurm's: ``cloud[1-3,7],m[01-02]``."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

_MOST = 10_000
_PART = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*?)(?:\[([0-9,-]+)\])?(?:,|$)", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@functools.lru_cache(256)
def expand(text: str) -> tuple[str, ...]:
    """Return the distinct names, in order. Raises ValueError for invalid text."""
    names: dict[str, None] = {}
    at = 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            raise ValueError(f"{text!r} is not a list of nodes, such as cloud[1-8],big1")
        at = part.end()
        names.update(dict.fromkeys(_expand_ranges(part[1], part[2], text)))
        if len(names) > _MOST:
            raise ValueError(f"{text!r} has more than {_MOST} nodes")
    if not names:
        raise ValueError("a list of nodes is empty")
    return tuple(names)


def _expand_ranges(prefix: str, ranges: str | None, text: str) -> Iterator[str]:
    if ranges is None:
        yield prefix
        return
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if int(last) < int(first) or int(last) - int(first) >= _MOST:
            raise ValueError(f"{text!r}: {each!r} is not a range of at most {_MOST} numbers")
        yield from (f"{prefix}{n:0{len(first)}}" for n in range(int(first), int(last) + 1))
