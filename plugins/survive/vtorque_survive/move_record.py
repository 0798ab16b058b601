"""What a node knows of a job's guests that go to another one, or have gone. Root's files.

``<state>/moves/<job key>.json``, written before anything is done, and beside it a lock: who holds
it is at work on that move. It stays until its job has ended: guests have taken their addresses
along, and they are nobody else's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from vtorque_core.api import Busy, HostFault, Paths, VtorqueError, replace_file, take_lock
from vtorque_core.api.batch_system import Life
from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.node_job import Site
from vtorque_core.live import service
from vtorque_core.live.jobs import RunningGuest, RunningJob

EITHER: Final = "either"
"""Each may be on either node."""
GONE: Final = "gone"
"""They are the other one's; what they had here is to be released."""
AWAY: Final = "away"
"""All of it is."""

ELSEWHERE: Final = "elsewhere"
"""What is kept of a job on its first node: phase and guests on nodes that are not the job's."""


@dataclass(frozen=True)
class Move:
    """Guests of an attempt of a job, at libvirt's ``uri``, and where they go.

    ``nodes``: where the job's guests are with that; ``guests``: UUID to addresses, (pool, item).
    ``part``: others of the job have not gone, and stay.
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
        """Return that of an attempt of a job; None: there is none. Raises HostFault."""
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
        """Have it be on disk. Raises HostFault."""
        path = _file(paths, self.key)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(str(path), json.dumps(asdict(self)).encode(), mode=0o600, ready=os.fsync)
        except OSError as error:
            raise HostFault(f"{path}: {error.strerror}") from None

    def now(self, paths: Paths, phase: Literal["either", "gone", "away"]) -> Self:
        """Have it be in another phase. Raises HostFault."""
        changed = replace(self, phase=phase)
        changed.write(paths)
        return changed


def elsewhere(job: RunningJob) -> Mapping[str, Any]:
    """Return what this node knows of guests of a job that have come to nodes which it has not."""
    found: Mapping[str, Any] = job.kept.facts().get(ELSEWHERE, {})
    return found


def told(guests: Sequence[RunningGuest]) -> list[dict[str, Any]]:
    """Return what another node is told of guests: the rank and hostname of each."""
    return [{"rank": each.rank, "hostname": each.hostname} for each in guests]


def all_moves(paths: Paths) -> Iterator[Move]:
    """Yield all that this node knows of; one that cannot be read is left out."""
    for path in sorted(_file(paths, "").parent.glob("*.json")):
        with suppress(HostFault):
            if found := Move.read(paths, path.name.removesuffix(".json")):
                yield found


def forget(paths: Paths, key: str) -> None:
    """Know nothing of it any more; twice is fine. Raises HostFault."""
    path = _file(paths, key)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise HostFault(f"{path}: {error.strerror}") from None


@contextmanager
def at_work(paths: Paths, key: str, seconds: float = 0.0) -> Iterator[None]:
    """Be the one who works on the move. Raises Busy: another is."""
    path = paths.state / "moves" / f"{key}.lock"
    lock = take_lock(path, seconds)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def is_at_work(paths: Paths, key: str) -> bool:
    """Return whether somebody works on the move. As root, by having its lock for a moment.

    False also if that cannot be found out: who then settles the move says why.
    """
    try:
        with at_work(paths, key):
            return False
    except HostFault as error:
        return isinstance(error, Busy)


def comes_back(paths: Paths, key: str) -> None:
    """Have nothing be released here after a move away: that guest is to come back.

    Its addresses stay its own meanwhile. Raises Busy: what it had here is just being released.
    """
    with at_work(paths, key):
        if found := Move.read(paths, key):
            found.now(paths, AWAY)


def taken_along(guests: Sequence[GuestPlan], paths: Paths) -> Iterator[PoolClaim]:
    """Yield the addresses of guests that have gone, but those of these guests, which come back.

    And of their job's, which starts again: what has gone is of an attempt that is over.
    """
    mine = {guest.job.id for guest in guests}
    for move in all_moves(paths):
        if move.phase != EITHER and move.job not in mine:
            for leased in move.guests.values():
                yield from (PoolClaim(pool, (item,)) for pool, item in leased)


def forget_ended(site: Site) -> None:
    """Know nothing any more of guests whose job has ended: no watcher need be there that does so.

    What the batch system does not say is kept.
    """
    if away := [move for move in all_moves(site.paths) if move.phase == AWAY]:
        with suppress(VtorqueError):
            whole, batch = service.batch_system(site.path)
            lives = batch.node(whole).alive(sorted({move.job for move in away}))
            for move in away:
                if lives.get(move.job) is Life.GONE:
                    forget(site.paths, move.key)


def _file(paths: Paths, key: str) -> Path:
    return paths.state / "moves" / f"{key}.json"
