"""Warm guests on the node: the service is started with a job's start, if it is not there."""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api import HostFault, always, hookimpl
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_warm.process import Service, ensure, said
from vtorque_warm.settings import Settings


@hookimpl
def vtorque_post_boot(job: NodeJob) -> None:
    """Start the service, unless it is there or nothing is to be kept. Does not wait for it."""
    settings = job.site[Settings]
    if not (settings.shapes or settings.memory):
        return
    try:
        ensure(job.site.paths, job.site.path)
    except HostFault as error:
        job.warn(f"no guests are kept ready: {error}")


def check(site: Site) -> Iterator[HealthResult]:
    """Say which shapes could not be had, and whether the service is there."""
    settings = site[Settings]
    if not (settings.shapes or settings.memory):
        yield HealthResult("ok", "no guests are kept ready")
        return
    if Service.of(site.paths).lost():
        fix = "vtorque warm start; the next job's start does it, too"
        yield HealthResult("warning", "no process keeps guests ready", fix=fix)
        return
    state = said(site.paths)
    failures = dict(state.get("failures", {}))
    for shape, (times, _, why) in failures.items():
        text = f"{shape}: not ready {times} times in a row: {why}"
        yield HealthResult("warning", text, fix="its jobs start cold; warm.log says more")
    if not failures:
        wanted = ", ".join(f"{n} of {shape}" for shape, n in state.get("wanted", {}).items())
        yield HealthResult("ok", f"kept ready: {wanted or 'nothing yet'}")


vtorque_settings = always(Settings)
vtorque_health_checks = always(HealthCheck("warm: guests", check))
