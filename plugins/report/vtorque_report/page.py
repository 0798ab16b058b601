"""The report as one self-contained HTML page with SVG plots, without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtorque_report import drawing, plots, text
from vtorque_report.figures import Figures
from vtorque_report.read import ReportGuest
from vtorque_report.report import JobArray, Report
from vtorque_report.units import percent


@dataclass(frozen=True)
class GuestSection:
    """A guest's section of the page."""

    guest: ReportGuest
    plots: Sequence[plots.Plot]


def render(report: Report | JobArray) -> str:
    """Return the report's HTML page, with tables if plots cannot be drawn."""
    common = {
        "report": report,
        "parts": [(name, *text.row(part)) for name, part in report.parts],
        "row_heads": text.ROW_HEADS,
    }
    if isinstance(report, JobArray):
        return drawing.page(__package__, "array.html.j2", **common)
    axis = plots.Axis(report.start, max(report.end - report.start, 1.0))
    return drawing.page(
        __package__,
        "page.html.j2",
        **common,
        first=report.first_attempt,
        percent=percent,
        shares=list(text.shares(report.total)),
        amounts=list(text.amounts(report.total)),
        heads=text.HEADS,
        rows=[(guest, text.cells(figures)) for guest, figures in report.guests],
        timelines=[(a.node, plots.timeline(a, axis)) for a in report.attempts if a.phases],
        sections=[
            GuestSection(g, [*plots.guest_plots(g, axis)]) for g, f in _guests_with_plots(report)
        ],
        left_out=max(0, len(report.guests) - plots.MAX_GUESTS),
    )


def _guests_with_plots(report: Report) -> Sequence[tuple[ReportGuest, Figures]]:
    return [(g, f) for g, f in report.guests[: plots.MAX_GUESTS] if f.measured]
