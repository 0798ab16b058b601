"""Drain this node: accept no new jobs, and migrate or requeue the present ones. Runs as root.

The batch system drains the node first, so that it starts no more jobs on the node. Then each job is
migrated to a spare node, saved and requeued, or left running. A saved job continues until it is
requeued, so a refused requeue loses nothing.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import (
    HostFault,
    Paths,
    Refused,
    VtorqueError,
    closing,
    name_errors,
    printable,
    replace_file,
    take_lock,
)
from vtorque_core.api.batch_system import DrainingAdapter
from vtorque_core.live import kept_jobs, service, suspend
from vtorque_core.live.jobs import RunningJob, RunningJobs
from vtorque_survive import migration, periodic, turn
from vtorque_survive.checkpoint import CheckpointWatcher
from vtorque_survive.settings import Settings

MOVED, REQUEUED, LEFT = "moved", "requeued", "left"
LOCK = "survive-drain.lock"  # in the run directory; held during a drain
_TIME = 9000.0  # seconds for one command: a migration takes up to an hour, and may wait for another
_MOST = 300  # characters of another command's message
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrainResult:
    """The action of a drain or a dry run for one job, and the reason for the action."""

    job: str
    owner: str
    done: str
    why: str


@dataclass(frozen=True)
class Drain:
    """A drain of this node, with the site's settings."""

    config: Path
    paths: Paths
    batch: object
    settings: Settings
    reason: str
    in_turn: bool = False

    @classmethod
    def from_config(cls, config: Path, reason: str, *, in_turn: bool = False) -> Drain:
        """Return a drain of this node.

        With ``in_turn``, :meth:`run` refuses the drain if ``max_drained_nodes`` nodes are drained.
        """
        site, batch = service.batch_system(config)
        reason = printable(reason, _MOST)
        return cls(config, site.paths, batch.node(site), site[Settings], reason, in_turn)

    def is_this_node(self, name: str) -> bool:
        """Return whether a name is this node's host name or its name in the batch system."""
        names = {socket.gethostname(), *(job.job.node for job in self._jobs())}
        return name in names | {each.partition(".")[0] for each in names}

    def plan(self) -> Iterator[DrainResult]:
        """Yield the planned action for each job, without performing it."""
        for job in self._jobs():
            why_not = self._why_not_requeued(job)
            why = why_not or "saved first"
            if spare := [node for node in self.settings.spare_nodes if self._is_movable(job, node)]:
                why += f", unless it can be migrated to {' or '.join(spare)}"
            yield DrainResult(job.job.id, job.job.owner, LEFT if why_not else REQUEUED, why)

    def _is_movable(self, job: RunningJob, node: str) -> bool:
        try:
            migration.require(self.settings, self.paths, job, node)
        except Refused:
            return False
        return True

    def run(self) -> Iterator[DrainResult]:
        """Drain the node; yield the result for each job.

        Raises:
            HostFault: If the batch system could not drain the node. Nothing was done.
            Refused: If the drain is not allowed. Nothing was done.
        """
        with closing(take_lock(self.paths.run / LOCK, 0.0)):
            if self.in_turn:
                turn.take_turn(self.batch, self.settings.max_drained_nodes, self.reason)
            else:
                _draining_adapter(self.batch).drain(self.reason)
            left = []
            jobs = self._jobs()
            with ThreadPoolExecutor(self.settings.drain_parallelism) as threads:
                for job, done in zip(jobs, threads.map(self._drain_job, jobs), strict=True):
                    self._log_result(job, done)
                    left += [done.job] if done.done == LEFT else []
                    yield done
            LastDrain(time.time(), self.reason, tuple(left)).write(self.paths)

    def _jobs(self) -> list[RunningJob]:
        return RunningJobs(self.paths).jobs()

    def _drain_job(self, job: RunningJob) -> DrainResult:
        why = []
        for node in self.settings.spare_nodes if suspend.phase(job) else ():
            _, wrong = _vmgr(self.config, "migrate", "--to", node, "--", job.job.id)
            if not wrong:
                return DrainResult(job.job.id, job.job.owner, MOVED, f"to {node}")
            why.append(f"not migrated to {node}: {wrong}")
        try:
            saved, wrong = self._requeue(job)
        except (VtorqueError, OSError) as error:
            saved, wrong = "", str(error)
        if not wrong:
            return DrainResult(job.job.id, job.job.owner, REQUEUED, f"saved as checkpoint {saved}")
        return DrainResult(job.job.id, job.job.owner, LEFT, "; ".join([*why, wrong]))

    def _requeue(self, job: RunningJob) -> tuple[str, str]:
        """Save and requeue a job. Return the checkpoint's id and an error; one of them is empty."""
        if why_not := self._why_not_requeued(job):
            return "", why_not
        saved = save(self.config, job)
        start_again(_draining_adapter(self.batch).requeue, job, saved)
        return saved, ""

    def _why_not_requeued(self, job: RunningJob) -> str:
        """Return why the job cannot be restored on another node, or an empty string."""
        if not suspend.phase(job):
            return "its guests are starting or ending"
        if not periodic.restores_last(self.paths, job):
            return (
                "the job does not request checkpoints (checkpoint=), or requests to start "
                "from the beginning (resume=none)"
            )
        if not self.settings.checkpoints_shared:
            return (
                "its checkpoints can only be restored on this node ([plugin.survive] "
                "checkpoints_shared is false)"
            )
        return CheckpointWatcher(self.config, self.settings).refusal(job, ends=False)

    def _log_result(self, job: RunningJob, done: DrainResult) -> None:
        level = logging.WARNING if done.done == LEFT else logging.INFO
        what = "left running" if done.done == LEFT else done.done
        with suppress(OSError), kept_jobs.logging_for(self.paths, job.job):
            why = f"{what}: {done.why}" if done.why else what
            log.log(level, "node drained (%s); the job is %s", self.reason, why)


@dataclass(frozen=True)
class LastDrain:
    """The last completed drain of this node; ``at`` (Unix time) is 0 if there was none."""

    at: float = 0.0
    reason: str = ""
    left: tuple[str, ...] = ()

    @classmethod
    def read(cls, paths: Paths) -> LastDrain:
        """Return the last drain. Needs root."""
        said = read_record(_file(paths))
        try:
            left = tuple(map(str, said.get("left", ())))
            return cls(float(said.get("at", 0.0)), str(said.get("reason", "")), left)
        except (TypeError, ValueError):
            return cls()

    def write(self, paths: Paths) -> None:
        """Write the record."""
        said = {"at": self.at, "reason": self.reason, "left": self.left}
        replace_file(str(_file(paths)), json.dumps(said).encode(), mode=0o600)


def _draining_adapter(batch: object) -> DrainingAdapter:
    if not isinstance(batch, DrainingAdapter):
        raise Refused("this site's batch system cannot drain a node")
    return batch


def save(config: Path, job: RunningJob) -> str:
    """Save a job and let it continue. Return the checkpoint's id."""
    saved, wrong = _vmgr(config, "checkpoint", "--this-node", "--", job.job.id)
    if wrong:
        raise HostFault(f"not saved: {wrong}")
    return saved


def start_again(requeue: Callable[[str], None], job: RunningJob, saved: str) -> None:
    """Requeue a saved job.

    Raises:
        HostFault: If the batch system refused the requeue. The job continues to run.
    """
    with name_errors(f"saved as checkpoint {saved}, but not requeued", VtorqueError):
        requeue(job.job.id)


def _vmgr(config: Path, *words: str) -> tuple[str, str]:
    """Run ``vmgr``. Return its output and its error message; one of them is empty."""
    try:
        done = subprocess.run(
            service.vmgr(config, *words), stdin=subprocess.DEVNULL, timeout=_TIME,
            capture_output=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"timed out after {_TIME:g} s"
    except OSError as error:
        return "", str(error)
    out, err = (said.decode("utf-8", "replace").strip() for said in (done.stdout, done.stderr))
    if done.returncode == 0:
        return printable(out, _MOST), ""
    last = (err or out or f"exit code {done.returncode}").splitlines()[-1]
    return "", printable(last.removeprefix("vmgr: "), _MOST)


def read_record(path: Path) -> Mapping[str, Any]:
    """Return a JSON record written by root; empty if it is missing or invalid."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _file(paths: Paths) -> Path:
    return paths.state / "survive-drained.json"
