"""Save a running job that is held (``qhold``), and requeue it in the held state. Runs as root.

If a running job is held, Torque and OpenPBS only record the hold. The node's watcher therefore
starts a process that saves the job and then makes the batch system requeue and hold the job. If one
of these steps fails, the job continues to run and its log has the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from vtorque_core.api import Refused, VtorqueError
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.children import Child
from vtorque_core.live import kept_jobs, service
from vtorque_core.live.jobs import RunningJob
from vtorque_survive import drain, periodic
from vtorque_survive.resume_options import BEGINNING, RESUME
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Store

_TIME = 3700.0  # seconds; a checkpoint may take an hour
log = logging.getLogger(__name__)


@runtime_checkable
class HoldAdapter(Protocol):
    """Methods of the node adapters for batch systems in which held jobs continue to run."""

    def alive_and_held(
        self, ids: Collection[str]
    ) -> tuple[Mapping[str, JobState], Collection[str]]:
        """Return the result of :meth:`NodeAdapter.job_states`, and which running jobs are held."""
        ...

    def requeue_here(self, job_id: str) -> None:
        """Requeue like :meth:`DrainingAdapter.requeue`, but restrict the job to this node."""
        ...


class HoldWatcher:
    """The watcher's part for held jobs: save and requeue each job once per hold."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self._begun: dict[str, Child | None] = {}

    def poll(self, jobs: Collection[RunningJob], held: Collection[str]) -> None:
        """For each newly held job, start a process that saves and requeues the job.

        ``held`` has the ids of jobs that the batch system holds (``qhold``).
        """
        for key, child in self._begun.items():
            if child is not None and child.check():
                self._begun[key] = None
                if child.error:
                    log.error("cannot requeue the held job %s: %s", key, child.error)
        wanted = {job.job.key: job for job in jobs if job.job.id in held}
        for key in [key for key, child in self._begun.items() if child is None]:
            if key not in wanted:
                del self._begun[key]
        for key, job in wanted.items():
            if key not in self._begun:
                self._begun[key] = Child(partial(start_again, self._config, job), _TIME)


def start_again(config: Path, job: RunningJob) -> None:
    """Save a job and requeue it; log the result in the job's log."""
    site, batch = service.batch_system(config)
    with kept_jobs.logging_for(site.paths, job.job):
        try:
            if periodic.starts_fresh(job):
                raise Refused(
                    f"the requeued job would start from the beginning ({RESUME.key}={BEGINNING})"
                )
            node = cast("HoldAdapter", batch.node(site))  # it reported the hold
            saved = drain.save(config, job)
            store = Store(Path(site[Settings].checkpoints), job.job.uid)
            store.hold(saved)
            try:
                drain.start_again(node.requeue_here, job, saved)
            except Exception:  # the job continues after any error
                store.release_hold(saved)
                raise
            log.info("held by the batch system: saved as checkpoint %s, and requeued", saved)
        except (VtorqueError, OSError) as error:
            log.warning("held by the batch system, but not requeued, and still running: %s", error)
