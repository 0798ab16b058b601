"""Limits for selected jobs, such as those of one queue or group: ``[[limits]]``.

Each matching entry overrides earlier entries, ``[options]`` and ``[plugins]``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vtorque_core.base.errors import printable
from vtorque_core.config.option_limits import Limits
from vtorque_core.config.values import unknown

OF_BATCH = ("queue", "partition", "account", "qos")
"""Facts of a job that a batch system may report (``BatchSystem.facts``)."""

SELECTORS = (*OF_BATCH, "group", "user")
_BELOW = ("options", "plugins")
ALWAYS_THERE = ("queue", "partition")

Facts = Mapping[str, tuple[str, ...]]
"""Facts of a job by selector; missing facts are unknown."""


@dataclass(frozen=True)
class Entry:
    """One ``[[limits]]`` entry, with its ``number`` in the file from 1.

    Attributes:
        jobs: names or globs by selector (``queue``). For each selector, a name must match the job.
        plugins: False disables a plugin, True enables it again.
    """

    number: int
    jobs: Mapping[str, tuple[str, ...]]
    options: Mapping[str, Limits]
    plugins: Mapping[str, bool]

    def __str__(self) -> str:
        names = {key: of[0] if len(of) == 1 else of for key, of in self.jobs.items()}
        jobs = (f"{key} = {json.dumps(of, ensure_ascii=False)}" for key, of in names.items())
        return f"[[limits]] {self.number} ({printable(', '.join(jobs))})"


def parse_selectors(
    table: Mapping[str, Any], told: Collection[str], system: str
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the job selectors in a ``[[limits]]`` table, and error messages by key.

    ``told``: facts that the batch system ``system`` reports.
    """
    found: dict[str, tuple[str, ...]] = {}
    problems: dict[str, str] = {}
    for key, value in table.items():
        names = value if isinstance(value, list) else [value]
        if key in _BELOW:
            continue
        if key not in SELECTORS:
            problems[key] = unknown(key, (*SELECTORS, *_BELOW))
        elif key in OF_BATCH and key not in told:
            knows = ", ".join(sorted(told)) or "neither account nor queue"
            problems[key] = f"{system} does not report this about jobs; it reports {knows}"
        elif not names or not all(isinstance(name, str) for name in names):
            problems[key] = "must be a name, a glob, or a list of them"
        else:
            found[key] = tuple(names)
    if not found and not problems:
        problems[""] = (
            f"does not select jobs: set {', '.join(SELECTORS)}; "
            "limits for all jobs belong in [options] and [plugins]"
        )
    return found, problems
