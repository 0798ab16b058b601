"""Write typed values of the site config as TOML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vtorque_core.api import show_mib


def show_toml(value: Any, unit: str | None = None) -> str:  # noqa: PLR0911 (one per kind)
    """Return a typed value as TOML (https://toml.io, 1.0), sizes and durations as text."""
    if unit == "MiB" and isinstance(value, int):
        return f'"{show_mib(value) if value else 0}"'
    if unit == "s" and isinstance(value, int | float):
        return f'"{int(value)}s"' if value == int(value) else str(value)
    if value is None:
        return '""'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(show_toml(item, unit) for item in value) + "]"
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{_string(k)} = {show_toml(v, unit)}" for k, v in value.items()) + "}"
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return show_toml({f.name: getattr(value, f.name) for f in fields})
    return _string(str(value))


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'
