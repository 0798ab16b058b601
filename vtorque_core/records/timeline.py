"""The time of each phase of a job, running or ended: what ``vmgr phases`` and the benchmarks show.

A journal goes when its job has nothing left; its timeline is then kept (:mod:`vtorque_core.kept`).
"""

from __future__ import annotations

import time
from typing import Any

from vtorque_core import kept
from vtorque_core.names import Paths
from vtorque_core.records import JournalState, find

ENDING = ("teardown", "release")


def keep(paths: Paths, state: JournalState) -> None:
    """Keep what an ended job's journal says of its phases. Never raises OSError."""
    if not state.phases:
        return
    header = state.header
    place = kept.place(paths, header.uid, header.id, header.attempt)
    now = time.time()
    ran = any(mark.name not in ENDING for mark in state.phases)  # else a failed start's proof goes
    place.add_facts(
        **({"phases": spans(state, now)} if ran else {}),
        job=header.id,
        attempt=header.attempt,
        owner=header.owner,
        uid=header.uid,
        batch=header.batch,
        ended=now,
    )


def keep_start(paths: Paths, state: JournalState) -> None:
    """Keep the phases of a job whose guests are ready: its owner cannot read the journal."""
    header = state.header
    place = kept.place(paths, header.uid, header.id, header.attempt)
    place.add_facts(phases=spans(state, time.time()))


def timeline(paths: Paths, job_id: str | None = None) -> list[dict[str, Any]]:
    """Return the phases of a job's last attempt, or of the last job: name, guest, start, seconds.

    ``start`` is Unix time; ``seconds`` until the next phase of the whole job (for a guest's own
    marks: since the job's phase before them). The mark ``used`` also has ``cpu_seconds`` and
    ``peak_mib``. Empty if nothing is known. Root only.
    """
    states = find(paths, job_id)
    running = [state for state in states if state.phases]
    if running:
        return spans(max(running, key=lambda state: state.phases[0].time), time.time())
    return kept_phases(paths, job_id)


def kept_phases(
    paths: Paths, job_id: str | None = None, uid: int | None = None
) -> list[dict[str, Any]]:
    """Return what is kept of the phases, as :func:`timeline`; ``uid``: of this user's jobs alone.

    While a job runs that is what it was when its guests were ready. As root or this user.
    """
    places = [each.facts().get("phases") for each in kept.find(paths, job_id, uid)]
    known = [phases for phases in places if isinstance(phases, list)]
    return known[-1] if known else []


def spans(state: JournalState, until: float) -> list[dict[str, Any]]:
    """Return each phase with its length; the last one lasts ``until`` then (Unix time)."""
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
