"""``[plugin.telemetry]``."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.api import setting


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.telemetry]``."""

    enabled: bool = setting(True, doc="measure jobs at all")
    interval: float = setting(2.0, doc="time between two samples, at least 0.5 s", unit="s")
    deadline: float = setting(1.0, doc="time that an exporter has for one write", unit="s")
    app_series: int = setting(
        200, doc="series that a job's own metrics may have on a node; 0: none"
    )
    exporters: tuple[str, ...] = setting(
        (), doc="where samples go beside the job's report: prometheus, textfile, influxdb, ..."
    )
    uid: int = setting(
        2146890000, doc="who measures and exports: nobody else's uid, without an account"
    )
    listen: str = setting(
        "127.0.0.1:327",
        doc="prometheus: address and port of the endpoint; users can take one from 1024 on",
    )
    token: str = setting("", doc="prometheus: the bearer token to ask for", secret_file=True)
    basic: str = setting("", doc="prometheus: name:password to ask for", secret_file=True)
    open: bool = setting(
        False, doc="prometheus: all who reach the address may read all users' samples"
    )
    certificate: str = setting("", doc="prometheus: TLS certificate of the endpoint (PEM)")
    key: str = setting("", doc="prometheus: its key", secret_file=True)
    client_ca: str = setting("", doc="prometheus: who signs the certificates of clients (PEM)")
    textfile: str = setting(
        "/var/lib/prometheus/node-exporter-vtorque/vtorque.prom",
        doc="textfile: the file for node_exporter's textfile collector, in a directory of its own",
    )
    textfile_mode: str = setting("0640", doc="textfile: its mode; it has all users' samples")
    textfile_group: str = setting("", doc="textfile: its group; empty: as its directory's")
    influx_url: str = setting(
        "http://127.0.0.1:8086/write?db=vtorque",
        doc="influxdb: where lines are written, /write?db= (v1) or /api/v2/write?org=&bucket=",
    )
    influx_token: str = setting("", doc="influxdb: the token (v2)", secret_file=True)
    influx_basic: str = setting("", doc="influxdb: name:password (v1)", secret_file=True)
    influx_ca: str = setting("", doc="influxdb: who signs its certificate (PEM); empty: the host's")

    @property
    def port(self) -> int:
        """Of the endpoint."""
        return int(self.listen.rpartition(":")[2])

    def __post_init__(self) -> None:
        if self.interval < 0.5:
            raise ValueError(f"interval is {self.interval:g} s, must be at least 0.5 s")
        if not 0 < self.deadline <= 60:
            raise ValueError(f"deadline is {self.deadline:g} s, must be over 0 and at most 60 s")
        if not 0 <= self.app_series <= 10_000:
            raise ValueError(f"app_series is {self.app_series}, must be 0 to 10000")
        if not 0 < self.uid < 2**32 - 1:
            raise ValueError(f"uid is {self.uid}, must be 1 to {2**32 - 2}")
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(
                f"listen is {self.listen!r}, must be an address and port like 127.0.0.1:327"
            )
        try:
            mode = int(self.textfile_mode, 8)
        except ValueError:
            mode = -1
        if not 0 <= mode <= 0o777 or mode & 0o133:
            raise ValueError(f"textfile_mode is {self.textfile_mode!r}, must be like 0640 or 0644")
        if not self.influx_url.startswith(("http://", "https://")):
            raise ValueError(
                f"influx_url is {self.influx_url!r}, must begin with http:// or https://"
            )
        if bool(self.certificate) != bool(self.key) or (self.client_ca and not self.key):
            raise ValueError("certificate and key belong together, client_ca needs both")
