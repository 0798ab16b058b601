"""Start the service for warm guests at setup, and at each job if the service is not running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vtorque_core.api import HostFault, constant_hook, deferred, hookimpl
from vtorque_core.api.boot_source import Offer, RenderedGuest
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_warm.process import WarmService, ensure, read_status
from vtorque_warm.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.setup_steps import Installation, SetupStep

_steps = deferred("vtorque_warm.setup:steps")


@hookimpl
def vtorque_rendered_sources(guests: Sequence[RenderedGuest], site: Site) -> Iterator[Offer]:
    """Yield, for each guest of the job, the warm guests that can replace it."""
    if any(site.paths.journal.glob("spare-*")):
        from vtorque_warm import source  # noqa: PLC0415 - few nodes have warm guests

        yield from source.offer_guests(guests, site)


@hookimpl
def vtorque_post_boot(job: NodeJob) -> None:
    """Start the service if the site configures warm guests. Do not wait for the service."""
    if not _is_wanted(job.site):
        return
    try:
        ensure(job.site.paths, job.site.path)
    except HostFault as error:
        job.warn(f"no warm guests are kept on this node: {error}")


@hookimpl
def vtorque_setup_steps(site: Site, place: Installation) -> Iterator[SetupStep]:
    """Yield the steps that start the service of warm guests now and at boot.

    ``undo()`` of these steps ends the service and all unused warm guests.
    """
    if _is_wanted(site) or not WarmService.for_node(site.paths).is_lost():
        yield from _steps(site, place)


def _is_wanted(site: Site) -> bool:
    return bool(site[Settings].shapes or site[Settings].max_memory)


def check(site: Site) -> Iterator[HealthResult]:
    """Report the shapes of warm guests that failed to boot, and whether the service runs."""
    if not _is_wanted(site):
        yield HealthResult("ok", "warm guests are disabled")
        return
    if WarmService.for_node(site.paths).is_lost():
        fix = "run vtorque warm start, or start a job"
        yield HealthResult("warning", "the service of warm guests is not running", fix=fix)
        return
    state = read_status(site.paths)
    failures = dict(state.get("failures", {}))
    for shape, (times, _, why) in failures.items():
        text = f"{shape}: {times} failed boots in a row: {why}"
        yield HealthResult("warning", text, fix="its jobs boot cold guests; see warm.log")
    if not failures:
        wanted = ", ".join(f"{n} of {shape}" for shape, n in state.get("wanted", {}).items())
        yield HealthResult("ok", f"warm guests wanted: {wanted or 'nothing yet'}")


vtorque_settings = constant_hook(Settings)
vtorque_health_checks = constant_hook(HealthCheck("warm: guests", check))
