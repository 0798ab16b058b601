"""Median, spread, and the bootstrap confidence interval of a ratio of medians.

The interval is the percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap,
1993, chapter 13): both groups are resampled with replacement :data:`DRAWS` times, and the interval
is the middle 95 % of the ratios. The random seed is fixed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DIGITS = 5  # minimum number of digits that are shown
MOST_DIGITS = 17  # enough to distinguish any two floats
DRAWS = 2000
LEVEL = 0.95
ENOUGH = 6
"""Minimum runs of each side of a comparison. With fewer, even the whole range of values contains
the median with a probability below 95 % (sign test: 1 - 2 * 0.5**n)."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of a number's values. ``low`` and ``high`` are the quartiles."""

    count: int
    median: float
    low: float
    high: float
    least: float
    most: float
    mean: float

    @property
    def spread(self) -> float:
        """The interquartile range divided by the median; 0 if the median is 0."""
        return abs((self.high - self.low) / self.median) if self.median else 0.0


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians, with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """True if 1 is outside the interval."""
        return not self.low <= 1 <= self.high


def compute_statistics(values: Sequence[float]) -> Statistics:
    """Return the statistics of one or more values."""
    quartiles = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    return Statistics(
        len(values), statistics.median(values), quartiles[0], quartiles[2],
        min(values), max(values), statistics.fmean(values),
    )  # fmt: skip


def ratio(base: Sequence[float], other: Sequence[float]) -> Ratio | None:
    """Return the ratio of ``other``'s median to ``base``'s; None if the base's median is 0."""
    below = statistics.median(base)
    if not below:
        return None
    value = statistics.median(other) / below
    draw = random.Random(f"{len(base)} {len(other)}")  # noqa: S311 - reproducible
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


def small_sample_warning(base: int, other: int) -> str:
    """Return a warning if there are too few runs for a comparison, or an empty string."""
    if min(base, other) >= ENOUGH:
        return ""
    return f"too few runs ({base} and {other}; at least {ENOUGH} of each are needed)"


def format_numbers(*values: float) -> list[str]:
    """Format numbers with enough digits that different values look different.

    Integers and halves, which are common medians, are shown exactly, up to 15 digits.
    """
    texts = [""]
    for digits in range(DIGITS, MOST_DIGITS + 1):
        texts = [_format_number(value, digits) for value in values]
        if len(set(map(float, texts))) == len(set(values)):
            break
    return texts


def _format_number(value: float, digits: int) -> str:
    if abs(value) < 1e15 and (2 * value).is_integer():
        return f"{value:.15g}"
    whole = len(f"{abs(value):.0f}")  # no exponent below 15 digits
    return f"{value:.{max(digits, whole) if whole <= 15 else digits}g}"


def _median(values: list[float]) -> float:
    values.sort()
    half, odd = divmod(len(values), 2)
    return values[half] if odd else (values[half - 1] + values[half]) / 2
