"""Telemetry on the node: the sampler, the port for a job's own metrics, the exporters."""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api import hookimpl
from vtorque_core.api_node import EndedJob, NodeJob, Resource, Site
from vtorque_core.api_running import job_key
from vtorque_core.api_telemetry import Exporter, Sink
from vtorque_telemetry.sampler import Sampler, last_sample
from vtorque_telemetry.settings import Settings


@hookimpl
def vtorque_settings() -> Iterator[type[Settings]]:
    """Yield ``[plugin.telemetry]``."""
    yield Settings


@hookimpl
def vtorque_resources() -> Iterator[type[Resource]]:
    """Yield what is node-wide."""
    yield Sampler


@hookimpl
def vtorque_exporters() -> Iterator[Exporter]:
    """Yield the exporters that come with the sampler."""
    yield Exporter("prometheus", _prometheus)
    yield Exporter("textfile", _textfile)
    yield Exporter("influxdb", _influxdb)


@hookimpl
def vtorque_post_boot(job: NodeJob) -> None:
    """Start the sampler, unless another job has. Does not wait for it."""
    if job.site[Settings].enabled:
        job.acquire(Sampler.of(job.site.paths, job.site.path))


@hookimpl
def vtorque_teardown(job: EndedJob) -> None:
    """Take the last sample."""
    last_sample(job.paths, job_key(job.id, job.attempt))


def _prometheus(site: Site) -> Sink:
    from vtorque_telemetry.prometheus import Endpoint  # noqa: PLC0415 - http.server, ssl

    return Endpoint(site[Settings])


def _textfile(site: Site) -> Sink:
    from vtorque_telemetry.textfile import Textfile  # noqa: PLC0415

    return Textfile(site[Settings])


def _influxdb(site: Site) -> Sink:
    from vtorque_telemetry.influx import Influx  # noqa: PLC0415

    return Influx(site[Settings])
