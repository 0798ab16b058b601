"""Check that the last items of a long series cost as much as the first."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path


def process(pid: int | str = "self") -> dict[str, float]:
    """Return a process's own memory (MiB), descriptors and threads."""
    place = Path("/proc", str(pid))
    words = (place / "statm").read_text().split()
    mib = (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGESIZE") / 2**20
    return {
        "mib": mib,
        "fds": float(len(list((place / "fd").iterdir()))),
        "threads": float(len(list((place / "task").iterdir()))),
    }


Row = Mapping[str, float]


def tenths(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return the medians of each number over the first and the last tenth."""
    size = len(rows) // 10
    return {key: (_median(rows[:size], key), _median(rows[-size:], key)) for key in rows[0]}


def _median(rows: Sequence[Row], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def rising(rows: Sequence[Row], limit: float = 0.10) -> dict[str, tuple[float, float]]:
    """Return those numbers whose last tenth is over their first by more than ``limit``."""
    return {key: (a, b) for key, (a, b) in tenths(rows).items() if b > a * (1 + limit)}
