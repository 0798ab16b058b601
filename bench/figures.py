"""A measured figure and how figures are shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One figure: ours, what it is compared with (None: nothing), and the limit of the ratio.

    Without a baseline ``limit`` is of ``ours`` itself. All values are in ``unit``; ``samples`` has
    every single one, in the order measured. ``limit`` None: told, not judged.
    """

    name: str
    unit: str
    ours: float
    baseline: float | None = None
    limit: float | None = None
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def judged(self) -> float:
        """What the limit is compared with."""
        return self.ours if self.baseline is None else self.ours / self.baseline

    @property
    def held(self) -> bool | None:
        """Whether the limit held; None without one."""
        return None if self.limit is None else self.judged <= self.limit

    def as_json(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        ratio = self.baseline and self.judged
        more = None if self.baseline is None else self.ours - self.baseline
        return {**asdict(self), "more": more, "ratio": ratio, "held": self.held}


def compare(
    name: str,
    unit: str,
    ours: Sequence[float],
    baseline: Sequence[float] = (),
    limit: float | None = None,
) -> Figure:
    """Return the figure of the medians."""
    base = statistics.median(baseline) if baseline else None
    samples = {"ours": ours, **({"baseline": baseline} if baseline else {})}
    return Figure(name, unit, statistics.median(ours), base, limit, samples)


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as aligned lines.

    ``n`` is how often ours was measured. ``more`` is ours less the baseline, in the same unit: an
    emulated guest is slow, and a ratio hides what we add.
    """
    rows = [("figure", "unit", "ours", "baseline", "more", "ratio", "limit", "n", "held")]
    for f in figures:
        more = "" if f.baseline is None else f"{f.ours - f.baseline:.3g}"
        ratio = "" if f.baseline is None else f"{f.judged:.2f}x"
        limit = "" if f.limit is None else f"{f.limit:g}{'x' if f.baseline is not None else ''}"
        held = {None: "", True: "yes", False: "NO"}[f.held]
        base = "" if f.baseline is None else f"{f.baseline:.3g}"
        count = str(len(f.samples.get("ours", ())))
        rows.append((f.name, f.unit, f"{f.ours:.3g}", base, more, ratio, limit, count, held))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)
