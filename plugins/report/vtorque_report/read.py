"""Read the record of a job attempt on a node: ``job.json`` and ``series.jsonl``.

Root owns both files, but they contain data of users and guests. This module checks and limits all
values, and makes text printable.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import printable
from vtorque_core.api.kept_records import JOB, MAX_JOB, Place

SERIES = "series.jsonl"
MAX_SERIES = 64 << 20  # bytes that are read; telemetry writes less
MAX_LINES = 2000  # lines of each guest; telemetry keeps no more
MAX_GUESTS = 1024
MAX_NAMES = 2000  # names of series per guest
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Phase:
    """A phase of the job on this node, in Unix seconds.

    In a guest's phases, ``name`` is the boot step that was completed at ``end``.
    """

    name: str
    guest: int | None
    start: float
    end: float


@dataclass(frozen=True)
class Line:
    """All values of a guest, or of the whole job, at one time (Unix seconds), by series name."""

    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class ReportGuest:
    """A guest's requested size and its measurements.

    ``cpu_seconds`` and ``peak_mib`` measure the guest's QEMU from start to end. They are None while
    the guest runs.
    """

    node: str
    index: int
    rank: int
    hostname: str
    vcpus: int
    ram_mib: int
    lines: Sequence[Line] = ()
    cpu_seconds: float | None = None
    peak_mib: int | None = None


@dataclass(frozen=True)
class Attempt:
    """A job attempt on one node.

    Attributes:
        status: the script's exit status; None if unknown.
        known_as: the job id that users see, if it differs from ``job``.
        reason: why the attempt did not start, or empty.
    """

    job: str
    name: str
    attempt: int
    owner: str
    node: str
    nodes: tuple[str, ...]
    batch: str
    image: str
    guest_type: str
    started: float
    ended: float | None
    status: int | None
    guests: tuple[ReportGuest, ...]
    phases: tuple[Phase, ...]
    known_as: str = ""
    reason: str = ""


def attempt(kept: Path | Place, now: float, max_lines: int = MAX_LINES) -> Attempt | None:
    """Read a job attempt from kept records: a Place, or a directory with a copy of the records.

    ``now`` (Unix time) ends the last phase of a running job. Invalid values are dropped. Returns
    None if ``job.json`` has no valid content. Raises OSError if it is missing or unreadable.
    """
    facts = _object(_read(kept, JOB, MAX_JOB))
    if not facts:
        return None
    lines, whole = _series(kept, max_lines)
    ended = _number(facts.get("ended"))
    spans = [s for s in _list(facts.get("phases")) if isinstance(s, dict)]
    node = _text(facts.get("node"))
    guests = tuple(_guests(facts, node, spans, lines))
    phases = tuple(_phases(spans, ended, now)) or tuple(_approximate_phases(whole))
    status = _text(facts.get("status"))
    first = min((p.start for p in phases), default=now)
    return Attempt(
        job=_text(facts.get("job")),
        known_as=_text(facts.get("known_as")),
        name=_text(facts.get("name")),
        attempt=int(_number(facts.get("attempt")) or 0),
        owner=_text(facts.get("owner")),
        node=node,
        nodes=tuple(_text(name) for name in _list(facts.get("nodes"))) or (node,),
        batch=_text(facts.get("batch")),
        image=_text(facts.get("image")),
        guest_type=_text(facts.get("guest_type")),
        started=min(first, _number(facts.get("started")) or first),
        ended=ended,
        status=int(status) if status.lstrip("-").isdecimal() and len(status) < 6 else None,
        guests=guests,
        phases=phases,
        reason=_text(facts.get("reason"), 1000),
    )


def _read(kept: Path | Place, name: str, limit: int) -> bytes:
    if isinstance(kept, Place):
        return kept.read(name, limit)
    descriptor = os.open(kept / name, _FLAGS)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(limit)


def _guests(
    facts: Mapping[str, Any],
    node: str,
    spans: Sequence[Mapping[str, Any]],
    lines: Mapping[int, Sequence[Line]],
) -> Iterator[ReportGuest]:
    used = {_bounded_integer(s.get("guest"), -1): s for s in spans if s.get("name") == "used"}
    for number, entry in enumerate(_list(facts.get("guests"))[:MAX_GUESTS]):
        if not isinstance(entry, dict):
            continue
        index = _bounded_integer(entry.get("index"), number)
        mark = used.get(index, {})
        peak = _number(mark.get("peak_mib"))
        yield ReportGuest(
            node=node,
            index=index,
            rank=_bounded_integer(entry.get("rank"), index),
            hostname=_text(entry.get("hostname")),
            vcpus=_bounded_integer(entry.get("vcpus"), 0),
            ram_mib=_bounded_integer(entry.get("ram_mib"), 0),
            lines=lines.get(index, ()),
            cpu_seconds=_number(mark.get("cpu_seconds")),
            peak_mib=None if peak is None else int(peak),
        )


def _phases(spans: Sequence[Mapping[str, Any]], ended: float | None, now: float) -> Iterator[Phase]:
    whole = [s for s in spans if s.get("guest") is None]
    for span in spans:
        start, seconds = _number(span.get("start")), _number(span.get("seconds"))
        guest = span.get("guest")
        if start is None or seconds is None or span.get("name") == "used":
            continue
        if guest is None:
            running = ended is None and span is whole[-1]
            end = max(start, now) if running else start + max(0.0, seconds)
            yield Phase(_text(span.get("name")), None, start, end)
        elif isinstance(guest, int):
            # For a guest, ``start`` is the end of a boot step, and ``seconds`` its duration.
            yield Phase(_text(span.get("name")), guest, start - max(0.0, seconds), start)


def _approximate_phases(whole: Sequence[Line]) -> Iterator[Phase]:
    """Yield phases from the durations in the job's last sample, as if each phase occurred once."""
    if not whole:
        return
    head = 'vtorque_job_phase_seconds{phase="'
    found = [(k, v) for k, v in whole[-1].values.items() if k.startswith(head)]
    at = whole[-1].time - sum(v for _, v in found)
    for name, seconds in found:
        yield Phase(name.removeprefix(head).removesuffix('"}'), None, at, at + seconds)
        at += seconds


def _series(kept: Path | Place, max_lines: int) -> tuple[dict[int, list[Line]], list[Line]]:
    """Return each guest's and the whole job's samples, evenly reduced to about ``max_lines``."""
    raw: dict[int | None, list[bytes]] = {}
    with contextlib.suppress(OSError):
        for line in _read(kept, SERIES, MAX_SERIES).splitlines()[1:]:
            raw.setdefault(_guest_of(line), []).append(line)
    found: dict[int, list[Line]] = {}
    for guest, lines in list(raw.items())[: MAX_GUESTS + 1]:
        step = max(1, math.ceil(len(lines) / max_lines))
        some = lines[::step] + ([] if (len(lines) - 1) % step == 0 else lines[-1:])
        parsed = [each for line in some if (each := _line(line, guest)) is not None]
        if guest is not None:
            found[guest] = sorted(parsed, key=lambda line: line.time)
        else:
            whole = parsed
    return found, whole if None in raw else []


def _guest_of(line: bytes) -> int | None:
    head = line[:64].partition(b'"g":')[2].partition(b",")[0].strip()
    return int(head) if head.isdigit() and len(head) < 6 else None


def _line(text: bytes, guest: int | None) -> Line | None:
    entry = _object(text)
    time, values = _number(entry.get("t")), entry.get("v")
    if time is None or not isinstance(values, dict) or entry.get("g") != guest:
        return None
    numbers = ((name, _number(value)) for name, value in list(values.items())[:MAX_NAMES])
    return Line(time, {printable(name, 400): v for name, v in numbers if v is not None})


def _object(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    return {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object, limit: int = 200) -> str:
    return printable(str(value), limit) if isinstance(value, str | int) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e18 < value < 1e18 else None


def _bounded_integer(value: object, default: int) -> int:
    number = _number(value)
    return default if number is None else max(0, min(int(number), 1 << 40))
