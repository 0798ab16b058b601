"""A measured figure and how figures are shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One figure: ours, what it is compared with (None: nothing), and its limit (None: not judged).

    The limit is of the ratio, with ``limits_more`` of the difference, without a baseline of
    ``ours``. All values are in ``unit``. ``samples`` has every sample in the order measured.
    """

    name: str
    unit: str
    ours: float
    baseline: float | None = None
    limit: float | None = None
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    limits_more: bool = False

    @property
    def more(self) -> float | None:
        """The difference from the baseline; None without one."""
        return None if self.baseline is None else self.ours - self.baseline

    @property
    def ratio(self) -> float | None:
        """The ratio to the baseline; None without one."""
        return None if self.baseline is None else self.ours / self.baseline

    @property
    def judged(self) -> float:
        """What the limit is compared with."""
        compared = self.more if self.limits_more else self.ratio
        return self.ours if compared is None else compared

    @property
    def held(self) -> bool | None:
        """Whether the limit held; None without one."""
        return None if self.limit is None else self.judged <= self.limit

    def as_json(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {**asdict(self), "more": self.more, "ratio": self.ratio, "held": self.held}


def compare(
    name: str,
    unit: str,
    ours: Sequence[float],
    baseline: Sequence[float] = (),
    limit: float | None = None,
    *,
    limits_more: bool = False,
) -> Figure:
    """Return the figure of the medians."""
    base = statistics.median(baseline) if baseline else None
    samples = {"ours": ours, **({"baseline": baseline} if baseline else {})}
    return Figure(name, unit, statistics.median(ours), base, limit, samples, limits_more)


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as aligned lines.

    ``n`` is how often ours was measured. ``more`` is ours less the baseline, in the same unit: an
    emulated guest is slow, and a ratio hides what we add.
    """
    rows = [("figure", "unit", "ours", "baseline", "more", "ratio", "limit", "n", "held")]
    for f in figures:
        more = "" if f.more is None else f"{f.more:.3g}"
        ratio = "" if f.ratio is None else f"{f.ratio:.2f}x"
        sign, times = ("+", "") if f.limits_more else ("", "" if f.ratio is None else "x")
        limit = "" if f.limit is None else f"{sign}{f.limit:g}{times}"
        held = {None: "", True: "yes", False: "NO"}[f.held]
        base = "" if f.baseline is None else f"{f.baseline:.3g}"
        count = str(len(f.samples.get("ours", ())))
        rows.append((f.name, f.unit, f"{f.ours:.3g}", base, more, ratio, limit, count, held))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)
