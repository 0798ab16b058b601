"""The end of a guest's serial console, for the message about a guest that did not start, or died.

As root, in the prologue and the epilogue. The guest wrote every byte of it: it is bounded, and what
a terminal would obey is escaped or dropped.
"""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path

from vtorque_core.errors import printable

LINES = 20
PANIC = 50  # lines: what is wrong comes first, then registers and a trace
WIDTH = 200  # characters of one line
_BYTES = 16384  # looked at from the end
_SETTLE = 0.5  # seconds that virtlogd may take to write what the ending QEMU said
_POLL = 0.1
# ECMA-48 control sequences, and the two-character escapes: a firmware's screen is full of them.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[ -/]*[0-~])")


def tail(path: Path, lines: int = LINES) -> tuple[str, ...]:
    """Return the last ``lines`` that say something, printable; empty if there is no console log.

    Waits shortly for a log that still grows. Never raises.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ()
        size = _settled(descriptor, status.st_size)
        data = os.pread(descriptor, _BYTES, max(0, size - _BYTES))
    except OSError:
        return ()
    finally:
        os.close(descriptor)
    return lines_of(data, lines)


def heading(hostname: str) -> str:
    """Return the line above what :func:`tail` returns."""
    return f"the end of the console of {hostname}:"


def _settled(descriptor: int, size: int) -> int:
    """Return the file's size once it has not grown for one poll, or after _SETTLE seconds."""
    end = time.monotonic() + _SETTLE
    while time.monotonic() < end:
        time.sleep(_POLL)
        now = os.fstat(descriptor).st_size
        if now == size:
            break
        size = now
    return size


def lines_of(data: bytes, count: int = LINES) -> tuple[str, ...]:
    """Return the last ``count`` lines of console output that are not blank, each safe to show."""
    text = _ESCAPES.sub("", data.decode("utf-8", "replace"))
    lines = (line.strip() for line in re.split(r"[\r\n]+", text))
    return tuple(printable(line, WIDTH) for line in lines if line)[-count:]
