"""Find kept records of jobs, on this node and in copies that plugins have stored.

Users can forge copies, so root reads only the records of this node.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import hooks
from vtorque_core.api.kept_records import Place, find
from vtorque_core.base.errors import Refused, printable
from vtorque_core.base.names import CONFIG_PATH, JobAttempt, Paths, safe_name
from vtorque_core.config.load import load
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site
from vtorque_core.records import log


@dataclass(frozen=True)
class KeptJob:
    """Kept records of the last attempt of a job.

    Attributes:
        places: directories with records, one per node: this node's, or plugins' copies.
        facts: contents of ``job.json`` in each directory; untrusted in copies.
    """

    id: str
    uid: int
    places: tuple[Place, ...]
    facts: tuple[Mapping[str, Any], ...]

    @property
    def changed(self) -> float:
        """Unix time of the last change."""
        return max(place.changed for place in self.places)


def jobs(config: Path | None, wanted: str | None) -> list[KeptJob]:
    """Return the kept records of a job, of an array's tasks, or of all jobs; oldest first.

    ``wanted`` is a job id, with or without the server's name. An array is ``22[]`` or ``22``, a
    task ``22[3]`` or ``22_3``. None: all jobs that the user may see. Raises Refused if nothing
    is found, ConfigError if the config is invalid.
    """
    site, plugins = load(config or CONFIG_PATH, node=False)
    uid = None if os.geteuid() == 0 else os.getuid()
    places = [
        *find(site.paths, None, uid),
        *(_remote_places(site, plugins) if uid is not None else ()),
    ]
    found = _group(places if wanted is None else _select(places, wanted))
    if not found:
        sought = "any job" if wanted is None else f"a job {printable(wanted)}"
        where = "where it runs or has run"
        if uid is None:
            where += "; for records in its owner's home, run the same command with sudo -u OWNER"
        sought += "" if uid is None else " of yours"
        raise Refused(f"this node has no records of {sought}: run this command on the node {where}")
    return found


def _remote_places(site: Site, plugins: Plugins) -> Iterator[Place]:
    for each in plugins.each(hooks.vtorque_kept_records, site=site):
        if each.error is None:
            yield each.item
        else:
            said = printable(f"plugin {each.plugin}, vtorque_kept_records: {each.error}", 500)
            sys.stderr.write(f"vtorque: warning: {said}\n")


def _select(places: list[Place], wanted: str) -> list[Place]:
    exact = [place for place in places if place.key.rpartition(".")[0] == safe_name(wanted)]
    known = (place.facts() for place in exact)
    shown = {_text(each.get("known_as")) or _text(each.get("job")) for each in known}
    if shown == {wanted}:
        return exact
    return [place for place in places if is_meant(wanted, place.facts())] or exact


def is_meant(wanted: str, facts: Mapping[str, Any]) -> bool:
    """Return True if the job whose job.json is ``facts``, or its array, has the id ``wanted``."""
    number, dot, server = wanted.partition(".")
    array = number.endswith("[]")
    element = r"(\[\d+\]|_\d+)" + ("" if array else "?")
    tail = re.escape(dot + server) if dot else r"(\..*)?"
    pattern = re.escape(number.removesuffix("[]")) + element + tail
    names = (_text(facts.get("job")), _text(facts.get("known_as")))
    return any(name and re.fullmatch(pattern, name, re.ASCII) for name in names)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _group(places: list[Place]) -> list[KeptJob]:
    attempts: dict[tuple[int, str], dict[str, tuple[Place, Mapping[str, Any]]]] = {}
    for place in places:
        facts = place.facts()
        nodes = attempts.setdefault((place.uid, place.key), {})
        nodes.setdefault(_text(facts.get("node")), (place, facts))
    last: dict[tuple[int, str], KeptJob] = {}
    for (uid, key), nodes in attempts.items():
        of, known = zip(*nodes.values(), strict=True)
        name = key.rpartition(".")[0]
        one = KeptJob(_text(known[0].get("job")) or name, uid, of, known)
        before = last.get((uid, name))
        if before is None or before.changed <= one.changed:
            last[uid, name] = one
    return sorted(last.values(), key=lambda job: job.changed)


def logging_for(paths: Paths, job: JobAttempt) -> AbstractContextManager[object]:
    """Write log messages of a ``with`` block to a job's log on this node.

    Privileges: root. Not thread-safe.
    """
    return log.open_log(log.teardown_log(paths, job))
