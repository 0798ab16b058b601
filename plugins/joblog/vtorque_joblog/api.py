"""What a plugin needs to log, and to bring a sink of its own. Public; for acting modules.

To log, nothing of this is needed: ``logging.getLogger("vtorque_acme").info("%d cards", n)``. What
logger names that do not begin with ``vtorque_`` say is not in a job's log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api_node import Site
from vtorque_core.errors import printable
from vtorque_core.log_levels import LEVELS, TRACE, Levels, name_of, parse

__all__ = [
    "LEVELS",
    "TRACE",
    "Levels",
    "LogJob",
    "entry_of",
    "name_of",
    "one_line",
    "parse",
    "printable",
]


@dataclass(frozen=True)
class LogJob:
    """Whose log it is: what ``vtorque_log_handlers`` gets.

    Args:
        id: the batch system's job id; ``attempt``: counts restarts of it.
        key: the name of the attempt, fit for a file name.
        node: this node's name in the batch system.
        owner: the login name of the job's owner; ``uid``: their number.
        site: the site config: ``job.site[Settings]``.
        kept: directory with the log that the core writes; the job's owner may read it.
    """

    id: str
    attempt: int
    key: str
    node: str
    owner: str
    uid: int
    site: Site
    kept: Path


def entry_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return a record that a sink got as the object that ``log.jsonl`` has: JSON values, harmless.

    Keys: ``t`` (Unix seconds), ``level``, ``logger``, ``plugin``, ``phase``, ``guest`` (index on
    this node, or None), ``node``, ``job``, ``message``, and perhaps ``detail``, a list of lines.
    """
    entry: Mapping[str, Any] = record.__dict__["entry"]
    return entry


def one_line(entry: Mapping[str, Any]) -> str:
    """Return an entry as people read it, without time and job; what of ``detail`` fits is in it."""
    guest = entry.get("guest")
    place = f"{entry.get('phase') or '-'}{'' if guest is None else f' g{guest}'}"
    text = f"{entry.get('level')} [{place}] {entry.get('logger')}: {entry.get('message')}"
    detail = entry.get("detail") or []
    return " | ".join([text, *map(str, detail)])
