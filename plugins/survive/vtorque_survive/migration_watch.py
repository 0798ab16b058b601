"""The watcher's part in migrations: finish or undo migrations whose process was killed.

When a job has ended, the watcher also releases the guests that migrated to this node. No epilogue
of the job runs on this node, because the node is not in the job's allocation.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from vtorque_core.api import HostFault, Paths, VtorqueError, printable
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.children import Child
from vtorque_core.live import kept_jobs, service, suspend
from vtorque_core.live.jobs import RunningJob
from vtorque_survive import migration, migration_record, reach
from vtorque_survive.migration_record import AWAY, all_moves, is_locked, outside_nodes

_EVERY, _TIME = 5.0, 600.0  # seconds between two rounds, and for one process
_PASSES = 55.0  # seconds for other nodes to act; the owner waits 60
_SELDOM = 60.0  # seconds between two checks for a new attempt of an existing job
UNHELD = "unheld"  # fact: this node is no longer reserved for the guest
_TOLD = "told"  # fact: the phase that the first node knows
WHY_UNHELD = (
    "its placeholder job was canceled: the batch system may give the guest's cores and "
    "memory to other jobs"
)
log = logging.getLogger("survive")


@dataclass
class MigrationWatcher:
    """The processes that work on migrations of this node's guests.

    One process for each unfinished migration runs :func:`run_resolve`. One more process runs
    :func:`release_ended`.
    """

    config: Path
    every: float = _EVERY
    _work: dict[str, Child] = field(default_factory=dict)
    _at: float = float("-inf")
    _asked: float = float("-inf")

    def poll(self, paths: Paths, jobs: Iterable[RunningJob]) -> None:
        """Reap ended processes and start the next ones."""
        for key in [key for key, child in self._work.items() if child.check()]:
            if error := self._work.pop(key).error:
                log.warning("%s: %s", key or "moves", error)
        now = time.monotonic()
        if now - self._at < self.every:
            return
        self._at = now
        moves = list(all_moves(paths))
        here = {job.job.key: (job.job.id, job.job.attempt) for job in jobs if is_migrated(job)}
        here |= {each.key: (each.job, each.attempt) for each in moves}
        for each in moves:
            if each.phase != AWAY:
                del here[each.key]
                if each.key not in self._work and not is_locked(paths, each.key):
                    self._work[each.key] = Child(partial(run_resolve, self.config, each), _TIME)
        if here and "" not in self._work:
            seldom = now - self._asked >= _SELDOM
            self._asked = now if seldom else self._asked
            self._work[""] = Child(lambda: release_ended(self.config, here, seldom=seldom), _TIME)

    def forward_request(self, job: RunningJob, word: str) -> Child | None:
        """Start a process that forwards the request ``word`` to nodes outside the allocation.

        Returns None if the job has no guests on such nodes.
        """
        nodes = list(outside_nodes(job))
        return Child(lambda: _forward(self.config, job, nodes, word), _PASSES) if nodes else None


def run_resolve(config: Path, found: migration_record.Move) -> None:
    """Run ``vmgr migrate --resolve`` for a migration, in a new session (setsid(2)).

    ``vmgr`` may release the node's last job, which ends the watcher. ``vmgr`` itself must continue.

    Raises:
        HostFault: If the migration cannot be resolved now.
    """
    argv = service.vmgr(config, "migrate", "--resolve", "--to", found.to, "--", found.job)
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True, check=False,
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise HostFault(printable(said or f"exit code {done.returncode}", 500))


def release_ended(config: Path, keys: Mapping[str, tuple[str, int]], *, seldom: bool) -> None:
    """For ended job attempts, release arrived guests and remove records of departed guests.

    With ``seldom``, also detect that an attempt has ended because its job was requeued.

    Raises:
        HostFault: If some guests could not be released.
    """
    here, wrong = migration.ThisNode.from_config(config), ""
    lives = here.job_states(sorted({job_id for job_id, _ in keys.values()}))
    for key, (job_id, attempt) in keys.items():
        life = lives.get(job_id, JobState.UNKNOWN)
        try:
            if life is JobState.GONE or (seldom and here.adapter.has_ended(job_id, attempt)):
                _end(here, key, job_id)
            elif life is not JobState.UNKNOWN:
                _check_job(here, key, job_id, seldom=seldom)
        except VtorqueError as error:
            wrong = f"{key}: {error}"
        except (LookupError, OSError) as error:  # its kept records are invalid
            wrong = f"{key}: {error!r}"
    if wrong:
        raise HostFault(wrong)


def _check_job(here: migration.ThisNode, key: str, job_id: str, *, seldom: bool) -> None:
    job = here.job(job_id)
    if job is None or job.job.key != key or not is_migrated(job):
        return
    if seldom:
        _check_placeholder(here, job)
    _notify_first(here, job, again=seldom)


def _check_placeholder(here: migration.ThisNode, job: RunningJob) -> None:
    """Warn in the job's log if the placeholder job that reserves this node has ended."""
    held = here.adapter.is_reserved(job.job.id, job.job.node)
    if held == bool(job.kept.facts().get(UNHELD)):
        job.kept.add_facts(**{UNHELD: not held})
        if not held:
            with kept_jobs.logging_for(here.paths, job.job):
                logging.getLogger(__name__).warning(WHY_UNHELD)  # "survive": the watcher's


def _notify_first(here: migration.ThisNode, job: RunningJob, *, again: bool) -> None:
    """Report a job's phase on this node to the job's first node.

    Without ``again``, skip a phase that has been reported already.
    """
    facts, phase = job.kept.facts(), job.phases[-1][0]
    if not job.guests or (not again and facts.get(_TOLD, suspend.RUNS) == phase):
        return  # the sender has reported that they run here
    guests = migration_record.describe_guests(job.guests)
    what = {"ask": "phase", "job": job.job.id, "key": job.job.key, "node": job.job.node}
    with suppress(HostFault):  # informative only, and repeated
        reach.ask(
            here.config,
            here.settings,
            str(facts["nodes"][0]),
            {**what, "phase": phase, "guests": guests},
        )
        job.kept.add_facts(**{_TOLD: phase})


def _forward(config: Path, job: RunningJob, nodes: Sequence[str], word: str) -> None:
    here, wrong = migration.ThisNode.from_config(config), []
    what = {"ask": word, "job": job.job.id, "key": job.job.key}
    for node in nodes:
        try:
            said = reach.ask(config, here.settings, node, what)
        except HostFault as error:
            said = str(error)
        if said:
            wrong.append(f"{node}: {printable(str(said), 300)}")
    if wrong:
        raise HostFault("; ".join(wrong))


def _end(here: migration.ThisNode, key: str, job_id: str) -> None:
    job = here.job(job_id)
    if job is not None and job.job.key == key and is_migrated(job):
        log.info("%s has ended: releasing its guest on this node", job_id)
        here.release(job_id)
    migration_record.forget(here.paths, key)


def is_migrated(job: RunningJob) -> bool:
    """Return whether the job's guest has migrated to this node, or is migrating to it."""
    return any(phase == "arrives" for phase, _ in job.phases)
