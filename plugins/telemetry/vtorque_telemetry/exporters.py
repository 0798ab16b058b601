"""The built-in exporters, as entry points. Each imports its modules when it is called."""

from __future__ import annotations

from vtorque_core.api.node_job import Site
from vtorque_telemetry.api import SampleSink
from vtorque_telemetry.settings import Settings


def prometheus(site: Site) -> SampleSink:
    """Return the endpoint for Prometheus. Raises HostFault, ConfigError."""
    from vtorque_telemetry.prometheus import Endpoint  # noqa: PLC0415 - http.server, ssl

    return Endpoint(site[Settings])


def textfile(site: Site) -> SampleSink:
    """Return the writer of node_exporter's text file."""
    from vtorque_telemetry.textfile import Textfile  # noqa: PLC0415

    return Textfile(site[Settings])


def influxdb(site: Site) -> SampleSink:
    """Return the InfluxDB client. Raises ConfigError."""
    from vtorque_telemetry.influx import Influx  # noqa: PLC0415

    return Influx(site[Settings])
