"""Open joblog's own sinks and those of other distributions."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vtorque_core.api.log_levels import LEVELS, parse
from vtorque_core.api.node_job import Site
from vtorque_core.live.extensions import Extensions
from vtorque_joblog.outlets import Entry, level_of
from vtorque_joblog.plugin import FACILITIES, Settings
from vtorque_joblog.syslog_journald import Syslog, SystemdJournal


def open_sink(name: str, site: Site, found: Extensions) -> logging.Handler:
    """Open a sink by its name. Raises any exception of the sink's function.

    Privileges: root.
    """
    settings = site[Settings]
    if name == "syslog":
        return Syslog(FACILITIES[settings.syslog], settings.tag)
    if name == "journald":
        return SystemdJournal(settings.tag)
    handler: logging.Handler = found.function(name)(site)
    return handler


def entry_filter(settings: Settings, logged: str) -> Callable[[Entry], bool]:
    """Return a function that is true for log entries that the sinks get.

    An entry's level must be at least ``[plugin.joblog] level``, from ``settings``. It must also be
    at least ``[log] level``, the argument ``logged``: users can enable lower levels for their jobs,
    but these entries reach no sink.
    """
    least, levels = LEVELS[settings.level.upper()], parse(logged)

    def wants(entry: Entry) -> bool:
        return level_of(entry) >= max(least, levels.minimum(entry["plugin"], entry["phase"]))

    return wants
