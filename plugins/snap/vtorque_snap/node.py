"""Collect metrics of each job's guests with a task of Snap, a telemetry framework.

The task runs on the job's node from the boot of the guests to the job's end.

Privileges: root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from vtorque_core.api import HostFault, constant_hook, hookimpl, name_errors, setting
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_snap.access import Access, is_local
from vtorque_snap.plugin import SNAP
from vtorque_snap.task import SnapTask, fill, manifest, read_notes


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.snap]``."""

    url: str = setting("http://localhost:8181", doc="snapteld's REST API")
    version: Literal["v1", "v2"] = setting("v2", doc="version of that API")
    template: str = setting(
        "/etc/vtorque/snap-task.json", doc="JSON file of the task: metrics, interval, publisher"
    )
    name: str = setting(
        "snapTask-[username]-[jobid]",
        doc="name of the task; needs [node] if snapteld runs on another host",
    )
    user: str = setting("snap", doc="user name for snapteld, if password is set")
    password: str = setting(
        "", doc="password for snapteld; sent over https or on this node only", secret_file=True
    )
    ca: str = setting("", doc="CA certificates of an https server (PEM file)")
    timeout: float = setting(
        2.0, doc="limit of the requests to snapteld at a job's start or end", unit="s"
    )
    required: bool = setting(False, doc="fail a job whose task does not start; false: only warn")
    nodes: str = setting(".*", doc="regular expression of the names of the nodes that run Snap")

    def __post_init__(self) -> None:
        url, here = urlsplit(self.url), is_local(self.url)
        plain = not (url.path.strip("/") or url.query or url.fragment or url.username)
        if url.scheme not in ("http", "https") or not url.hostname or not plain:
            raise ValueError(
                f"url={self.url!r} is invalid: write http://HOST:PORT or https://HOST:PORT"
            )
        _ = url.port  # raises ValueError itself
        if url.scheme == "https" and not self.ca:
            raise ValueError("https requires ca, the CA certificates that verify the server")
        if url.scheme == "http" and self.password and not here:
            raise ValueError("password would be sent over the network in plain text: use https")
        if "[jobid]" not in self.name or not (here or "[node]" in self.name):
            raise ValueError("name must contain [jobid], and also [node] if url names another host")
        if not 0.5 <= self.timeout <= 20:  # the release of a record may take 30 s
            raise ValueError(f"timeout={self.timeout:g} (s) is invalid: it must be 0.5 to 20 s")
        if ":" in self.user:
            raise ValueError("user must not contain a colon (RFC 7617)")
        with name_errors("nodes is not a regular expression", re.error, fault=ValueError):
            re.compile(self.nodes)

    @property
    def access(self) -> Access:
        """The address and credentials of snapteld."""
        url = self.url.rstrip("/")
        return Access(url, self.version, self.user, self.password, self.ca)


vtorque_settings = constant_hook(Settings)
vtorque_resources = constant_hook(SnapTask)


@hookimpl
def vtorque_while_booting(job: NodeJob) -> None:
    """Start the task of snapteld that collects metrics of the job's guests, while they boot.

    If that fails, warn, or fail the job if the site requires the task.
    """
    settings, first = job.site[Settings], job.guests[0]
    if not first[SNAP] or not re.fullmatch(settings.nodes, first.job.node):
        return
    try:
        job.acquire(_task(job, settings))
    except HostFault as error:
        if settings.required:
            raise
        job.warn(f"the job runs without snap=true on node {first.job.node}: {error}")


def _task(job: NodeJob, settings: Settings) -> SnapTask:
    from vtorque_snap.client import read_trusted  # noqa: PLC0415 (8 ms, only if needed)

    values = {"jobid": job.id, "username": job.user.name, "node": job.guests[0].job.node}
    name = fill(settings.name, values)
    body = manifest(
        read_trusted(settings.template), name, values, [guest.name for guest in job.guests]
    )
    return SnapTask(name, settings.access, settings.timeout, _notes(job.site), body)


def _notes(site: Site) -> str:
    return str(site.paths.state / "snap")


def check(site: Site) -> Iterator[HealthResult]:
    """Check that snapteld answers and that the template of the tasks is valid."""
    from vtorque_snap.client import read_trusted, run_with_client  # noqa: PLC0415 - as above

    settings = site[Settings]
    if settings == Settings() and not Path(settings.template).exists():
        yield HealthResult(
            "ok", f"not configured: [plugin.snap] and {settings.template} are missing"
        )
        return
    bad: Literal["failed", "warning"] = "failed" if settings.required else "warning"
    try:
        values = {"jobid": "1", "username": "someone", "node": "node"}
        manifest(read_trusted(settings.template), "name", values, ["guest"])
        tasks = run_with_client(settings.access, settings.timeout, lambda client: client.tasks())
    except HostFault as error:
        yield HealthResult(
            bad, str(error), fix="correct [plugin.snap] in the site config, or start snapteld"
        )
        return
    yield HealthResult("ok", f"{settings.url} answers and has {len(tasks)} tasks")
    left = [name for _, name in read_notes(_notes(site), settings.access.url)]
    if left:
        yield HealthResult(
            "warning",
            f"not deleted from snapteld yet: {', '.join(left)[:300]}",
            fix="the next end of a job with snap=true deletes them; or use snaptel task stop and "
            "remove",
        )


vtorque_health_checks = constant_hook(HealthCheck("snap: snapteld", check))
