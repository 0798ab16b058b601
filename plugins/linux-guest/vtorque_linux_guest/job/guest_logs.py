"""What a guest that did not get ready has logged: asked of its agent, left for the core to keep.

The guest may send anything, nothing, or without end: bytes and time are bounded, and the bytes stay
as they are, for readers that trust none of them.
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
"""In the guest's state directory; the core keeps it with the job's log (doc/logging.md)."""

FILES = ("/run/vtorque/setup.log", "/var/log/cloud-init-output.log", "/var/log/cloud-init.log")
"""Of setup.sh's last step, then cloud-init's own: what may come first if the time is short."""

MAX = len(FILES) * (LOG_MAX + 100)  # bytes of all
SECONDS = 2.0
_SHARE = 10  # of a short time only so much is taken
_log = logging.getLogger(__name__)


def ready_by(guest: GuestPlan, deadline: float) -> float:
    """Return until when the guest may get ready, so that its logs can be had before ``deadline``.

    Both in time.monotonic() seconds. A micro guest has no logs: all the time is its own.
    """
    if boots_micro(guest.image):
        return deadline
    return deadline - max(0.0, min(SECONDS, (deadline - time.monotonic()) / _SHARE))


def keep(guest: GuestPlan, content: bytes) -> None:
    """Write what the agent told of the guest's logs to its state directory, mode 0600. As root.

    Never raises: the guest has failed, and this only helps to see why.
    """
    try:
        _write(guest.state_dir / NAME, content)
    except OSError as error:
        _log.warning("the guest's logs cannot be written: %s", error)


def told(reader: StatusReader, deadline: float) -> Iterator[bytes]:
    """Yield what the agent tells of the guest's logs. Takes at most SECONDS, until ``deadline``."""
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
