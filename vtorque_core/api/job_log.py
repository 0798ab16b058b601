"""Read, follow and print a job's kept log. As root, or as the job's owner."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vtorque_core.api.kept_records import LOG, Place
from vtorque_core.base.errors import printable

POLL = 0.2  # seconds between two reads of a growing log
_PART = 1 << 18  # bytes of one read
_MAX_LINE = 1 << 20
_KEYS = ("level", "logger", "plugin", "phase", "node", "job", "message")

Entry = Mapping[str, Any]


def entries(place: Place, over: Callable[[], bool] = lambda: True) -> Iterator[Entry]:
    """Yield the entries of a log, and follow it until ``over()`` returns True.

    Waits for a log that does not exist yet, and skips invalid lines.
    """
    offset, rest, descriptor = 0, b"", -1
    try:
        while True:
            last = over()
            with contextlib.suppress(OSError):
                if descriptor < 0:
                    descriptor = place.open(LOG)
                while part := os.pread(descriptor, _PART, offset):
                    offset += len(part)
                    *lines, rest = (rest + part).split(b"\n")
                    rest = rest[:_MAX_LINE]
                    yield from (e for line in lines if (e := _parse(line)) is not None)
            if last:
                return
            time.sleep(POLL)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _parse(line: bytes) -> Entry | None:
    with contextlib.suppress(ArithmeticError, ValueError, RecursionError, TypeError):
        found = json.loads(line)
        if isinstance(found, dict):
            entry: dict[str, Any] = {k: printable(str(found.get(k, "")), 8192) for k in _KEYS}
            guest, detail = found.get("guest"), found.get("detail")
            at = float(found.get("t", 0))
            entry["t"] = at if math.isfinite(at) else 0.0
            entry["guest"] = guest if type(guest) is int else None
            if isinstance(detail, list):
                entry["detail"] = [printable(str(text), 400) for text in detail[:100]]
            return entry
    return None


def text(entry: Entry) -> str:
    """Return an entry as readable lines: the message, then its details."""
    try:
        clock = time.strftime("%H:%M:%S", time.localtime(entry["t"]))
    except (OverflowError, ValueError, OSError):
        clock = "--:--:--"
    millis = int(entry["t"] * 1000) % 1000 if entry["t"] < 1e12 else 0
    guest = "" if entry["guest"] is None else f" g{entry['guest']}"
    where = f"{entry['phase'] or '-'}{guest}"
    said = f"{entry['plugin']}: {entry['message']}"
    first = f"{clock}.{millis:03} {entry['level']:5} {where:13} {said}"
    return "\n".join([first, *(f"    | {line}" for line in entry.get("detail", ()))])
