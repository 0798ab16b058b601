"""An experiment or a comparison as one self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vtorque_core.api import printable
from vtorque_experiment import plots, tables, versions
from vtorque_experiment.book import FAILED
from vtorque_experiment.compare import Pair
from vtorque_experiment.results import Results
from vtorque_report import drawing

MOST_NUMBERS = 16  # numbers that have plots
MOST_FAILED = 50


@dataclass(frozen=True)
class NumberSection:
    """The section of the page about one number."""

    title: str
    unit: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    plots: Sequence[plots.ResultPlot]


def results_page(results: Results) -> str:
    """Return the page of an experiment."""
    failed = [
        (row.number, results.label(row.cell), printable(row.reason, 400))
        for row in results.rows
        if row.state == FAILED
    ][:MOST_FAILED]
    return drawing.page(
        __package__,
        "page.html.j2",
        title=results.title,
        lines=[tables.state(results), *_versions(results)],
        warnings=tables.warnings(results),
        sections=[*_number_sections(results)],
        failed=failed,
    )


def comparison_page(
    title: str, lines: Sequence[str], pairs: Sequence[Pair], sides: Sequence[str]
) -> str:
    """Return the page of a comparison; ``sides`` are the names of its two sides."""
    names = list(dict.fromkeys(pair.name for pair in pairs))
    sections = []
    for number, name in enumerate(names):
        those = [pair for pair in pairs if pair.name == name]
        series = [plots.PlotSeries(p.cell, (p.base_values, p.values)) for p in those]
        drawn = [plots.rows("both", those[0].unit, series, sides)] if number < MOST_NUMBERS else []
        heads, rows = tables.comparison_table(those, named=False)
        sections.append(NumberSection(name, those[0].unit, heads, rows, drawn))
    return drawing.page(
        __package__,
        "page.html.j2",
        title=title,
        lines=lines,
        warnings=tables.warnings_of_pairs(pairs),
        sections=sections,
        failed=[],
    )


def _number_sections(results: Results) -> Iterator[NumberSection]:
    table = results.table()
    starts = [row.begun for row in results.rows if row.begun]
    first, last = min(starts, default=0.0), max(starts, default=0.0)
    for number, name in enumerate(results.names):
        there = [cell for cell in range(len(results.cells)) if (cell, name) in table]
        if not there or (name == "code" and set(results.definition.exit_codes) == {0}):
            continue
        heads, rows = tables.number_table(results, name, table)
        drawn = []
        if number < MOST_NUMBERS:
            series = [plots.PlotSeries(results.label(c), (table[c, name],)) for c in there]
            drawn.append(plots.rows("by combination", results.unit(name), series, ("values",)))
            timed = sorted(
                (row.begun - first, results.numbers[row.number][name])
                for row in results.rows
                if row.begun and name in results.numbers.get(row.number, {})
            )
            if len(timed) > 1:
                hours = last - first > 2 * 3600
                drawn.append(plots.order("over time", results.unit(name), timed, hours))
        yield NumberSection(name, results.unit(name), heads, rows, drawn)


def _versions(results: Results) -> Iterator[str]:
    try:
        known = versions.read(results.place.versions)
        host = known["host"]
        yield printable(
            f"submitted on {host['name']} ({host['cpu']}, {host['kernel'].split()[0]}), "
            f"{known['batch_system']}; {known['qemu']}; libvirt {known['libvirt']}", 400,
        )  # fmt: skip
        core = known["vtorque"].get("vtorque-core", "?")
        yield printable(f"vtorque-core {core}, seed {results.about.get('seed', '?')}", 200)
    except (LookupError, TypeError, AttributeError):
        return


def plots_hint() -> str:
    """Return why a page has no plots, and what to do. Empty if pages have plots."""
    return "" if drawing.can_draw() else drawing.CANNOT_DRAW
