"""InfluxDB exporter: line protocol over HTTP, version 1 (/write) or 2 (/api/v2/write).

Measurements have Prometheus' names and one field, ``value``. Labels are tags, and times are in
milliseconds (https://docs.influxdata.com/influxdb/v2/reference/syntax/line-protocol/).
"""

from __future__ import annotations

import base64
import http.client
import re
import ssl
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from vtorque_core.api import HostFault
from vtorque_core.api.node_job import Site
from vtorque_telemetry.api import Sample, read_secret
from vtorque_telemetry.exposition import LabelTexts
from vtorque_telemetry.settings import Settings

_ANSWER = 2000  # bytes of a response that are read


def lines(samples: Iterable[Sample]) -> bytes:
    """Format the samples in line protocol."""
    return "".join(_line(sample) for sample in samples).encode()


def _line(sample: Sample) -> str:
    at = int(sample.time * 1000)
    return f"{sample.name}{_tags(sample.labels)} value={float(sample.value)!r} {at}\n"


def _render(labels: Mapping[str, str]) -> str:
    return "".join(f",{_escape(k)}={_escape(v)}" for k, v in sorted(labels.items()) if v)


_tags = LabelTexts(_render)


def _escape(text: str) -> str:
    """Escape a tag's value; a newline or a trailing backslash would break the line."""
    return re.sub(r"([,= ])", r"\\\1", text.replace("\n", " ").replace("\\", "/"))


class Influx:
    """The InfluxDB sink, see :class:`vtorque_telemetry.api.SampleSink`."""

    def __init__(self, settings: Settings) -> None:
        """Read secrets and certificates. Raises ConfigError, HostFault.

        The connection is opened with the first samples.
        """
        url = urlsplit(settings.influx_url)
        self._host, self._port = url.hostname or "", url.port
        self._path = f"{url.path}?{url.query}{'&' if url.query else ''}precision=ms"
        self._headers = {"Content-Type": "text/plain; charset=utf-8"}
        if settings.influx_token:
            self._headers["Authorization"] = f"Token {read_secret(settings.influx_token)}"
        elif settings.influx_basic_auth:
            word = base64.b64encode(read_secret(settings.influx_basic_auth).encode()).decode()
            self._headers["Authorization"] = f"Basic {word}"
        self._tls = None
        if url.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=settings.influx_ca or None)
            except (OSError, ssl.SSLError) as error:
                raise HostFault(f"influx_ca: {error}") from None
        self._connection: http.client.HTTPConnection | None = None

    def write(self, samples: Sequence[Sample], deadline: float) -> None:
        """Send samples. Raises HostFault for an HTTP error, OSError if the connection fails."""
        if not samples:
            return
        try:
            self._post(lines(samples), deadline)
        except (OSError, http.client.HTTPException):
            self._drop()
            raise

    def _post(self, body: bytes, deadline: float) -> None:
        left = max(0.05, deadline - time.monotonic())
        if self._connection is None:
            if self._tls is None:
                self._connection = http.client.HTTPConnection(self._host, self._port)
            else:
                self._connection = http.client.HTTPSConnection(
                    self._host, self._port, context=self._tls
                )
        self._connection.timeout = left
        if self._connection.sock is not None:
            self._connection.sock.settimeout(left)
        self._connection.request("POST", self._path, body, self._headers)
        answer = self._connection.getresponse()
        said = answer.read(_ANSWER)
        if answer.status not in (200, 204):
            self._drop()
            shown = "".join(c if c.isprintable() else " " for c in said.decode("utf-8", "replace"))
            raise HostFault(f"{self._host} answers {answer.status}: {shown[:300]}")
        if not answer.isclosed():  # longer than any response to a write
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def end(self, jobs: Collection[str]) -> None:
        """Do nothing: a series without new points has ended."""

    def close(self) -> None:
        """Close the connection."""
        self._drop()


def open_client(site: Site) -> Influx:
    """Return the InfluxDB client. Raises ConfigError, HostFault."""
    return Influx(site[Settings])
