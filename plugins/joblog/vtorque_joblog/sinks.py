"""The sinks that come with joblog, as functions that open them."""

from __future__ import annotations

import json
import logging
import pwd
from collections.abc import Callable, Iterator
from functools import partial

from vtorque_core.api import HostFault
from vtorque_joblog.file import JsonFile
from vtorque_joblog.local import Journal, Syslog
from vtorque_joblog.outlets import JobLog
from vtorque_joblog.plugin import FACILITIES, Settings
from vtorque_joblog.user_file import UserFile


def of_the_site(settings: Settings) -> Iterator[tuple[str, Callable[[], logging.Handler]]]:
    """Yield name and opening function of each that is on, but for ``user_file``."""
    if settings.syslog:
        yield "syslog", partial(Syslog, FACILITIES[settings.syslog], settings.tag)
    if settings.journald:
        yield "journald", partial(Journal, settings.tag)
    if settings.file:
        yield "file", partial(JsonFile, settings.file)


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
