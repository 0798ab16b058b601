"""Fetch the logs of a guest whose setup failed, through its agent.

The guest is hostile: bytes and time are limited, and the stored logs are untrusted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api.guest_plan import GuestPlan
from vtorque_linux_guest.guest.linux_family import boots_micro
from vtorque_linux_guest.job.frames import StreamError
from vtorque_linux_guest.job.status_port import LOG_MAX, StatusReader

NAME = "cloud-init.log"
"""Name of the guest's logs in its state directory. The core keeps them with the job's log
(doc/logging.md)."""

FILES = ("/run/vtorque/setup.log", "/var/log/cloud-init-output.log", "/var/log/cloud-init.log")
"""The logs to fetch: of setup.sh's last step and of cloud-init, most important first."""

MAX = len(FILES) * (LOG_MAX + 100)  # bytes of all logs
SECONDS = 2.0
_SHARE = 10  # at most a tenth of the time left is reserved for fetching the logs
_log = logging.getLogger(__name__)


def ready_deadline(guest: GuestPlan, deadline: float) -> float:
    """Return the deadline for READY that leaves time to fetch logs before ``deadline``.

    Deadlines are in time.monotonic() seconds. For a micro guest, which has no logs, return
    ``deadline``.
    """
    if boots_micro(guest.image):
        return deadline
    return deadline - max(0.0, min(SECONDS, (deadline - time.monotonic()) / _SHARE))


def keep(guest: GuestPlan, content: bytes) -> None:
    """Write a guest's logs to its state directory, mode 0600. Runs as root. Never raises."""
    try:
        _write(guest.state_dir / NAME, content)
    except OSError as error:
        _log.warning("cannot write the guest's logs: %s", error)


def fetch_logs(reader: StatusReader, deadline: float) -> Iterator[bytes]:
    """Yield a guest's logs. Stop at ``deadline``, or after ``SECONDS`` seconds."""
    end = min(deadline, time.monotonic() + SECONDS)
    for path in FILES:
        head = f"==> {path} <==\n".encode()
        try:
            for piece in reader.log(path, end):
                yield head + piece
                head = b""
        except StreamError as error:
            _log.debug("%s: %s", path, error)
            return
        if not head:
            yield b"\n"


def _write(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
