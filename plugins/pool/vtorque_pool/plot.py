"""The HTML page of ``vtorque pool simulate --html``: wait time against machine hours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from vtorque_pool.simulate import SimulationResult, table

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 760, 420, 80, 20, 50
_COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#b8860b", "#34495e")


def page(name: str, jobs: int, results: Sequence[SimulationResult]) -> str:
    """Return the simulated pools as an HTML page."""
    title = escape(f"{name}: {jobs} jobs in {len(results)} pools")
    lines = escape("\n".join(table(results)))
    return (
        f"<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        "<style>body{font-family:sans-serif;margin:2em}text{font-size:12px}</style></head>"
        f"<body><h1>{title}</h1>{_svg(results)}<pre>{lines}</pre></body></html>\n"
    )


def _svg(results: Sequence[SimulationResult]) -> str:
    most_hours = _next_round_value(max(each.machine_hours for each in results))
    most_wait = _next_round_value(max(each.mean_wait for each in results))
    wide, high = _WIDTH - _LEFT - 20, _HEIGHT - _TOP - _BOTTOM
    groups = {key: i for i, key in enumerate(dict.fromkeys(_group(each) for each in results))}

    def position(hours: float, wait: float) -> tuple[float, float]:
        return _LEFT + wide * hours / most_hours, _TOP + high * (1 - wait / most_wait)

    parts = []
    for step in range(5):
        x, _ = position(most_hours * step / 4, 0)
        _, y = position(0, most_wait * step / 4)
        parts.append(_text(x, _HEIGHT - _BOTTOM + 18, f"{most_hours * step / 4:g}", "middle"))
        parts.append(_text(_LEFT - 8, y + 4, f"{most_wait * step / 4:g}", "end"))
        parts.append(f"<path d='M{_LEFT} {y:.1f}H{_LEFT + wide}' stroke='#ddd'/>")
    parts.append(_text(_LEFT + wide / 2, _HEIGHT - 10, "machine hours", "middle"))
    parts.append(_text(8, 14, "mean wait, s", "start"))
    for key, index in groups.items():
        colour = _COLOURS[index % len(_COLOURS)]
        mine = sorted((r for r in results if _group(r) == key), key=lambda r: r.machine_hours)
        points = [position(each.machine_hours, each.mean_wait) for each in mine]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}'/>")
        for each, (x, y) in zip(mine, points, strict=True):
            said = f"{key}, idle {each.sizes.idle:g} s: {each.mean_wait:.0f} s"
            parts.append(
                f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{colour}'>"
                f"<title>{said}, {each.machine_hours:.1f} h</title></circle>"
            )
        parts.append(_text(_WIDTH - 24, _TOP + 14 + 16 * index, key, "end", colour))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{_HEIGHT}'>"
        f"{''.join(parts)}</svg>"
    )


def _group(result: SimulationResult) -> str:
    return f"most {result.sizes.most}, least {result.sizes.least}"


def _next_round_value(value: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= value)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    at = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'"
    return f"<text {at} fill='{colour}'>{escape(text)}</text>"
