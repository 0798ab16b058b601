"""A node is drained: no new jobs come, and those on it go elsewhere where they can. Root, there.

The batch system is told first, so that nothing comes back. Then each job is moved to a spare node,
or saved and started again by its batch system, or left to run. One that is to start again is saved
while it goes on, and its batch system is told only when all of that is on disk: if it says no, the
job has lost nothing.
"""

from __future__ import annotations

import json
import logging
import os
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
    printable,
    replace_file,
    take_lock,
)
from vtorque_core.api.batch_system import DrainingAdapter
from vtorque_core.live import kept, service, suspend
from vtorque_core.live.jobs import Running, RunningJob
from vtorque_survive import move, periodic, turn
from vtorque_survive.checkpoint import Checkpoints
from vtorque_survive.settings import Settings

MOVED, REQUEUED, LEFT = "moved", "requeued", "left"
LOCK = "survive-drain.lock"  # in the run directory, of who is at it
_TIME = 9000.0  # seconds for one command: a move may take an hour, and wait for one before it
_MOST = 300  # characters of what another command says
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Done:
    """What was done with a job, or is to be done, and how or why not."""

    job: str
    owner: str
    done: str
    why: str


@dataclass(frozen=True)
class Drain:
    """A node that is to be drained, with the site's settings."""

    config: Path
    paths: Paths
    batch: object
    settings: Settings
    reason: str
    in_turn: bool = False

    @classmethod
    def of(cls, config: Path, reason: str, *, in_turn: bool = False) -> Drain:
        """Return that of this node; ``in_turn``: of ``drain_most``. Raises ConfigError, Refused."""
        site, batch = service.batch_system(config)
        reason = printable(reason, _MOST)
        return cls(config, site.paths, batch.node(site), site[Settings], reason, in_turn)

    def is_here(self, name: str) -> bool:
        """Return whether a name is this node's: its host name, or what its jobs call it."""
        names = {socket.gethostname(), *(job.job.node for job in self._jobs())}
        return name in names | {each.partition(".")[0] for each in names}

    def planned(self) -> Iterator[Done]:
        """Yield what would be done with each job; nothing is."""
        for job in self._jobs():
            why_not = self._why_not_requeued(job)
            why = why_not or "saved first"
            if spare := [node for node in self.settings.spare_nodes if self._movable(job, node)]:
                why += f", unless it can be moved to {' or '.join(spare)}"
            yield Done(job.job.id, job.job.owner, LEFT if why_not else REQUEUED, why)

    def _movable(self, job: RunningJob, node: str) -> bool:
        """Return whether nothing that is known here is against a move."""
        try:
            move.require(self.settings, self.paths, job, node)
        except Refused:
            return False
        return True

    def run(self) -> Iterator[Done]:
        """Drain it; yield what was done with each job. Raises HostFault, Refused: nothing was."""
        lock = take_lock(self.paths.run / LOCK, 0.0)
        try:
            if self.in_turn:
                turn.take(self.batch, self.settings.max_drained_nodes, self.reason)
            else:
                _draining(self.batch).drain(self.reason)
            left = []
            jobs = self._jobs()
            with ThreadPoolExecutor(self.settings.drain_parallelism) as threads:
                for job, done in zip(jobs, threads.map(self._one, jobs), strict=True):
                    self._tell(job, done)
                    left += [done.job] if done.done == LEFT else []
                    yield done
            Last(time.time(), self.reason, tuple(left)).write(self.paths)
        finally:
            os.close(lock)

    def _jobs(self) -> list[RunningJob]:
        return Running(self.paths).jobs()

    def _one(self, job: RunningJob) -> Done:
        why = []
        for node in self.settings.spare_nodes if suspend.phase(job) else ():
            _, wrong = _vmgr(self.config, "migrate", "--to", node, "--", job.job.id)
            if not wrong:
                return Done(job.job.id, job.job.owner, MOVED, f"to {node}")
            why.append(f"not moved to {node}: {wrong}")
        try:
            saved, wrong = self._requeued(job)
        except (VtorqueError, OSError) as error:
            saved, wrong = "", str(error)
        if not wrong:
            return Done(job.job.id, job.job.owner, REQUEUED, f"saved as checkpoint {saved}")
        return Done(job.job.id, job.job.owner, LEFT, "; ".join([*why, wrong]))

    def _requeued(self, job: RunningJob) -> tuple[str, str]:
        """Have a job start again from now on; return its checkpoint, and why not."""
        if why_not := self._why_not_requeued(job):
            return "", why_not
        saved = save(self.config, job)
        start_again(_draining(self.batch).requeue, job, saved)
        return saved, ""

    def _why_not_requeued(self, job: RunningJob) -> str:
        """Return why a job would not go on elsewhere from where it is; empty: it would."""
        if not suspend.phase(job):
            return "its guests start, or end"
        if not periodic.goes_on(self.paths, job):
            return "it has not asked for checkpoints (checkpoint=), or not to go on (resume=none)"
        if not self.settings.checkpoints_shared:
            return "its checkpoints are on this node alone (checkpoints_shared)"
        return Checkpoints(self.config, self.settings).why_not(job, ends=False)

    def _tell(self, job: RunningJob, done: Done) -> None:
        """Say so in the job's log."""
        level = logging.WARNING if done.done == LEFT else logging.INFO
        what = "left to run" if done.done == LEFT else done.done
        with suppress(OSError), kept.logging_for(self.paths, job.job):
            why = f"{what}: {done.why}" if done.why else what
            log.log(level, "its node is drained (%s), and the job is %s", self.reason, why)


@dataclass(frozen=True)
class Last:
    """The last drain of this node that came to its end, or none (``at`` 0)."""

    at: float = 0.0
    reason: str = ""
    left: tuple[str, ...] = ()

    @classmethod
    def read(cls, paths: Paths) -> Last:
        """Return it. As root."""
        said = read_record(_file(paths))
        try:
            left = tuple(map(str, said.get("left", ())))
            return cls(float(said.get("at", 0.0)), str(said.get("reason", "")), left)
        except (TypeError, ValueError):
            return cls()

    def write(self, paths: Paths) -> None:
        """Note it. Raises OSError, HostFault."""
        said = {"at": self.at, "reason": self.reason, "left": self.left}
        replace_file(str(_file(paths)), json.dumps(said).encode(), mode=0o600)


def _draining(batch: object) -> DrainingAdapter:
    """Return the node part of a batch system that can drain a node. Raises Refused."""
    if not isinstance(batch, DrainingAdapter):
        raise Refused("this site's batch system cannot drain a node")
    return batch


def save(config: Path, job: RunningJob) -> str:
    """Save a job, which goes on; return the checkpoint's id. Raises HostFault: it is not saved."""
    saved, wrong = _vmgr(config, "checkpoint", "--this-node", "--", job.job.id)
    if wrong:
        raise HostFault(f"not saved: {wrong}")
    return saved


def start_again(requeue: Callable[[str], None], job: RunningJob, saved: str) -> None:
    """Have the batch system start a job again that is saved. Raises HostFault: it runs on."""
    try:
        requeue(job.job.id)
    except VtorqueError as error:
        raise HostFault(f"saved as checkpoint {saved}, and not requeued: {error}") from None


def _vmgr(config: Path, *words: str) -> tuple[str, str]:
    """Return what a command of vmgr's prints, and what is wrong; either is empty."""
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
    """Return what such a file of root's says; empty: there is none, or it is of no use."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _file(paths: Paths) -> Path:
    return paths.state / "survive-drained.json"
