"""The exporters that come with the sampler, entry points; each imports late what it needs."""

from __future__ import annotations

from vtorque_core.api.node_job import Site
from vtorque_telemetry.api import Sink
from vtorque_telemetry.settings import Settings


def prometheus(site: Site) -> Sink:
    """Return an endpoint that Prometheus scrapes. Raises HostFault, ConfigError."""
    from vtorque_telemetry.prometheus import Endpoint  # noqa: PLC0415 - http.server, ssl

    return Endpoint(site[Settings])


def textfile(site: Site) -> Sink:
    """Return a writer of node_exporter's text file."""
    from vtorque_telemetry.textfile import Textfile  # noqa: PLC0415

    return Textfile(site[Settings])


def influxdb(site: Site) -> Sink:
    """Return a client of InfluxDB. Raises ConfigError."""
    from vtorque_telemetry.influx import Influx  # noqa: PLC0415

    return Influx(site[Settings])
