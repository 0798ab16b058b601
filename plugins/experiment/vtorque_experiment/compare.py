"""Compare two experiments, or combinations of one experiment with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vtorque_core.api import Refused
from vtorque_experiment import figures
from vtorque_experiment.figures import Ratio, Statistics
from vtorque_experiment.matrix import Cell, label
from vtorque_experiment.results import Results, select_numbers


@dataclass(frozen=True)
class Pair:
    """One number (metric) of one combination, with its values on both sides of a comparison.

    Attributes:
        better: the better direction, ``less`` or ``more``; empty if unknown.
        warning: why the ratio is not significant, or empty.
        emulated: true if guests of either side had no KVM.
    """

    cell: str
    name: str
    unit: str
    better: str
    base: Statistics
    other: Statistics
    ratio: Ratio | None
    warning: str
    emulated: bool
    base_values: Sequence[float]
    values: Sequence[float]

    @property
    def verdict(self) -> str:
        """The result of the comparison in words, or the reason why there is no result."""
        if self.ratio is None:
            return "the base is 0"
        if self.warning or not self.ratio.differs:
            return self.warning or "no difference seen"
        less = "less" if self.ratio.value < 1 else "more"
        return ("better" if less == self.better else "worse") if self.better else "differs"

    def data(self) -> dict[str, Any]:
        """Return this comparison for JSON, without the values of single points."""
        found = asdict(self)
        del found["base_values"], found["values"]
        return found | {"verdict": self.verdict}


def experiments(base: Results, other: Results, names: Sequence[str] = ()) -> list[Pair]:
    """Pair the combinations that both experiments have. Raises Refused if no pair has results."""
    there = {_key(cell): number for number, cell in enumerate(base.cells)}
    pairs = [
        (there[_key(cell)], number, label(cell))
        for number, cell in enumerate(other.cells)
        if _key(cell) in there
    ]
    return _make_pairs(base, other, pairs, names)


def compare_within(
    results: Results, baseline: Sequence[str], names: Sequence[str] = ()
) -> list[Pair]:
    """Compare each combination with the baseline combination that is otherwise equal.

    ``baseline`` has ``AXIS=VALUE`` words such as ``bare=true``. A combination with all these values
    is a baseline combination. Two combinations are otherwise equal if they have equal values
    on all axes except those in ``baseline``. Axes that only one of the two has are ignored: a
    combination on bare metal has no axes of -vm options.

    ``names``: the numbers to compare; if empty, all numbers. Raises Refused.
    """
    chosen = select_numbers(results.cells, baseline, str(results.place.definition))
    fixed = {pair.partition("=")[0] for pair in baseline}
    pairs = []
    for number, cell in enumerate(results.cells):
        if number in chosen:
            continue
        like = [b for b in chosen if _agree(results.cells[b], cell, fixed)]
        pairs += [(like[0], number, label(cell))] if like else []
    return _make_pairs(results, results, pairs, names)


def _key(cell: Cell) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((axis, repr(value)) for axis, value in cell.items()))


def _agree(base: Cell, cell: Cell, fixed: set[str]) -> bool:
    both = (set(base) & set(cell)) - fixed
    return all(base[axis] == cell[axis] for axis in both)


def _make_pairs(
    base: Results, other: Results, pairs: Sequence[tuple[int, int, str]], names: Sequence[str]
) -> list[Pair]:
    known = [name for name in other.names if name in base.names and name != "code"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Refused(
            f"{unknown[0]}: not in both experiments; both record: {', '.join(known) or 'none'}"
        )
    found = [*_pairs(base, other, pairs, names or known)]
    if not found:
        raise Refused(
            "nothing to compare: no combination has values in both experiments; see vmgr "
            "experiment status"
        )
    return found


def _pairs(
    base: Results, other: Results, pairs: Sequence[tuple[int, int, str]], names: Sequence[str]
) -> Iterator[Pair]:
    before, after = base.table(), other.table()
    sides = base.count_emulated(), other.count_emulated()
    for name in names:
        for old, new, said in pairs:
            ours, theirs = before.get((old, name), []), after.get((new, name), [])
            if ours and theirs:
                yield Pair(
                    said, name, other.unit(name), other.better_direction(name),
                    figures.compute_statistics(ours), figures.compute_statistics(theirs),
                    figures.ratio(ours, theirs),
                    figures.small_sample_warning(len(ours), len(theirs)),
                    old in sides[0] or new in sides[1], ours, theirs,
                )  # fmt: skip
