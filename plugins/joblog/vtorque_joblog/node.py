"""Give the core the sinks that the site has chosen; look at them for doctor. As root."""

from __future__ import annotations

import logging
import os
import pwd
import sys
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api import hookimpl
from vtorque_core.api_log import LEVELS, LogJob, entry_of, one_line
from vtorque_core.api_node import HealthCheck, HealthResult, Site, require_root_owned
from vtorque_joblog.file import JsonFile
from vtorque_joblog.local import JOURNAL, SYSLOG, Journal, Syslog
from vtorque_joblog.plugin import FACILITIES, Settings
from vtorque_joblog.user_file import UserFile


@hookimpl
def vtorque_log_handlers(job: LogJob) -> Iterator[logging.Handler]:
    """Yield a handler for each sink that is on."""
    settings = job.site[Settings]
    for handler in _of_the_site(settings):
        handler.setLevel(LEVELS[settings.level.upper()])
        handler.addFilter(lambda record: not record.__dict__.get("asked"))
        yield handler
    if settings.user_file:
        user = pwd.getpwnam(job.owner)
        yield UserFile(path_of(settings.user_file, job, user), user)


def _of_the_site(settings: Settings) -> Iterator[logging.Handler]:
    if settings.syslog:
        yield Syslog(FACILITIES[settings.syslog], settings.tag)
    if settings.journald:
        yield Journal(settings.tag)
    if settings.stderr:
        yield Stderr()
    if settings.file:
        days = settings.file_days * 86400
        yield JsonFile(settings.file, settings.file_size << 20, days, settings.file_count)


class Stderr(logging.Handler):
    """One line a record to where the batch system puts its hooks' stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write it."""
        entry = entry_of(record)
        sys.stderr.write(f"vtorque: {entry['job']}: {one_line(entry)}\n")
        sys.stderr.flush()


def path_of(template: str, job: LogJob, user: pwd.struct_passwd) -> str:
    """Return the path of a job's file of the user's own. ``job`` and ``node`` have no slash."""
    values = {"home": user.pw_dir, "user": user.pw_name, "uid": str(user.pw_uid)}
    values |= {"job": job.key, "node": job.node.replace("/", "_")}
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", value)
    return template


def _check(site: Site) -> Iterator[HealthResult]:
    settings = site[Settings]
    sockets = ((settings.syslog, SYSLOG, "syslog"), (settings.journald, JOURNAL, "journald"))
    for wanted, path, name in sockets:
        if wanted and not Path(path).is_socket():
            fix = f"start the service that listens there, or switch {name} off in [plugin.joblog]"
            yield HealthResult("warning", f"{name}: no socket {path}", fix)
    if settings.file:
        yield _check_file(Path(settings.file))
    on = [n for n in ("syslog", "journald", "stderr", "file", "user_file") if getattr(settings, n)]
    yield HealthResult("ok", f"sinks: {', '.join(on) or 'none'}")


def _check_file(path: Path) -> HealthResult:
    fix = "make its directory, with root alone able to write it"
    try:
        if os.geteuid() == 0:
            require_root_owned(path.parent)
    except Exception as error:
        return HealthResult("failed", f"file: {error}", fix)
    if not path.parent.is_dir():
        return HealthResult("failed", f"file: {path.parent} is no directory", fix)
    return HealthResult("ok", f"file: {path}")


@hookimpl
def vtorque_health_checks() -> Iterator[HealthCheck]:
    """Yield the check of what the sinks need."""
    yield HealthCheck("log sinks", _check)
