"""Median, spread, and how sure a ratio of two medians is (bootstrap): pure, standard library.

The interval is the percentile bootstrap of the ratio of medians (Efron and Tibshirani, An
Introduction to the Bootstrap, 1993, chapter 13): both groups are drawn anew, with replacement,
:data:`DRAWS` times; the middle 95 % of the ratios are it. The draws are the same each time.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DIGITS = 5  # at least, of what is shown
MOST_DIGITS = 17  # tell any two floats from each other
DRAWS = 2000
LEVEL = 0.95
ENOUGH = 6
"""Runs of each side: with fewer even the whole range of the values holds the median with less than
95 % (2 * 0.5**n, the sign test), so no interval can promise it."""


@dataclass(frozen=True)
class Figures:
    """Of the values of a number. ``low`` and ``high``: quartiles; of one value: that value."""

    count: int
    median: float
    low: float
    high: float
    least: float
    most: float
    mean: float

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a share of the median; 0 where that is 0."""
        return abs((self.high - self.low) / self.median) if self.median else 0.0


@dataclass(frozen=True)
class Ratio:
    """Of two medians, with the interval that holds it in 95 of 100 cases, if there is one."""

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """True if 1 is outside the interval."""
        return not self.low <= 1 <= self.high


def of(values: Sequence[float]) -> Figures:
    """Return the figures of at least one value."""
    quartiles = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    return Figures(
        len(values), statistics.median(values), quartiles[0], quartiles[2],
        min(values), max(values), statistics.fmean(values),
    )  # fmt: skip


def ratio(base: Sequence[float], other: Sequence[float]) -> Ratio | None:
    """Return the ratio of ``other``'s median to ``base``'s; None: the base's median is 0."""
    below = statistics.median(base)
    if not below:
        return None
    value = statistics.median(other) / below
    draw = random.Random(f"{len(base)} {len(other)}")  # noqa: S311 - the same answer each time
    found = []
    for _ in range(DRAWS):
        under = _median(draw.choices(base, k=len(base)))
        if under:
            found.append(_median(draw.choices(other, k=len(other))) / under)
    if not found:
        return Ratio(value, value, value)
    found.sort()
    cut = (1 - LEVEL) / 2
    return Ratio(value, found[int(cut * len(found))], found[int((1 - cut) * (len(found) - 1))])


def few(base: int, other: int) -> str:
    """Return a warning if there are too few runs to say anything; else nothing."""
    if min(base, other) >= ENOUGH:
        return ""
    return f"too few runs ({base} and {other}; {ENOUGH} of each are the least)"


def shown(*values: float) -> list[str]:
    """Return numbers for people: so exact that those that differ are seen to differ.

    Whole ones, and halves as medians of them are, have all their figures, up to 15.
    """
    texts = [""]
    for digits in range(DIGITS, MOST_DIGITS + 1):
        texts = [_shown(value, digits) for value in values]
        if len(set(map(float, texts))) == len(set(values)):
            break
    return texts


def _shown(value: float, digits: int) -> str:
    if abs(value) < 1e15 and (2 * value).is_integer():
        return f"{value:.15g}"
    whole = len(f"{abs(value):.0f}")  # no exponent for what has fewer figures than 15
    return f"{value:.{max(digits, whole) if whole <= 15 else digits}g}"


def _median(values: list[float]) -> float:
    values.sort()
    half, odd = divmod(len(values), 2)
    return values[half] if odd else (values[half - 1] + values[half]) / 2
