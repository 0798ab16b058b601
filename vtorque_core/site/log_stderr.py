"""Logging on the user's side: ``VTORQUE_LOG`` has vsub and the job shell say more on stderr.

On the path of every ``vsub``: :mod:`logging` is imported where the variable is set only.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from vtorque_core.api.log_levels import VARIABLE, Levels, name_of, parse, plugin_of
from vtorque_core.base.errors import UsageError, printable

if TYPE_CHECKING:
    import logging

_set_up: list[Levels] = []


def debug(component: str, text: str, *args: object) -> None:
    """Log at DEBUG under ``vtorque_core.<component>``, if the variable wants it.

    Raises UsageError if the variable says what is no level.
    """
    if set_up():
        import logging  # noqa: PLC0415 (5 ms)

        logging.getLogger(f"vtorque_core.{component}").debug(text, *args)


def set_up() -> bool:
    """Have what is logged written to stderr, if the variable is set; return whether. UsageError."""
    wanted = os.environ.get(VARIABLE)
    if not wanted or _set_up:
        return bool(_set_up)
    try:
        levels = parse(wanted)
    except ValueError as error:
        raise UsageError(f"{VARIABLE}={printable(wanted, 80)}: {error}") from None
    import logging  # noqa: PLC0415

    _set_up.append(levels)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.levelno >= levels.least(plugin_of(record.name), ""))
    formatter: Any = _Harmless()
    handler.setFormatter(formatter)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(min(levels.of.values()))
    return True


class _Harmless:
    """A formatter of one line a record, without what a terminal would obey."""

    def format(self, record: logging.LogRecord) -> str:
        text = printable(record.getMessage()[:4096], 4096)
        return f"{name_of(record.levelno)} {record.name}: {text}"
