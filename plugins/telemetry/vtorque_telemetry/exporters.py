"""The entry points of the built-in exporters. Each imports its modules when it is called."""

from __future__ import annotations

from vtorque_core.api import deferred

prometheus = deferred("vtorque_telemetry.prometheus:open_endpoint")
textfile = deferred("vtorque_telemetry.textfile:open_file")
influxdb = deferred("vtorque_telemetry.influx:open_client")
