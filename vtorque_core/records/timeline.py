"""Timeline of a job: the time of each phase, for ``vmgr report`` and the log's last line."""

from __future__ import annotations

import logging
import time
from typing import Any

from vtorque_core.api import kept_records
from vtorque_core.base.names import Paths
from vtorque_core.records.log import LAST
from vtorque_core.records.reading import JournalState

_ENDING = ("teardown", "release")
_log = logging.getLogger(LAST)


def keep_phases(paths: Paths, state: JournalState) -> None:
    if not state.phases:
        return
    now = time.time()
    ran = any(mark.name not in _ENDING for mark in state.phases)  # or a proof is released
    phases = {"phases": spans(state, now)} if ran else {}
    kept_records.keep_facts(paths, state.header.job, batch=state.header.batch, ended=now, **phases)


def spans(state: JournalState, until: float) -> list[dict[str, Any]]:
    """Return a dict per phase: ``name``, ``guest`` (None: the job), ``start``, ``seconds``.

    For a phase of the job, ``seconds`` is the duration; the last phase ends at ``until``. A guest's
    phase has no duration: ``seconds`` is the time since the preceding phase of the job began. The
    phase ``used`` has ``cpu_seconds`` and ``peak_mib``.
    """
    marks = state.phases
    found = []
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
        found.append(span)
    return found


def log_durations(state: JournalState, until: float) -> None:
    times: dict[str, float] = {}
    stage = "start"
    for span in spans(state, until):
        if span["guest"] is None:
            name = span["name"]
            stage = "end" if name in _ENDING else "run" if name == "run" else stage
            key = name if stage == "run" else stage  # beside run: paused, suspended
            times[key] = times.get(key, 0.0) + span["seconds"]
    if times.keys() - {"end"}:
        said = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items())
        _log.info("times: %s", said, extra={"guest": None})
