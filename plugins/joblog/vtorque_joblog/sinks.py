"""The sinks that come with joblog, and those of others: which there are, how they are opened."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vtorque_core.api.log_levels import LEVELS, parse
from vtorque_core.api.node_job import Site
from vtorque_core.live.extensions import Extensions
from vtorque_joblog.local import Journal, Syslog
from vtorque_joblog.outlets import Entry, level_of
from vtorque_joblog.plugin import FACILITIES, Settings


def opened(name: str, site: Site, found: Extensions) -> logging.Handler:
    """Return one of these. As root; raises whatever another distribution's function raises."""
    settings = site[Settings]
    if name == "syslog":
        return Syslog(FACILITIES[settings.syslog], settings.tag)
    if name == "journald":
        return Journal(settings.tag)
    handler: logging.Handler = found.function(name)(site)
    return handler


def wanted(settings: Settings, logged: str) -> Callable[[Entry], bool]:
    """Return which entries the site's sinks get: not what only the job's user has asked for.

    ``logged``: ``[log] level``.
    """
    least, levels = LEVELS[settings.level.upper()], parse(logged)

    def wants(entry: Entry) -> bool:
        return level_of(entry) >= max(least, levels.least(entry["plugin"], entry["phase"]))

    return wants
