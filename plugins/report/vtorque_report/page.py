"""The report as one HTML page: no script, nothing from elsewhere, plots as SVG."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import jinja2
from markupsafe import Markup

from vtorque_report import plots, text
from vtorque_report.figures import Figures
from vtorque_report.read import Guest
from vtorque_report.report import Array, Report
from vtorque_report.units import percent


@dataclass(frozen=True)
class Section:
    """A guest's part of the page."""

    guest: Guest
    plots: Sequence[plots.Plot]


def render(report: Report | Array) -> str:
    """Return the page; it says so if it has no plots, and has their tables all the same.

    Of an array it is the table of its elements.
    """
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.PackageLoader("vtorque_report", "."),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    environment.filters["svg"] = _svg
    css = resources.files("vtorque_report").joinpath("page.css").read_text(encoding="utf-8")
    common = {
        "report": report,
        "css": Markup(css),  # noqa: S704 - our own file
        "css_hash": base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
        "parts": [(name, *text.row(part)) for name, part in report.parts],
        "row_heads": text.ROW_HEADS,
    }
    if isinstance(report, Array):
        return environment.get_template("array.html.j2").render(**common)
    axis = plots.Axis(report.start, max(report.end - report.start, 1.0))
    return environment.get_template("page.html.j2").render(
        **common,
        first=report.first,
        shares=list(text.shares(report.total)),
        amounts=list(text.amounts(report.total)),
        heads=text.HEADS,
        rows=[(guest, text.cells(figures)) for guest, figures in report.guests],
        timelines=[(a.node, plots.timeline(a, axis)) for a in report.attempts if a.phases],
        sections=[Section(g, [*plots.of_guest(g, axis)]) for g, f in _drawn(report)],
        no_plots="" if plots.can_draw() else plots.CANNOT_DRAW,
        left_out=max(0, len(report.guests) - plots.MAX_GUESTS),
    )


def _drawn(report: Report) -> Sequence[tuple[Guest, Figures]]:
    return [(g, f) for g, f in report.guests[: plots.MAX_GUESTS] if f.measured]


def _svg(drawing: str) -> Markup:
    """Let an SVG through that :mod:`plots` has made of numbers and its own words."""
    return Markup(drawing.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1))  # noqa: S704
