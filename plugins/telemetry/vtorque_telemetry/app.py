"""Parse the metrics that a job reports: lines ``name value [labels]`` from an untrusted guest.

Examples: ``loss 0.25``, ``epoch_seconds 3.1 phase=train,fold=2``. Invalid lines are counted and
dropped. A metric is a counter if its name ends in ``_total``, otherwise a gauge. A series keeps
its last value.
"""

from __future__ import annotations

import math
import re
import socket

from vtorque_telemetry.metrics import APP, Own, Values

MAX_LINE = 512  # bytes
MAX_READ = 64 << 10  # bytes that are read from a guest for one sample
MAX_LABELS = 4
RESERVED = frozenset({"job", "user", "node", "guest", "instance", "le", "quantile", "time"})
"""Labels that vTorque, Prometheus or InfluxDB reserve."""
_LINE = re.compile(
    rb"(?P<name>[a-zA-Z][a-zA-Z0-9_]{0,59})[ \t]+(?P<value>[-+0-9.eE]{1,40})"
    rb"(?:[ \t]+(?P<labels>[^ \t\r]{1,300}))?[ \t]*\r?"
)
_LABEL = re.compile(r"([a-z][a-z0-9_]{0,29})=([A-Za-z0-9_./:+-]{1,60})")


def parse(line: bytes) -> tuple[str, Own, float] | None:
    """Return name, sorted labels and value of a line; None if it is invalid."""
    found = _LINE.fullmatch(line) if len(line) <= MAX_LINE else None
    if found is None:
        return None
    try:
        value = float(found["value"])
    except ValueError:
        return None
    own = []
    for part in found["labels"].decode("ascii", "replace").split(",") if found["labels"] else ():
        label = _LABEL.fullmatch(part)
        if label is None or label[1] in RESERVED:
            return None
        own.append((label[1], label[2]))
    if not math.isfinite(value) or len(own) > MAX_LABELS or len(dict(own)) < len(own):
        return None
    return APP + found["name"].decode("ascii"), tuple(sorted(own)), value


class AppMeter:
    """A reader of the metrics that a guest writes.

    ``values`` has the last value of each series. ``rejected`` counts ignored lines.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._rest = b""
        self.values: Values = {}
        self.rejected = 0

    def connect(self, port: socket.socket) -> None:
        """Read from this non-blocking connection, and close the previous connection."""
        self._rest += self._receive()  # data from the previous connection
        self.close()
        self._socket = port

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def read(self, room: int) -> Values:
        """Read available lines, and return their values.

        ``room`` is the number of new series that are accepted. Never blocks. At most
        :data:`MAX_READ` bytes are read; the rest waits for the next call.
        """
        fresh: Values = {}
        for line in self._lines():
            if not line.strip():
                continue
            parsed = parse(line)
            if parsed is None or (parsed[:2] not in self.values and room <= 0):
                self.rejected += 1
                continue
            name, own, value = parsed
            room -= (name, own) not in self.values
            self.values[name, own] = fresh[name, own] = value
        return fresh

    def _lines(self) -> list[bytes]:
        data = self._rest + self._receive()
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > MAX_LINE:  # too long: parse() rejects it
            self._rest = self._rest[: MAX_LINE + 1]
        return lines

    def _receive(self) -> bytes:
        data = bytearray()
        try:
            while self._socket is not None and len(data) < MAX_READ:
                part = self._socket.recv(min(16 << 10, MAX_READ - len(data)))
                if not part:
                    self.close()
                data += part
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        return bytes(data)
