"""The numbers of an experiment as table rows, for terminals and pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from vtorque_core.api import printable
from vtorque_experiment import figures
from vtorque_experiment.book import DONE, FAILED, STATES
from vtorque_experiment.compare import Pair
from vtorque_experiment.figures import Statistics
from vtorque_experiment.matrix import count_text
from vtorque_experiment.results import Results

Rows = Sequence[Sequence[str]]
NO_CLAIM = "without KVM, these figures say nothing about guests with KVM"
_FIGURES = ("runs", "median", "spread", "least", "most")


def state(results: Results) -> str:
    """Return the progress as one line."""
    counts = {name: sum(row.state == name for row in results.rows) for name in STATES}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    points, cells = len(results.rows), len(results.cells)
    return f"{count_text(points, 'point')} of {count_text(cells, 'combination')}: {said}"


def warnings(results: Results) -> list[str]:
    """Return warnings about the numbers, for example that guests were emulated."""
    found = []
    runs = Counter(row.cell for row in results.rows if row.state == DONE)
    cells = range(len(results.cells))
    few = [cell for cell in cells if runs[cell] < figures.ENOUGH] if runs else []
    if few:
        found.append(
            f"{len(few)} of {count_text(len(results.cells), 'combination')} with fewer than "
            f"{figures.ENOUGH} runs: too few to compare them"
        )
    emulated = sum(results.count_emulated().values())
    if emulated:
        found.append(f"{count_text(emulated, 'point')} ran in emulated guests: {NO_CLAIM}")
    failed = sum(row.state == FAILED for row in results.rows)
    if failed:
        found.append(f"without the numbers of {count_text(failed, 'failed point')}")
    return found


def warnings_of_pairs(pairs: Sequence[Pair]) -> list[str]:
    """Return warnings about a comparison, for example that guests were emulated."""
    found = []
    few = sum(bool(pair.warning) for pair in pairs)
    emulated = sum(pair.emulated for pair in pairs)
    if few:
        found.append(
            f"{few} of {count_text(len(pairs), 'comparison')} with too few runs to say anything"
        )
    if emulated:
        found.append(
            f"{emulated} of {count_text(len(pairs), 'comparison')} with emulated guests: {NO_CLAIM}"
        )
    return found


def number_table(
    results: Results, name: str, table: Mapping[tuple[int, str], Sequence[float]]
) -> tuple[Sequence[str], Rows]:
    """Return the head and rows of a table with the statistics of one number, such as ``wall``.

    ``table`` has the measured values of each number, by combination and name. Each combination in
    which the number ``name`` was measured gets a row.
    """
    rows = [
        (
            printable(results.label(cell), 200),
            *_cells(figures.compute_statistics(table[cell, name])),
        )
        for cell in range(len(results.cells))
        if (cell, name) in table
    ]
    return ("combination", *_FIGURES), rows


def summary_table(results: Results, names: Sequence[str]) -> tuple[Sequence[str], Rows]:
    """Return the head and rows of one table for several numbers; column 1 names the number."""
    table = results.table()
    rows = [
        (_column_title(name, results.unit(name)), *row)
        for name in names
        for row in number_table(results, name, table)[1]
    ]
    return ("number", "combination", *_FIGURES), rows


def comparison_table(pairs: Sequence[Pair], *, named: bool = True) -> tuple[Sequence[str], Rows]:
    """Return the head and rows of a comparison's table. ``named``: column 1 names the number."""
    heads = ("combination", "runs", "base", "spread", "median", "spread", "ratio", "95 %", "")
    return (("number", *heads) if named else heads), [_row(pair, named) for pair in pairs]


def _row(pair: Pair, named: bool) -> Sequence[str]:
    base, other = figures.format_numbers(pair.base.median, pair.other.median)
    return (
        *([_column_title(pair.name, pair.unit)] if named else []),
        printable(pair.cell, 200),
        f"{pair.base.count}/{pair.other.count}",
        base,
        _percent(pair.base.spread),
        other,
        _percent(pair.other.spread),
        *_ratio(pair),
    )


def _ratio(pair: Pair) -> tuple[str, str, str]:
    if pair.ratio is None:
        return "-", "-", pair.verdict
    interval = "-" if pair.warning else f"{pair.ratio.low:.3f} to {pair.ratio.high:.3f}"
    return f"{pair.ratio.value:.3f}", interval, pair.verdict


def _column_title(name: str, unit: str) -> str:
    return f"{name}, {printable(unit, 40)}" if unit else name


def _cells(found: Statistics) -> tuple[str, ...]:
    median, least, most = figures.format_numbers(found.median, found.least, found.most)
    return str(found.count), median, _percent(found.spread), least, most


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
