"""series.jsonl, what the report draws: a job's samples, bounded however long the job runs.

First line ``{"schema": 1, "job": .., "node": .., "interval": 2.0}``, then one per sampling and
guest: ``{"t": unix, "g": index or null, "v": {series: value}}``. When it is full every second line
of each guest goes and the interval doubles; counters stay exact. Lines of the whole job (``g`` is
null) stay. What a killed sampler or a full disk has cut off is no line, and goes with its turn.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from typing import Any

from vtorque_core.api.kept_records import Place

NAME = "series.jsonl"
MAX_LINES = 2000  # of each guest
MAX_BYTES = 16 << 20  # of the file, however long a job's own names are: then it is thinned, too


class SeriesFile:
    """The file of one job on this node. Raises OSError or HostFault as the disk does."""

    def __init__(self, place: Place, job: str, node: str, interval: float) -> None:
        """Begin it, or go on with what a killed sampler has left."""
        self._place = place
        self._head = {"schema": 1, "job": job, "node": node, "interval": interval}
        self._lines: dict[int, int] = {}
        self._next: dict[int, float] = {}
        self._torn = False
        try:
            before = place.read(NAME, MAX_BYTES)
            self._count(before)
            self._torn = not before.endswith(b"\n")
        except FileNotFoundError:
            place.write(NAME, json.dumps(self._head).encode() + b"\n")
        self._descriptor = place.append(NAME)

    @property
    def interval(self) -> float:
        """Seconds between two lines of a guest."""
        return float(self._head["interval"])  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the file; it stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def due(self, guest: int, at: float) -> bool:
        """Return whether it is time for a guest's next line; ``at`` in Unix seconds."""
        return at >= self._next.get(guest, 0.0) - self.interval / 10

    def add(self, guest: int | None, at: float, values: Mapping[str, float]) -> None:
        """Add a line; thin the file if it is full then."""
        entry = {"t": round(at, 3), "g": guest, "v": values}
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        if self._size() + len(line) > MAX_BYTES:
            self._thin()
            if self._size() + len(line) > MAX_BYTES:
                raise OSError(errno.EFBIG, f"{NAME} has {MAX_BYTES >> 20} MiB")
        data = b"\n" + line if self._torn else line
        self._torn = os.write(self._descriptor, data) < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if guest is None:
            return
        self._lines[guest] = self._lines.get(guest, 0) + 1
        self._next[guest] = at + self.interval
        if self._lines[guest] >= MAX_LINES:
            self._thin()

    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def _count(self, data: bytes) -> None:
        first, *lines = data.splitlines() or [b""]
        try:
            self._head["interval"] = max(self.interval, float(json.loads(first)["interval"]))
        except (ValueError, KeyError, TypeError):
            lines = []
        for line in lines:
            guest = _guest_of(line)
            if guest is not None:
                self._lines[guest] = self._lines.get(guest, 0) + 1

    def _thin(self) -> None:
        """Drop every second line of each guest. What only that one says, the next line gets."""
        head = {**self._head, "interval": self.interval * 2}
        kept = [json.dumps(head).encode()]
        seen: dict[int, int] = {}
        dropped: dict[int, dict[str, float]] = {}
        for line in self._place.read(NAME, MAX_BYTES).splitlines()[1:]:
            guest = _guest_of(line)
            if guest is None:
                kept.append(line)
                continue
            seen[guest] = seen.get(guest, 0) + 1
            if seen[guest] % 2 == 0:
                dropped[guest] = _entry(line).get("v", {})
                continue
            if any(name not in line for name in _apps(dropped.get(guest, {}))):
                entry = _entry(line)
                entry["v"] = {**dropped[guest], **entry.get("v", {})}
                line = json.dumps(entry, separators=(",", ":")).encode()  # noqa: PLW2901
            kept.append(line)
        self._place.write(NAME, b"\n".join(kept) + b"\n")
        descriptor = self._place.append(NAME)
        self.close()
        self._descriptor, self._head, self._torn = descriptor, head, False
        self._lines = {guest: (count + 1) // 2 for guest, count in seen.items()}


def _guest_of(line: bytes) -> int | None:
    head = line[:64].partition(b'"g":')[2].partition(b",")[0]
    return int(head) if head.isdigit() else None


def _entry(line: bytes) -> dict[str, Any]:
    """Return what a line says; nothing if it is cut off."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and isinstance(found.get("v"), dict):
            return found
    return {}


def _apps(values: Mapping[str, float]) -> list[bytes]:
    return [json.dumps(name).encode() for name in values if name.startswith("vtorque_app_")]
