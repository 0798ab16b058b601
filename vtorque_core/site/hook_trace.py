"""``VTORQUE_TRACE=1``: each call of a hook on stderr, with its arguments, results and time."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PLAIN = (str, int, float, bytes, bool, Path, type(None))
_LONGEST = 400  # characters of a result: all of an ordinary claim or element


def show(
    hook: str,
    plugin: str,
    arguments: Mapping[str, Any],
    results: Sequence[Any],
    error: BaseException | None,
    seconds: float,
) -> None:
    """Write what was called, with what, what it gave or raised, and the milliseconds it took."""
    given = ", ".join(f"{name}={_short(value)}" for name, value in arguments.items())
    lines = [f"vtorque: {plugin}: {hook}({given}) {seconds * 1e3:.1f} ms"]
    lines += [f"  -> {_cut(repr(each))}" for each in results if each is not None]
    if error is not None:
        lines.append(f"  raised {type(error).__name__}: {_cut(str(error))}")
    sys.stderr.write("\n".join(lines) + "\n")


def _short(value: Any) -> str:
    """Return a value of few words: of vTorque's own what tells one from another."""
    if isinstance(value, _PLAIN):
        return _cut(repr(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    named = next((getattr(value, n) for n in ("name", "id", "path") if hasattr(value, n)), "")
    return f"{type(value).__name__}({named})"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
