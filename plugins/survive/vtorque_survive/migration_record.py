"""A node's record of guests that are migrating, or have migrated, to another node.

Root writes ``<state>/moves/<job key>.json`` before each step. The process that works on the
migration holds ``<job key>.lock``. The record stays until the job has ended, because the
record keeps other jobs from getting the guests' addresses.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from vtorque_core.api import (
    Busy,
    HostFault,
    Paths,
    VtorqueError,
    name_errors,
    replace_file,
    take_lock,
)
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.node_job import Site
from vtorque_core.live import service
from vtorque_core.live.jobs import RunningGuest, RunningJob
from vtorque_survive.settings import moves_directory

EITHER: Final = "either"
"""Each guest may be on either node."""
GONE: Final = "gone"
"""The destination owns the guests; their resources here must be released."""
AWAY: Final = "away"
"""The resources are released."""

ELSEWHERE: Final = "elsewhere"
"""Fact kept on a job's first node: phase and guests on nodes outside its allocation."""


@dataclass(frozen=True)
class Move:
    """A migration of a job attempt's guests.

    Attributes:
        uri: The source node's libvirt.
        nodes: The job's nodes after the migration.
        guests: Each guest's addresses by UUID, as pairs of pool name and address.
        part: Whether other guests of the job stay on the source.
    """

    job: str
    attempt: int
    key: str
    node: str
    to: str
    uri: str
    nodes: tuple[str, ...]
    guests: Mapping[str, tuple[tuple[str, str], ...]]
    part: bool = False
    phase: Literal["either", "gone", "away"] = "either"

    @classmethod
    def read(cls, paths: Paths, key: str) -> Self | None:
        """Return the record of a job attempt's migration, or None."""
        try:
            found = json.loads(_file(paths, key).read_bytes())
            guests = {
                str(uuid): tuple((str(pool), str(item)) for pool, item in leased)
                for uuid, leased in found.pop("guests").items()
            }
            return cls(nodes=tuple(found.pop("nodes")), guests=guests, **found)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise HostFault(f"{_file(paths, key)}: {error}") from None

    def write(self, paths: Paths) -> None:
        """Write the record and sync it."""
        path = _file(paths, self.key)
        with name_errors(path):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(str(path), json.dumps(asdict(self)).encode(), mode=0o600, ready=os.fsync)

    def enter_phase(self, paths: Paths, phase: Literal["either", "gone", "away"]) -> Self:
        """Enter another phase of the migration, and write the record."""
        changed = replace(self, phase=phase)
        changed.write(paths)
        return changed


def outside_nodes(job: RunningJob) -> Mapping[str, Any]:
    """Return the phase and the guests of the job on each node outside its allocation."""
    found: Mapping[str, Any] = job.kept.facts().get(ELSEWHERE, {})
    return found


def describe_guests(guests: Sequence[RunningGuest]) -> list[dict[str, Any]]:
    """Return the guests' ranks and hostnames, as sent to another node."""
    return [{"rank": each.rank, "hostname": each.hostname} for each in guests]


def all_moves(paths: Paths) -> Iterator[Move]:
    """Yield all readable migration records of this node."""
    for path in sorted(moves_directory(paths).glob("*.json")):
        with suppress(HostFault):
            if found := Move.read(paths, path.name.removesuffix(".json")):
                yield found


def forget(paths: Paths, key: str) -> None:
    """Remove a migration's record. Idempotent."""
    path = _file(paths, key)
    with name_errors(path):
        path.unlink(missing_ok=True)


@contextmanager
def lock_migration(paths: Paths, key: str, seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock on a migration.

    Raises:
        Busy: If another process holds the lock.
    """
    path = moves_directory(paths) / f"{key}.lock"
    lock = take_lock(path, seconds)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def is_locked(paths: Paths, key: str) -> bool:
    """Return whether another process holds the lock on a migration. Needs root.

    Acquires the lock for a moment. Returns False after an error: the caller then tries to resolve
    the migration, and gets the same error.
    """
    try:
        with lock_migration(paths, key):
            return False
    except HostFault as error:
        return isinstance(error, Busy)


def keep_for_return(paths: Paths, key: str) -> None:
    """Keep the resources that a guest left on this node, because the guest migrates back.

    Raises:
        Busy: If a process is releasing these resources.
    """
    with lock_migration(paths, key):
        if found := Move.read(paths, key):
            found.enter_phase(paths, AWAY)


def migrated_addresses(guests: Sequence[GuestPlan], paths: Paths) -> Iterator[PoolClaim]:
    """Yield the addresses of other jobs' migrated guests.

    The job of ``guests`` may reuse the addresses of its previous attempt.
    """
    mine = {guest.job.id for guest in guests}
    for move in all_moves(paths):
        if move.phase != EITHER and move.job not in mine:
            for leased in move.guests.values():
                yield from (PoolClaim(pool, (item,)) for pool, item in leased)


def forget_ended(site: Site) -> None:
    """Remove the records of ended jobs. The watcher does this, too.

    Records of jobs in an unknown state stay.
    """
    if away := [move for move in all_moves(site.paths) if move.phase == AWAY]:
        with suppress(VtorqueError):
            whole, batch = service.batch_system(site.path)
            lives = batch.node(whole).job_states(sorted({move.job for move in away}))
            for move in away:
                if lives.get(move.job) is JobState.GONE:
                    forget(site.paths, move.key)


def _file(paths: Paths, key: str) -> Path:
    return moves_directory(paths) / f"{key}.json"
