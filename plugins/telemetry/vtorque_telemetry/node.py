"""Telemetry on the node: the sampler, the port for metrics of a job's programs, the exporters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vtorque_core.api import constant_hook, hookimpl
from vtorque_core.api.guest_context import ContextItem, EnvVar, LinePort
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import EndedJob, NodeJob, Site
from vtorque_telemetry.process import CHANNEL, Sampler, last_sample
from vtorque_telemetry.settings import Settings

if TYPE_CHECKING:  # a job's end waits for the imports of this module
    from vtorque_core.api.guest_plan import GuestPlan
    from vtorque_core.api.libvirt_domain import Element

FILE = "/run/vtorque-metrics"
PORT = "org.vtorque.metrics"
_USERS = 1024  # the first port that users may bind (ip(7), ip_unprivileged_port_start)

vtorque_settings = constant_hook(Settings)
vtorque_resources = constant_hook(Sampler)


@hookimpl
def vtorque_guest_context(guest: GuestPlan, site: Site) -> Iterator[ContextItem]:
    """Give the job a file to which it can write metrics. OSv guests do not support this."""
    if _has_lines(guest, site):
        yield LinePort(FILE, PORT)
        yield EnvVar("VTORQUE_METRICS", FILE)


@hookimpl
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterator[Element]:
    """Add the virtio port on which the job's programs write metrics.

    On the host, only root can open the port's socket.
    """
    from vtorque_core.api.libvirt_domain import Channel  # noqa: PLC0415 - not at a job's end

    if _has_lines(guest, site):
        yield Channel("metrics", PORT, str(guest.run_dir / CHANNEL))


def _has_lines(guest: GuestPlan, site: Site) -> bool:
    settings = site[Settings]
    wanted = settings.enabled and settings.app_series > 0
    return wanted and {"LinePort", "EnvVar"} <= guest.supports


def check(site: Site) -> Iterator[HealthResult]:
    """Warn if a user's program could pose as the Prometheus endpoint or as InfluxDB."""
    settings = site[Settings]
    if "influxdb" in settings.exporters and settings.influx_url.startswith("http:"):
        yield HealthResult(
            "warning",
            f"influx_url={settings.influx_url}: a program that listens there, or on the network "
            "path, gets the token and all users' samples; on this node, any user can listen "
            "while InfluxDB is down",
            fix="use https, with influx_ca if the host does not know the certificate's CA",
        )
    if "prometheus" not in settings.exporters:
        return
    if settings.port < _USERS or settings.certificate:
        yield HealthResult("ok", f"listens on {settings.listen} while jobs run")
        return
    yield HealthResult(
        "warning",
        f"listen={settings.listen}: any user can listen there while no job runs, receive "
        "Prometheus' token, and read all users' samples with it",
        fix=f"use a port below {_USERS}, or set certificate and key (https in Prometheus)",
    )


@hookimpl
def vtorque_while_booting(job: NodeJob) -> None:
    """Start the sampler unless another job of the node has started it."""
    if job.site[Settings].enabled:
        Sampler.start(job, "the job is not measured")


@hookimpl
def vtorque_teardown(job: EndedJob) -> None:
    """Request the ended job's last sample from the sampler."""
    last_sample(job.paths, job.job.key)


vtorque_health_checks = constant_hook(HealthCheck("telemetry: exporters", check))
