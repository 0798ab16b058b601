"""The plots of an experiment. User text is only used in labels, without special characters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vtorque_experiment import figures
from vtorque_report.drawing import svg

WIDTH = 480  # CSS pixels
MOST_ROWS = 40  # combinations in a plot; the table has all combinations
MOST_POINTS = 4000  # points in a plot; above it, points are omitted evenly
_STRANGE = re.compile(r"[^A-Za-z0-9 =._:+/@%,()-]", re.ASCII)
_LABEL = 34  # characters
_NUMBER = ".5~g"  # https://d3js.org/d3-format; 1e+9 fits where 1,000,000,000 is cut off


@dataclass(frozen=True)
class PlotSeries:
    """The values of one combination, shown as dots in one row of a plot.

    ``sides`` has one list of values, or two in a comparison: those of the base come first.
    ``label`` is untrusted user text.
    """

    label: str
    sides: Sequence[Sequence[float]]


@dataclass(frozen=True)
class ResultPlot:
    """A drawing, with a text alternative in ``label``."""

    title: str
    unit: str
    svg: str
    label: str


def rows(title: str, unit: str, series: Sequence[PlotSeries], sides: Sequence[str]) -> ResultPlot:
    """Plot each value as a dot and each median as a stroke, one row per combination."""
    shown = series[:MOST_ROWS]
    total = sum(len(values) for each in shown for values in each.sides)
    step = max(1, math.ceil(total / MOST_POINTS))
    two = len(sides) > 1
    points, medians = [], []
    for number, each in enumerate(shown):
        for side, values in enumerate(each.sides):
            row = {"n": number, "s": sides[side]}
            points += [
                row | {"v": _round_value(value), "j": _jitter(place, len(values))}
                for place, value in enumerate(values[::step])
            ]
            if values:
                medians.append(
                    row | {"v": _round_value(figures.compute_statistics(values).median), "j": 0.5}
                )
    labels = [_STRANGE.sub("?", each.label)[:_LABEL] for each in shown]
    per_row = 30 if two else 22
    spec: dict[str, Any] = {}
    spec["encoding"] = {
        "y": {"field": "n", "type": "ordinal", "scale": {"paddingInner": 0.25},
              "axis": {"title": None, "labelExpr": f"({json.dumps(labels)})[datum.value]",
                       "labelLimit": 200, "minExtent": _extent(labels), "grid": False}},
        "x": {"field": "v", "type": "quantitative", "scale": {"zero": False, "nice": True},
              "axis": {"title": None, "tickCount": 5, "format": _NUMBER}},
        "yOffset": {"field": "s" if two else "j",
                    "type": "nominal" if two else "quantitative",
                    "scale": {} if two else {"domain": [0, 1]}},
        "color": {"field": "s", "type": "nominal", "sort": list(sides),
                  "scale": {"domain": list(sides),
                            "range": [f"var(--s{n})" for n in range(len(sides))]},
                  "legend": {"orient": "top", "title": None} if two else None},
    }  # fmt: skip
    spec["layer"] = [
        {"data": {"values": points},
         "mark": {"type": "point", "filled": True, "size": 22, "opacity": 0.55}},
        {"data": {"values": medians},
         "mark": {"type": "tick", "thickness": 2.5, "size": per_row * (0.36 if two else 0.7)}},
    ]  # fmt: skip
    said = "; ".join(
        f"{each.label}: {' and '.join(_describe_values(values) for values in each.sides if values)}"
        for each in shown
    )
    height = max(90, 40 + per_row * len(shown) + (26 if two else 0))
    return ResultPlot(title, unit, svg(WIDTH, height, spec), said)


def order(title: str, unit: str, values: Sequence[tuple[float, float]], hours: bool) -> ResultPlot:
    """Plot the values of a number over time, to show a drift.

    ``values`` are pairs: seconds since the first value, and value. The time axis is in hours if
    ``hours`` is true, otherwise in minutes.
    """
    step = max(1, math.ceil(len(values) / MOST_POINTS))
    by = 3600.0 if hours else 60.0
    data = [{"t": _round_value(at / by), "v": _round_value(value)} for at, value in values[::step]]
    spec: dict[str, Any] = {}
    spec["data"] = {"values": data}
    spec["mark"] = {"type": "point", "filled": True, "size": 18, "opacity": 0.6,
                    "color": "var(--s2)"}  # fmt: skip
    axis = {"title": f"begun after, {'hours' if hours else 'min'}", "tickCount": 6}
    spec["encoding"] = {
        "x": {"field": "t", "type": "quantitative", "axis": axis},
        "y": {"field": "v", "type": "quantitative", "scale": {"zero": False},
              "axis": {"title": None, "tickCount": 4, "format": _NUMBER,
                       "minExtent": _extent(["1.1e+9"])}},
    }  # fmt: skip
    half = len(values) // 2 or 1
    first, last = [v for _, v in values[:half]], [v for _, v in values[half:]] or [values[-1][1]]
    label = f"the first half has {_describe_values(first)}, the second {_describe_values(last)}"
    return ResultPlot(title, unit, svg(WIDTH, 190, spec), label)


def _round_value(value: float) -> float:
    return float(f"{value:.6g}")


def _describe_values(values: Sequence[float]) -> str:
    found = figures.compute_statistics(values)
    return f"{found.count} values, median {found.median:.4g}"


def _jitter(place: int, count: int) -> float:
    """Return a dot's offset in its row. Three or more dots are spread; fewer are centered."""
    return 0.5 if count < 3 else 0.15 + 0.7 * ((place * 0.618034) % 1)


def _extent(labels: Sequence[str]) -> int:
    """Return the width for labels in pixels. Vega's own estimate is too small for browsers."""
    return min(210, 12 + 7 * max(len(label) for label in labels))
