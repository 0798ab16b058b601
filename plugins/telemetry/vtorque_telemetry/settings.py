"""The settings of telemetry."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.api import setting


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.telemetry]``."""

    enabled: bool = setting(True, doc="measure jobs")
    interval: float = setting(2.0, doc="time between two samples; at least 0.5 s", unit="s")
    write_timeout: float = setting(1.0, doc="time limit of one write of an exporter", unit="s")
    app_series: int = setting(
        200, doc="maximum number of series of a job's own metrics on a node; 0: none"
    )
    exporters: tuple[str, ...] = setting(
        (),
        doc="exporters that get the samples besides the job's report: prometheus, "
        "textfile, influxdb, ...",
    )
    uid: int = setting(
        2146890000,
        doc="uid of the process that measures and exports; must not be the uid of an account",
    )
    listen: str = setting(
        "127.0.0.1:327",
        doc="prometheus: address and port of the endpoint; users can occupy a port from 1024 on",
    )
    token: str = setting(
        "", doc="prometheus: bearer token that clients must send", secret_file=True
    )
    basic_auth: str = setting(
        "", doc="prometheus: name:password that clients must send", secret_file=True
    )
    allow_anonymous: bool = setting(
        False, doc="prometheus: allow unauthenticated clients to read the samples of all users"
    )
    certificate: str = setting("", doc="prometheus: TLS certificate of the endpoint (PEM)")
    key: str = setting("", doc="prometheus: private key of the certificate", secret_file=True)
    client_ca: str = setting("", doc="prometheus: CA of the clients' certificates (PEM)")
    textfile: str = setting(
        "/var/lib/prometheus/node-exporter-vtorque/vtorque.prom",
        doc="textfile: file for node_exporter's textfile collector; its directory must "
        "contain nothing else",
    )
    textfile_mode: str = setting(
        "0640", doc="textfile: mode of the file, which has the samples of all users"
    )
    textfile_group: str = setting(
        "", doc="textfile: group of the file; empty: group of the directory"
    )
    influx_url: str = setting(
        "http://127.0.0.1:8086/write?db=vtorque",
        doc="influxdb: URL to post to, /write?db= (v1) or /api/v2/write?org=&bucket= (v2)",
    )
    influx_token: str = setting("", doc="influxdb: token (v2)", secret_file=True)
    influx_basic_auth: str = setting("", doc="influxdb: name:password (v1)", secret_file=True)
    influx_ca: str = setting(
        "", doc="influxdb: CA of the server's certificate (PEM); empty: the host's CAs"
    )

    @property
    def port(self) -> int:
        """The TCP port of the Prometheus endpoint."""
        return int(self.listen.rpartition(":")[2])

    def __post_init__(self) -> None:
        if self.interval < 0.5:
            raise ValueError(
                f"interval={self.interval:g} (s) is too short: it must be at least 0.5 s"
            )
        if not 0 < self.write_timeout <= 60:
            raise ValueError(
                f"write_timeout={self.write_timeout:g} (s) is invalid: it must be more than 0 "
                "and at most 60 s"
            )
        if not 0 <= self.app_series <= 10_000:
            raise ValueError(f"app_series={self.app_series} is invalid: it must be 0 to 10000")
        if not 0 < self.uid < 2**32 - 1:
            raise ValueError(f"uid={self.uid} is invalid: it must be 1 to {2**32 - 2}")
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(
                f"listen={self.listen!r} is invalid: it must be an address and port like "
                "127.0.0.1:327"
            )
        try:
            mode = int(self.textfile_mode, 8)
        except ValueError:
            mode = -1
        if not 0 <= mode <= 0o777 or mode & 0o133:
            raise ValueError(
                f"textfile_mode={self.textfile_mode!r} is invalid: write it like 0640 or 0644"
            )
        if not self.influx_url.startswith(("http://", "https://")):
            raise ValueError(
                f"influx_url={self.influx_url!r} is invalid: it must begin with http:// or https://"
            )
        if bool(self.certificate) != bool(self.key) or (self.client_ca and not self.key):
            raise ValueError("certificate and key must be set together, and client_ca needs both")
