"""The time of each phase of a job, running or ended: what ``vmgr report`` and the benchmarks show.

A journal goes when its job has nothing left; its timeline is then kept in
``<state>/timelines.jsonl``, 0600, at most two files of 256 KiB, best effort.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

from vtorque_core.names import Paths
from vtorque_core.records import JournalState, find

_MAX_BYTES = 256 * 1024


def keep(paths: Paths, state: JournalState) -> None:
    """Add an ended job's timeline to the kept ones. Never raises OSError: a disk may be full."""
    if not state.phases:
        return
    phases = _spans(state, time.time())
    line = json.dumps({"job": state.header.id, "phases": phases}) + "\n"
    path = paths.state / "timelines.jsonl"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        descriptor = os.open(path, flags, 0o600)
        try:
            os.write(descriptor, line.encode())
            if os.fstat(descriptor).st_size > _MAX_BYTES:
                path.replace(path.with_suffix(".old"))
        finally:
            os.close(descriptor)


def timeline(paths: Paths, job_id: str | None = None) -> list[dict[str, Any]]:
    """Return the phases of a job's last attempt, or of the last job: name, guest, start, seconds.

    ``start`` is Unix time; ``seconds`` until the next phase of the whole job (for a guest's own
    marks: since the job's phase before them). The mark ``used`` also has ``cpu_seconds`` and
    ``peak_mib``. Empty if nothing is known. Root only.
    """
    states = find(paths, job_id)
    running = [state for state in states if state.phases]
    if running:
        return _spans(max(running, key=lambda state: state.phases[0].time), time.time())
    kept = [k for k in _kept(paths) if job_id in (None, k["job"])]
    return list(kept[-1]["phases"]) if kept else []


def _kept(paths: Paths) -> list[dict[str, Any]]:
    found = []
    for name in ("timelines.old", "timelines.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            text = (paths.state / name).read_text(encoding="utf-8")
            for line in text.splitlines():
                with contextlib.suppress(ValueError):  # torn by a full disk or a crash
                    found.append(json.loads(line))
    return found


def _spans(state: JournalState, until: float) -> list[dict[str, Any]]:
    """Return each phase with its length; the last one lasts ``until`` then (Unix time)."""
    marks = state.phases
    spans = []
    for number, mark in enumerate(marks):
        if mark.guest is None:
            after = [m for m in marks[number + 1 :] if m.guest is None]
            seconds = (after[0].time if after else until) - mark.time
        else:
            before = [m for m in marks[:number] if m.guest is None]
            seconds = mark.time - before[-1].time if before else 0.0
        span = {"name": mark.name, "guest": mark.guest, "start": mark.time, "seconds": seconds}
        if mark.usage is not None:
            span |= {"cpu_seconds": mark.usage.cpu_seconds, "peak_mib": mark.usage.peak_mib}
        spans.append(span)
    return spans
