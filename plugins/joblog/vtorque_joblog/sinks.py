"""The sinks that come with joblog, and those of others: which there are, how they are opened."""

from __future__ import annotations

import json
import logging
import pwd
from collections.abc import Callable

from vtorque_core.api import HostFault
from vtorque_core.api.log_levels import LEVELS, parse
from vtorque_core.api.node_job import Site
from vtorque_core.live.extensions import Extensions
from vtorque_joblog.local import Journal, Syslog
from vtorque_joblog.outlets import Entry, JobLog, level_of
from vtorque_joblog.plugin import FACILITIES, Settings
from vtorque_joblog.user_file import UserFile


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


def user_file(template: str, job: JobLog) -> logging.Handler:
    """Return the sink of one job's user. Raises HostFault (no such user), OSError."""
    try:
        user = pwd.getpwuid(job.uid)
    except KeyError:
        raise HostFault(f"no user has the number {job.uid}") from None
    with job.path.open("rb") as file:
        node = str(json.loads(file.readline())["node"])
    return UserFile(path_of(template, job, node, user), user)


def path_of(template: str, job: JobLog, node: str, user: pwd.struct_passwd) -> str:
    """Return the path of a job's file of the user's own. The job's key has no slash."""
    values = {"home": user.pw_dir, "user": user.pw_name, "uid": str(user.pw_uid)}
    values |= {"job": job.key, "node": node.replace("/", "_")}
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", value)
    return template
