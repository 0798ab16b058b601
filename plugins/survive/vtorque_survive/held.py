"""A job that is held while it runs (``qhold``) is saved, and starts again once released. Root.

Torque and OpenPBS note such a hold and let the job run on. So the node's watcher looks for it, and
has a process save the job, which goes on, and tell the batch system, which ends the job and keeps
it. Who says no to either has lost nothing: the job runs on, and its log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from vtorque_core.api import Refused, VtorqueError
from vtorque_core.api.batch_system import Life
from vtorque_core.api.children import Child
from vtorque_core.live import kept, service
from vtorque_core.live.jobs import RunningJob
from vtorque_survive import drain, periodic
from vtorque_survive.asked import BEGINNING, RESUME
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Store

_TIME = 3700.0  # seconds: saving has an hour
log = logging.getLogger(__name__)


@runtime_checkable
class Holding(Protocol):
    """What a :class:`vtorque_core.api.batch_system.NodeAdapter` has whose jobs run on when held."""

    def alive_and_held(self, ids: Collection[str]) -> tuple[Mapping[str, Life], Collection[str]]:
        """Return what :meth:`NodeAdapter.alive` does, and which of these run and are held."""
        ...

    def requeue_here(self, job_id: str) -> None:
        """As :meth:`DrainingAdapter.requeue`, and the job starts again on this node alone.

        Raises HostFault, Refused.
        """
        ...


class Holds:
    """The watcher's part: each hold of a job is acted on once."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self._begun: dict[str, Child | None] = {}

    def look(self, jobs: Collection[RunningJob], held: Collection[str]) -> None:
        """Begin what is to be done for those of the jobs that are held. Raises OSError."""
        for key, child in self._begun.items():
            if child is not None and child.check():
                self._begun[key] = None
                if child.error:
                    log.error("%s, which is held: %s", key, child.error)
        wanted = {job.job.key: job for job in jobs if job.job.id in held}
        for key in [key for key, child in self._begun.items() if child is None]:
            if key not in wanted:
                del self._begun[key]
        for key, job in wanted.items():
            if key not in self._begun:
                self._begun[key] = Child(partial(start_again, self._config, job), _TIME)


def start_again(config: Path, job: RunningJob) -> None:
    """Save a job and have it start again once released; say so, or why not, in its log."""
    site, batch = service.batch_system(config)
    with kept.logging_for(site.paths, job.job):
        try:
            if periodic.begins_again(job):
                raise Refused(f"it would start from its beginning ({RESUME.key}={BEGINNING})")
            node = cast("Holding", batch.node(site))  # it has said that the job is held
            saved = drain.save(config, job)
            store = Store(Path(site[Settings].checkpoints), job.job.uid)
            store.hold(saved)
            try:
                drain.start_again(node.requeue_here, job, saved)
            except Exception:  # whatever it is, the job runs on
                store.let_go(saved)
                raise
            log.info("its batch system holds it: saved as checkpoint %s, and requeued", saved)
        except (VtorqueError, OSError) as error:
            log.warning("its batch system holds it, and it runs on: %s", error)
