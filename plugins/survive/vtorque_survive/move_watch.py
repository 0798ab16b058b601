"""What the watcher does for guests that go from node to node: it goes on where one was killed.

A move that is not over and at which nobody works is settled. What has come here is released when
its job has ended: no epilogue runs here, since the batch system has not given the job this node.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vtorque_core.api import HostFault, Paths, printable
from vtorque_core.api.children import Child
from vtorque_core.live import moving, service
from vtorque_core.live.jobs import RunningJob
from vtorque_survive import move, move_record
from vtorque_survive.move_record import AWAY, all_moves

_EVERY, _TIME = 5.0, 600.0  # seconds between two looks, and for one
log = logging.getLogger("survive")


@dataclass
class Moves:
    """At most one process at work for each job that moves, or has moved here."""

    config: Path
    every: float = _EVERY
    _work: dict[str, Child] = field(default_factory=dict)
    _at: float = float("-inf")

    def look(self, paths: Paths, jobs: Iterable[RunningJob]) -> None:
        """Collect who has ended, and begin what is next. Raises OSError."""
        for key in [key for key, child in self._work.items() if child.check()]:
            if error := self._work.pop(key).error:
                log.warning("%s: %s", key, error)
        if time.monotonic() - self._at < self.every:
            return
        self._at = time.monotonic()
        wanted = {each.key: each.job for each in all_moves(paths)}
        wanted |= {job.job.key: job.job.id for job in jobs if moving.comes(job)}
        for key in wanted.keys() - self._work.keys():
            self._work[key] = Child(lambda key=key: go_on(self.config, paths, key), _TIME)  # type: ignore[misc]


def apart(config: Path, found: move_record.Move) -> None:
    """Settle a move in a process that goes on without the watcher: a release may end that.

    Raises HostFault: it cannot be settled now.
    """
    argv = service.vmgr(config, "migrate", "--settle", "--to", found.to, "--", found.job)
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True, check=False,
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise HostFault(printable(said or f"exit code {done.returncode}", 500))


def go_on(config: Path, paths: Paths, key: str) -> None:
    """Do what is next for one. Raises HostFault: it cannot be done now."""
    here = move.Here.of(config)
    found = move_record.Move.read(paths, key)
    if found is not None and found.phase != AWAY:
        apart(config, found)
        return
    job_id, _, attempt = key.rpartition(".")
    if found is not None:
        job_id, attempt = found.job, str(found.attempt)
    job = here.job(job_id)
    if job is not None:
        job_id = job.job.id
    if not here.adapter.over(job_id, int(attempt)):
        return
    if job is not None and job.job.key == key and moving.comes(job):
        log.info("%s has ended: its guest here, too", job_id)
        here.release(job_id)
    if found is not None:
        move_record.forget(paths, key)
