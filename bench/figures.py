"""A measured figure, and the table of figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A measured value, in ``unit``.

    Attributes:
        ours: median of vTorque's samples.
        baseline: median of the baseline's samples; None: no baseline.
        limit: upper limit; None: no limit. It applies to the ratio, to the difference if
            ``limits_more``, and to ``ours`` if there is no baseline.
        samples: all samples, in the order of measurement.
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
        """The value that must not exceed the limit."""
        compared = self.more if self.limits_more else self.ratio
        return self.ours if compared is None else compared

    @property
    def held(self) -> bool | None:
        """True if the value is within the limit; None without a limit."""
        return None if self.limit is None else self.judged <= self.limit

    def as_json(self) -> dict[str, Any]:
        """Return the figure for ``--json``."""
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
    """Return the figure with the medians of these samples."""
    base = statistics.median(baseline) if baseline else None
    samples = {"ours": ours, **({"baseline": baseline} if baseline else {})}
    return Figure(name, unit, statistics.median(ours), base, limit, samples, limits_more)


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as aligned lines.

    ``n`` is the number of vTorque's samples. ``more`` is the difference from the baseline, in the
    same unit. Emulated guests are slow, so a ratio would hide vTorque's overhead.
    """
    rows = [("figure", "unit", "ours", "baseline", "more", "ratio", "limit", "n", "held")]
    for f in figures:
        more = "" if f.more is None else f"{f.more:.3g}"
        ratio = "" if f.ratio is None else f"{f.ratio:.2f}x"
        sign, times = ("+", "") if f.limits_more else ("", "" if f.ratio is None else "x")
        limit = "" if f.limit is None else f"{sign}{f.limit:.3g}{times}"
        held = {None: "", True: "yes", False: "NO"}[f.held]
        base = "" if f.baseline is None else f"{f.baseline:.3g}"
        count = str(len(f.samples.get("ours", ())))
        rows.append((f.name, f.unit, f"{f.ours:.3g}", base, more, ratio, limit, count, held))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)
