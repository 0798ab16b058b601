"""The plots of a job. Drawings contain numbers and fixed words, but no text of a user or guest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vtorque_report import figures as f
from vtorque_report.drawing import svg
from vtorque_report.read import Attempt, Line, Phase, ReportGuest
from vtorque_report.units import byte_unit, duration

WIDTH, HEIGHT = 360, 190  # CSS pixels: a plot fits a phone; wider screens show several per row
POINTS = 240  # points of a line
ROWS = 12  # rows of the table beside a plot
MAX_GUESTS = 32  # guests with plots; the table has all guests
MAX_APP = 24  # plots of metrics that a guest's job reported
APP = "vtorque_app_"
_FEW = 24  # a line with at most this many points shows them

Values = Sequence[tuple[float, float]]
"""Points of a line: (seconds since the job's start, value)."""


@dataclass(frozen=True)
class Plot:
    """A drawing, with its content as text and table for accessibility.

    Args:
        title: the measured quantity, possibly text from a guest. The page escapes it.
        unit: the unit of all values.
        label: a sentence that describes the plot, without the title.
        heads, rows: the content as a table.
    """

    title: str
    unit: str
    svg: str
    label: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Axis:
    """The time axis of all plots of a job: from ``start`` (Unix time), ``seconds`` long."""

    start: float
    seconds: float

    @property
    def unit(self) -> tuple[float, str]:
        """The axis's unit: seconds per unit, and the unit's name."""
        for seconds, name, least in ((86400, "days", 2), (3600, "hours", 2), (60, "min", 2)):
            if self.seconds >= least * seconds:
                return float(seconds), name
        return 1.0, "s"

    def scale(self, at: float) -> float:
        """Convert seconds since the job's start to the axis's unit."""
        return round(at / self.unit[0], 5)


def guest_plots(guest: ReportGuest, axis: Axis) -> Iterator[Plot]:
    """Yield a guest's plots: its resources, and the metrics that the job's programs report."""
    lines = thin_lines(guest.lines)
    cpu = rates(lines, axis, f.CPU)
    steal = rates(lines, axis, f.STEAL)
    series = {"guest": cpu, "emulator": rates(lines, axis, *f.OVERHEAD)}
    yield from _plot("CPU", "CPUs in use", series, axis, top=float(guest.vcpus))
    wanted = dict(cpu)
    shares = [(at, 100 * s / (s + wanted[at])) for at, s in steal if s + wanted.get(at, 0.0) > 0]
    yield from _plot("Steal", "% of the time vCPUs wanted to run", {"steal": shares}, axis, top=5.0)
    yield from _plot(
        "Memory", "", {
            "used by QEMU": gauges(lines, axis, f.RESIDENT),
            "requested": gauges(lines, axis, f"{f.GUEST}memory_assigned_bytes"),
        }, axis, per="",
    )  # fmt: skip
    series = {"read": rates(lines, axis, f.READ), "written": rates(lines, axis, f.WRITTEN)}
    yield from _plot("Disk, without shared directories", "", series, axis, per="/s")
    series = {"received": rates(lines, axis, f.RECEIVED), "sent": rates(lines, axis, f.SENT)}
    yield from _plot("Network", "", series, axis, per="/s")
    names = dict.fromkeys(n for line in guest.lines for n in line.values if n.startswith(APP))
    for name in list(names)[:MAX_APP]:
        own = thin_lines([line for line in guest.lines if name in line.values])
        yield from _plot(name.removeprefix(APP), "", {"value": gauges(own, axis, name)}, axis)


def thin_lines(lines: Sequence[Line]) -> Sequence[Line]:
    """Return at most :data:`POINTS` + 1 of the lines at even intervals, including the last line.

    A line is one sample: the values of all series at one time.
    """
    step = max(1, math.ceil(len(lines) / POINTS))
    return [*lines[:-1:step], *lines[-1:]]


def rates(lines: Sequence[Line], axis: Axis, *names: str) -> Values:
    """Return the growth per second of a sum of counters, at each sample."""
    totals = ((line.time, f.sum_metrics(line, *names)) for line in lines)
    known = [(at - axis.start, total) for at, total in totals if total is not None]
    pairs = [(a, b) for a, b in itertools.pairwise(known) if b[0] > a[0]]
    found = [(b[0], max(0.0, b[1] - a[1]) / (b[0] - a[0])) for a, b in pairs]
    return [(pairs[0][0][0], found[0][1]), *found] if found else []


def gauges(lines: Sequence[Line], axis: Axis, name: str) -> Values:
    """Return the value of a metric at each sample."""
    return [(line.time - axis.start, line.values[name]) for line in lines if name in line.values]


def _plot(
    title: str,
    unit: str,
    series: Mapping[str, Values],
    axis: Axis,
    *,
    top: float = 0.0,
    per: str | None = None,
) -> Iterator[Plot]:
    """Yield a line plot; nothing without data.

    If ``per`` is given, such as ``/s``, the values are bytes. The plot's unit is then, for example,
    ``MiB/s``, and ``unit`` is ignored.
    """
    series = {name: values for name, values in series.items() if values}
    if not series:
        return
    most = max([top, *(value for values in series.values() for _, value in values)])
    if per is not None:
        number, name = byte_unit(most)
        unit, most = f"{name}{per}", most / number
        series = {n: [(at, v / number) for at, v in values] for n, values in series.items()}
    said = [
        f"{name} {_format_mean(v)} on average, at most {_format_maximum(v)}"
        for name, v in series.items()
    ]
    label = f"{f'{unit}: ' if unit else ''}{'; '.join(said)}; over {duration(axis.seconds)}"
    heads, rows = _table(series)
    yield Plot(title, unit, svg(WIDTH, HEIGHT, _lines(series, axis, most)), label, heads, rows)


def _format_mean(values: Values) -> str:
    return f"{sum(value for _, value in values) / len(values):.3g}"


def _format_maximum(values: Values) -> str:
    return f"{max(value for _, value in values):.3g}"


def _table(series: Mapping[str, Values]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    times = sorted({at for values in series.values() for at, _ in values})
    step = max(1, math.ceil(len(times) / ROWS))
    known = [dict(values) for values in series.values()]
    rows = [
        (duration(max(0.0, at)), *(f"{v[at]:.3g}" if at in v else "-" for v in known))
        for at in [*times[:-1:step], *times[-1:]]
    ]
    return ("after", *series), rows


def _lines(series: Mapping[str, Values], axis: Axis, most: float) -> dict[str, Any]:
    names = list(series)
    points = [
        {"t": axis.scale(at), "y": float(f"{value:.5g}"), "s": name}
        for name, values in series.items()
        for at, value in values
    ]
    few = max(len(values) for values in series.values()) <= _FEW
    scale: dict[str, Any] = {"zero": most >= 0, "nice": True}
    if most > 0 or not any(value for values in series.values() for _, value in values):
        scale["domainMax"] = most or 1  # draw zeros as a line at the bottom
    spec: dict[str, Any] = {"data": {"values": points}}
    spec["mark"] = {"type": "line", "strokeWidth": 1.6, "point": {"size": 14} if few else False}
    legend = {"orient": "top", "title": None, "symbolType": "stroke"}
    spec["encoding"] = {
        "x": _time(axis),
        "y": {"field": "y", "type": "quantitative", "scale": scale,
              "axis": {"title": None, "tickCount": 4}},
        "color": {"field": "s", "type": "nominal", "sort": names,
                  "scale": {"domain": names, "range": [f"var(--s{n})" for n in range(len(names))]},
                  "legend": legend if len(names) > 1 else None},
        "strokeDash": {"field": "s", "type": "nominal", "sort": names,
                       "scale": {"domain": names, "range": [[1, 0], [5, 3], [2, 2]][: len(names)]},
                       "legend": None},
    }  # fmt: skip
    return spec


def timeline(attempt: Attempt, axis: Axis) -> Plot:
    """Plot the phases of a job on a node, and the boot of each guest."""
    ranks = {g.index: g.rank for g in attempt.guests[:MAX_GUESTS]}
    rows = [*_rows(attempt.phases, ranks)]
    bars = [
        {"n": number, "a": axis.scale(start), "b": axis.scale(end), "s": kind}
        for number, (_, start, end, kind) in enumerate(
            (name, begin - axis.start, end - axis.start, kind) for name, begin, end, kind in rows
        )
    ]
    names = [name for name, *_ in rows]
    kinds = ["start", "script", "guest"]
    spec: dict[str, Any] = {"data": {"values": bars}}
    spec["mark"] = {"type": "bar", "height": 10, "minBandSize": 2, "strokeWidth": 1.5}
    colours = {"domain": kinds, "range": ["var(--s0)", "var(--s2)", "var(--s1)"]}
    colour = {"field": "s", "type": "nominal", "legend": None, "scale": colours}
    spec["encoding"] = {
        "x": _time(axis) | {"field": "a"},
        "x2": {"field": "b"},
        "y": {"field": "n", "type": "ordinal", "scale": {"paddingInner": 0.2},
              "axis": {"title": None, "grid": False, "labelExpr": _labels(names),
                       "labelLimit": 110,
                # Browsers' fonts are wider than the font that Vega measures with.
                "minExtent": 92}},
        "color": colour,
        "stroke": colour,
    }  # fmt: skip
    table = [(name, duration(max(0.0, a - axis.start)), duration(b - a)) for name, a, b, _ in rows]
    label = f"{len(rows)} bars from start to end over {duration(axis.seconds)}"
    drawing = svg(WIDTH, max(90, 36 + 17 * len(rows)), spec)
    return Plot("Phases", "", drawing, label, ("phase", "begins after", "takes"), table)


def _rows(
    phases: Sequence[Phase], ranks: Mapping[int, int]
) -> Iterator[tuple[str, float, float, str]]:
    """Yield the timeline's bars: name, start, end (Unix seconds) and kind."""
    for phase in phases:
        if phase.guest is None:
            known = phase.name in (*f.START, *f.RUN, *f.STILL, *f.MOVED, "teardown", "release")
            kind = "script" if phase.name == "run" else "start"
            yield phase.name if known else "other", phase.start, phase.end, kind
            if phase.name == "ready":
                for mark in phases:
                    rank = None if mark.guest is None else ranks.get(mark.guest)
                    if mark.name == "ready" and rank is not None:
                        yield f"guest {rank} ready", mark.start, mark.end, "guest"


def _labels(names: Sequence[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "][datum.value]"


def _time(axis: Axis) -> dict[str, Any]:
    seconds, name = axis.unit
    return {
        "field": "t", "type": "quantitative",
        "scale": {"domain": [0, axis.seconds / seconds], "nice": False},
        "axis": {"title": f"time in {name}", "tickCount": 6},
    }  # fmt: skip
