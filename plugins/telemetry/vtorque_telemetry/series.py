"""Write series.jsonl: a job's samples for ``vmgr report``, with bounded size.

The first line is ``{"schema": 1, "job": .., "node": .., "interval": 2.0}``. Each other line has a
guest's values at one time: ``{"t": unix, "g": index or null, "v": {series: value}}``. When the file
is full, the sampler removes every second line of each guest and doubles the interval. Lines of
the whole job (``g`` is null) stay. A new sampler removes a partial line of a killed sampler.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from typing import Any

NAME = "series.jsonl"
MAX_LINES = 2000  # of each guest
MAX_BYTES = 16 << 20  # of the file, because metrics of programs in guests can have long names


class SeriesFile:
    """The file of one job on this node. Methods raise OSError."""

    def __init__(self, descriptor: int, job: str, node: str, interval: float) -> None:
        """Begin the file, or continue the file of a killed sampler.

        ``descriptor`` is open for reading and writing. ``interval`` is in seconds.
        """
        self._descriptor = descriptor
        self._head = {"schema": 1, "job": job, "node": node, "interval": interval}
        self._lines: dict[int, int] = {}
        self._next: dict[int, float] = {}
        before = self._read()
        whole = before[: before.rfind(b"\n") + 1]
        self._count(whole)
        os.ftruncate(descriptor, len(whole))
        if not whole:
            self._append(json.dumps(self._head).encode() + b"\n")

    @property
    def interval(self) -> float:
        """Seconds between two lines of a guest."""
        return float(self._head["interval"])  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def is_due(self, guest: int, at: float) -> bool:
        """Return True if a guest's next line is due at the time ``at`` (Unix seconds)."""
        return at >= self._next.get(guest, 0.0) - self.interval / 10

    def add(self, guest: int | None, at: float, values: Mapping[str, float]) -> None:
        """Add a line of a guest or of the whole job (None). If the file is full, shorten it."""
        entry = {"t": round(at, 3), "g": guest, "v": values}
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        if self._size() + len(line) > MAX_BYTES:
            self._thin()
            if self._size() + len(line) > MAX_BYTES:
                raise OSError(errno.EFBIG, f"{NAME} has reached {MAX_BYTES >> 20} MiB")
        self._append(line)
        if guest is None:
            return
        self._lines[guest] = self._lines.get(guest, 0) + 1
        self._next[guest] = at + self.interval
        if self._lines[guest] >= MAX_LINES:
            self._thin()

    def _append(self, data: bytes) -> None:
        """Append all data or none."""
        before = self._size()
        if os.pwrite(self._descriptor, data, before) < len(data):
            os.ftruncate(self._descriptor, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _read(self) -> bytes:
        return os.pread(self._descriptor, MAX_BYTES, 0)

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
        """Remove every second line of each guest.

        Metrics that programs in the guest wrote (``vtorque_app_*``) are not lost: the values of a
        removed line move to the guest's next line, unless that line has newer values.
        """
        head = {**self._head, "interval": self.interval * 2}
        kept = [json.dumps(head).encode()]
        seen: dict[int, int] = {}
        dropped: dict[int, dict[str, float]] = {}
        for line in self._read().splitlines()[1:]:
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
        self._replace(b"\n".join(kept) + b"\n")
        self._head = head
        self._lines = {guest: (count + 1) // 2 for guest, count in seen.items()}

    def _replace(self, data: bytes) -> None:
        """Overwrite the file with shorter content.

        If this process is killed during the call, empty lines may remain at the end of the file.
        """
        padded = data.ljust(self._size(), b"\n")
        if os.pwrite(self._descriptor, padded, 0) < len(padded):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._descriptor, len(data))


def _guest_of(line: bytes) -> int | None:
    head = line[:64].partition(b'"g":')[2].partition(b",")[0]
    return int(head) if head.isdigit() else None


def _entry(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and isinstance(found.get("v"), dict):
            return found
    return {}


def _apps(values: Mapping[str, float]) -> list[bytes]:
    return [json.dumps(name).encode() for name in values if name.startswith("vtorque_app_")]
