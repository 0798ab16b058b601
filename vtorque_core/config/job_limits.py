"""Limits for selected jobs, such as those of one queue or group: ``[[limits]]``.

Each matching entry overrides earlier entries, ``[options]`` and ``[plugins]``.
"""

from __future__ import annotations

import grp
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
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

    def applies(self, facts: Facts) -> bool | None:
        """Return True if the entry applies to a job; None if this is unknown."""
        found = [_matches(facts.get(name), wanted) for name, wanted in self.jobs.items()]
        return False if False in found else None if None in found else True


def _matches(has: tuple[str, ...] | None, wanted: Iterable[str]) -> bool | None:
    if has is None:
        return None
    return any(fnmatchcase(name, each) for name in has for each in wanted)


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


def groups_of(user: str, gid: int) -> tuple[tuple[str, int], ...]:
    gids = [gid, *(other for other in os.getgrouplist(user, gid) if other != gid)]
    return tuple((_group_name(each), each) for each in gids)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"g{gid}"
