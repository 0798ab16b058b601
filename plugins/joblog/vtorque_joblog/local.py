"""The host's own logs: syslog and systemd's journal, each a datagram a record."""

from __future__ import annotations

import logging
import os
import socket

from vtorque_joblog.api import entry_of, one_line

SYSLOG = "/dev/log"
JOURNAL = "/run/systemd/journal/socket"
_MAX_LINE = 8000  # bytes; what rsyslog takes without being told (maxMessageSize 8k)
_PRIORITY = {"ERROR": 3, "WARN": 4, "INFO": 6, "DEBUG": 7, "TRACE": 7}  # syslog(3)


class Datagrams(logging.Handler):
    """Sends a datagram a record to a socket; connects again after a restart of who listens."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self._socket: socket.socket | None = None

    def encode(self, record: logging.LogRecord) -> bytes:
        """Return the datagram of a record."""
        raise NotImplementedError

    def emit(self, record: logging.LogRecord) -> None:
        """Send it, with a second try over a new connection."""
        data = self.encode(record)
        try:
            self._send(data)
        except OSError:
            self.close()
            self._send(data)

    def _send(self, data: bytes) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.connect(self.path)
        self._socket.send(data)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        super().close()


class Syslog(Datagrams):
    """RFC 3164 as syslog(3) of glibc sends it, without the time, which the receiver adds."""

    def __init__(self, facility: int, tag: str, path: str = SYSLOG) -> None:
        super().__init__(path)
        self._facility = facility
        self._tag = f"{tag}[{os.getpid()}]"

    def encode(self, record: logging.LogRecord) -> bytes:
        """Return one line with job and node; what is too long is cut."""
        entry = entry_of(record)
        priority = self._facility << 3 | _PRIORITY[entry["level"]]
        line = f"<{priority}>{self._tag}: {entry['job']} on {entry['node']}: {one_line(entry)}"
        return line.encode()[:_MAX_LINE].decode("utf-8", "ignore").encode()


class Journal(Datagrams):
    """systemd.io/JOURNAL_NATIVE_PROTOCOL; no value has a line end, so the simple form does."""

    def __init__(self, tag: str, path: str = JOURNAL) -> None:
        super().__init__(path)
        self._tag = tag

    def encode(self, record: logging.LogRecord) -> bytes:
        """Return a field for each key of the record."""
        entry = entry_of(record)
        detail = "".join(f" | {line}" for line in entry.get("detail", ()))
        fields = {
            "MESSAGE": f"{entry['job']}: {entry['message']}{detail}",
            "PRIORITY": _PRIORITY[entry["level"]],
            "SYSLOG_IDENTIFIER": self._tag,
            "VTORQUE_LEVEL": entry["level"],
            "VTORQUE_LOGGER": entry["logger"],
            **{f"VTORQUE_{k.upper()}": entry[k] for k in ("job", "node", "phase", "plugin")},
        }
        if entry["guest"] is not None:
            fields["VTORQUE_GUEST"] = entry["guest"]
        return "".join(f"{name}={value}\n" for name, value in fields.items()).encode()
