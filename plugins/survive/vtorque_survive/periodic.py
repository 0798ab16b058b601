"""Save jobs automatically, as requested with ``-vm checkpoint=``. Runs as root, in the watcher.

The request is a file in the job's state directory. Its modification time is the time of the last
attempt to save the job, so a new watcher can continue if the previous one was killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtorque_core.api import Paths, walltime
from vtorque_core.api.job_files import File
from vtorque_core.api.kept_records import place
from vtorque_core.api.node_job import NodeJob
from vtorque_core.live import suspend
from vtorque_core.live.jobs import RunningJob
from vtorque_survive import listing
from vtorque_survive.resume_options import BEFORE_WALLTIME, BEGINNING, CHECKPOINT, NEVER, RESUME
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Store

_AGAIN = 60.0  # seconds until a failed checkpoint before the walltime's end is retried


def plan(job: NodeJob) -> None:
    """Record a starting job's request for checkpoints."""
    first = job.guests[0]
    if first.request[RESUME] == BEGINNING:
        place(job.site.paths, first.job).add_facts(begins_again=True)
    if (wanted := first.request[CHECKPOINT]) != NEVER:
        path = _file(job.site.paths, first.job.key)
        job.acquire(File(str(path), content=str(wanted).encode()))
        facts = place(job.site.paths, first.job).facts()
        if wanted == BEFORE_WALLTIME and not _seconds(facts):
            option = f"{CHECKPOINT.key}={CHECKPOINT.show(wanted)}"
            job.warn(f"{option}: the job's walltime is unknown, so the job will not be saved")


def restores_last(paths: Paths, job: RunningJob) -> bool:
    """Return whether the job would be restored from its last checkpoint if it were requeued."""
    return _file(paths, job.job.key).exists() and not starts_fresh(job)


def starts_fresh(job: RunningJob) -> bool:
    """Return whether the job always starts from the beginning (``resume=none``)."""
    return bool(job.kept.facts().get("begins_again"))


def is_due(paths: Paths, job: RunningJob, settings: Settings) -> bool | None:
    """Return None if no checkpoint is due, otherwise whether the job must end afterwards."""
    if suspend.phase(job) != suspend.RUNS:
        return None
    file = _file(paths, job.job.key)
    try:
        wanted, last = int(file.read_text()), file.stat().st_mtime
    except FileNotFoundError:
        return None
    ends = wanted == BEFORE_WALLTIME
    at = (
        _before_end(job, settings.checkpoint_before_end)
        if ends
        else last + max(wanted, settings.min_checkpoint_interval)
    )
    if last >= at:
        at = last + _AGAIN
    return ends if at <= time.time() else None


def record_attempt(paths: Paths, job: RunningJob) -> None:
    """Record an attempt to save the job."""
    os.utime(_file(paths, job.job.key))


def trim(paths: Paths, job: RunningJob, store: Store, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints of a job with ``checkpoint=``."""
    if _file(paths, job.job.key).exists():
        of_it = [each.id for each in store.list_for_job(job.job.id)]
        for name in of_it[:-keep]:
            listing.remove(store, name)


def _before_end(job: RunningJob, before: float) -> float:
    """Return the Unix time at which to save the job: ``before`` seconds before its walltime ends.

    At the earliest, this is halfway between the script's start and the end of the walltime.
    """
    facts = job.kept.facts()
    seconds = _seconds(facts)
    if not seconds:
        return float("inf")
    end = float(facts["started"]) + seconds
    begun = next(at for name, at in job.phases if name == suspend.RUNS)
    return max(end - before, (begun + end) / 2)


def _seconds(facts: Mapping[str, Any]) -> int:
    try:
        return walltime(str(facts.get("walltime", "")))
    except ValueError:
        return 0


def _file(paths: Paths, key: str) -> Path:
    return paths.job_state(key) / "checkpoint-plan"
