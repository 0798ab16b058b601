"""joblog on the node: the follower and the health checks. Privileges: root."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api import constant_hook, hookimpl, require_root_owned
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_core.live.node_process import NodeProcess
from vtorque_joblog.plugin import Settings
from vtorque_joblog.syslog_journald import JOURNAL, SYSLOG


class Follower(NodeProcess):
    """The node's log follower, one for all jobs (:mod:`vtorque_joblog.follower`)."""

    kind = "joblog-follower"
    name = "joblog"
    module = "vtorque_joblog.follower"

    def release(self) -> None:
        """Remove the follower's lock file. The follower then ends, even if it is still starting.

        The next follower may start at once; it waits until this follower has ended.
        """
        Path(self.lock).unlink(missing_ok=True)


vtorque_resources = constant_hook(Follower)


@hookimpl
def vtorque_pre_boot(job: NodeJob) -> None:
    """Start the node's :class:`Follower` unless it is running, without waiting for it.

    Before the boot, so that the log of a failed boot reaches the sinks.
    """
    if job.site[Settings].enabled_sinks:
        Follower.start(job, "its log is not sent to the log sinks yet")


def _check(site: Site) -> Iterator[HealthResult]:
    settings = site[Settings]
    sockets = ((settings.syslog, SYSLOG, "syslog"), (settings.journald, JOURNAL, "journald"))
    for wanted, path, name in sockets:
        if wanted and not Path(path).is_socket():
            fix = f"start the service that listens there, or disable {name} in [plugin.joblog]"
            yield HealthResult("warning", f"{name}: the socket {path} is missing", fix)
    if settings.file:
        yield _check_file(Path(settings.file))
    if settings.unprivileged_sinks:
        yield from _check_uid(settings.uid)
    yield HealthResult("ok", f"sinks: {', '.join(settings.enabled_sinks) or 'none'}")


def _check_file(path: Path) -> HealthResult:
    fix = "create its directory, writable only by root"
    try:
        if os.geteuid() == 0:
            require_root_owned(path.parent)
    except Exception as error:
        return HealthResult("failed", f"file: {error}", fix)
    if not path.parent.is_dir():
        return HealthResult("failed", f"file: {path.parent} is not a directory", fix)
    return HealthResult("ok", f"file: {path}")


def _check_uid(uid: int) -> Iterator[HealthResult]:
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return
    fix = "set uid in [plugin.joblog] to an unused uid"
    yield HealthResult("warning", f"the sinks' process runs as {name}, who can kill it", fix)


vtorque_health_checks = constant_hook(HealthCheck("log sinks", _check))
