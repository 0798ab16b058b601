"""Sinks for the host's syslog and systemd's journal: one datagram per record."""

from __future__ import annotations

import logging
import os
import socket

from vtorque_joblog.api import entry_of, one_line

SYSLOG = "/dev/log"
JOURNAL = "/run/systemd/journal/socket"
_MAX_LINE = 8000  # bytes; below rsyslog's default maxMessageSize of 8k
_PRIORITY = {"ERROR": 3, "WARN": 4, "INFO": 6, "DEBUG": 7, "TRACE": 7}  # syslog(3)


class Datagrams(logging.Handler):
    """Sends one datagram per record to a socket; reconnects after a restart of the receiver."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self._socket: socket.socket | None = None

    def encode(self, record: logging.LogRecord) -> bytes:
        """Return the datagram of a record."""
        raise NotImplementedError

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; retry once over a new connection."""
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
    """Sends RFC 3164 messages like glibc's syslog(3). The receiver adds the time."""

    def __init__(self, facility: int, tag: str, path: str = SYSLOG) -> None:
        super().__init__(path)
        self._facility = facility
        self._tag = f"{tag}[{os.getpid()}]"

    def encode(self, record: logging.LogRecord) -> bytes:
        """Return one line with job and node, truncated if it is too long."""
        entry = entry_of(record)
        priority = self._facility << 3 | _PRIORITY[entry["level"]]
        line = f"<{priority}>{self._tag}: {entry['job']} on {entry['node']}: {one_line(entry)}"
        return line.encode()[:_MAX_LINE].decode("utf-8", "ignore").encode()


class SystemdJournal(Datagrams):
    """Sends the native protocol of systemd's journal (systemd.io/JOURNAL_NATIVE_PROTOCOL).

    Each field is a line ``NAME=value``. No value contains a newline.
    """

    def __init__(self, tag: str, path: str = JOURNAL) -> None:
        super().__init__(path)
        self._tag = tag

    def encode(self, record: logging.LogRecord) -> bytes:
        """Return the record's fields, such as MESSAGE and VTORQUE_JOB."""
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
