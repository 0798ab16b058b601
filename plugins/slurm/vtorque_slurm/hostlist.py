"""Parse Slurm host lists such as ``n[1-3,07-09],m2``; see scontrol(1), "show hostlist"."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

MAX_HOSTS = 100_000

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def expand(text: str) -> tuple[str, ...]:
    """Return the hosts of a list in order. Raise ValueError if it is invalid."""
    hosts: list[str] = []
    for item in _items(text):
        parts = [_choices(match) for match in _PART.finditer(item)]
        if "".join(match[0] for match in _PART.finditer(item)) != item or not parts:
            raise ValueError(f"{text[:80]!r} is not a list of hosts")
        if len(hosts) + math.prod(len(part) for part in parts) > MAX_HOSTS:
            raise ValueError(f"{text[:80]!r} has more than {MAX_HOSTS} hosts")
        hosts += ("".join(each) for each in itertools.product(*parts))
    return tuple(hosts)


def numbers(text: str, most: int) -> tuple[int, ...]:
    """Expand ``0-2,7`` to (0, 1, 2, 7).

    Users can write such lists, so this function checks the size before it expands them.

    Raises:
        ValueError: The text is invalid, or has more than ``most`` numbers.
    """
    spans = re.findall(r"(\d+)(?:-(\d+))?", text, re.ASCII)
    if sum(int(last or first) - int(first) + 1 for first, last in spans) > most:
        raise ValueError(f"{text[:80]!r} has more than {most} numbers")
    return tuple(int(n) for n in expand(f"[{text}]"))


def counts(text: str) -> tuple[int, ...]:
    """Expand ``2(x3),1`` to (2, 2, 2, 1), as in SLURM_JOB_CPUS_PER_NODE.

    Raises:
        ValueError: The text is invalid or too long.
    """
    found: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", item, re.ASCII)
        if match is None:
            raise ValueError(f"{text[:80]!r} is not a list of counts")
        found += [int(match[1])] * int(match[2] or 1)
        if len(found) > MAX_HOSTS:
            raise ValueError(f"{text[:80]!r} has more than {MAX_HOSTS} hosts")
    return tuple(found)


def show_counts(numbers: Sequence[int]) -> str:
    """Format counts as Slurm does: (2, 2, 1) becomes ``2(x2),1``."""
    groups = ((n, len(list(same))) for n, same in itertools.groupby(numbers))
    return ",".join(f"{n}(x{times})" if times > 1 else str(n) for n, times in groups)


def _items(text: str) -> list[str]:
    items = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],])+", text)
    if ",".join(items) != text or not items:
        raise ValueError(f"{text[:80]!r} is not a list of hosts")
    return items


def _choices(match: re.Match[str]) -> list[str]:
    if match[1] is None:
        return [match[2]]
    found: list[str] = []
    for item in match[1].split(","):
        ends = _RANGE.fullmatch(item)
        if ends is None:
            raise ValueError(f"{match[0][:80]!r} is not a range of hosts")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not 0 <= last - first < MAX_HOSTS - len(found):
            raise ValueError(f"{match[0][:80]!r} is not a range of hosts")
        found += [str(n).zfill(len(ends[1])) for n in range(first, last + 1)]
    return found
