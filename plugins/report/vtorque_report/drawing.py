"""Public API for pages with plots: one self-contained HTML file without scripts.

A distribution that requires vtorque-report may import this module, but no other module of
vtorque_report. Privileges: the user, in ``vmgr``.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Callable, Mapping
from importlib import resources, util
from typing import Any

import jinja2
from markupsafe import Markup

CANNOT_DRAW = (
    "without plots, but with their tables, because vl-convert-python is not installed. Install it: "
    f"{sys.prefix}/bin/pip install --no-index --find-links WHEELS 'vtorque-report[html]' "
    "(WHEELS: a directory of wheels; in a checkout: scripts/wheels WHEELS 'report[html]')"
)

_renderer: list[Callable[..., str]] = []


def page(package: str, template: str, /, **values: object) -> str:
    """Render a Jinja template with these values, which are escaped.

    ``template`` is a file beside the modules of ``package``. It can import ``macros.html.j2`` of
    vtorque_report. The filter ``svg`` inserts a drawing of :func:`svg` unescaped. The template can
    use ``css``, ``css_hash`` and ``no_plots`` (why plots cannot be drawn, otherwise empty).
    """
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(each, ".") for each in dict.fromkeys((package, __package__))]
        ),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = _hide_drawing
    css = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    environment.globals |= {
        "css": Markup(css),  # noqa: S704 - our own file
        "css_hash": base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
        "no_plots": "" if can_draw() else CANNOT_DRAW,
    }
    return environment.get_template(template).render(**values)


def can_draw() -> bool:
    """Return True if the optional drawing library is installed."""
    return util.find_spec("vl_convert") is not None


def svg(width: int, height: int, spec: Mapping[str, Any]) -> str:
    """Draw a Vega-Lite specification (https://vega.github.io/vega-lite/docs/).

    Returns an empty string if drawing is not possible. Vega runs in this process, without network
    access. Do not pass user text, because Vega does not escape it. Use the page's CSS variables as
    colors (``var(--s0)``, ``var(--text)``), which fit light and dark themes.

    Args:
        width: in CSS pixels.
        height: in CSS pixels.
        spec: the specification, with keys such as ``data``, ``mark``, ``encoding`` or ``layer``.
    """
    if not can_draw():
        return ""
    if not _renderer:
        import vl_convert  # noqa: PLC0415 - its runtime takes half a second

        _renderer.append(vl_convert.vegalite_to_svg)
    return _renderer[0]({**_frame(width, height), **spec}, allowed_base_urls=[])


def _frame(width: int, height: int) -> dict[str, Any]:
    text = {"labelColor": "var(--text)", "titleColor": "var(--text)", "labelFontSize": 11,
            "titleFontSize": 11, "titleFontWeight": "normal"}  # fmt: skip
    return {
        "width": width,
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
        "background": None,
        "padding": 2,
        "config": {
            "font": "sans-serif",
            "view": {"stroke": None},
            "axis": {**text, "gridColor": "var(--grid)", "domainColor": "var(--line)",
                     "tickColor": "var(--line)"},
            "legend": {**text, "symbolStrokeWidth": 2, "columnPadding": 26},
        },
    }  # fmt: skip


def _hide_drawing(drawing: str) -> Markup:
    """Return a drawing of :func:`svg` as Markup, hidden from screen readers."""
    return Markup(drawing.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1))  # noqa: S704
