"""A place for checkpoints that all nodes see: who goes on with which, whose the addresses are.

Nodes do not talk to each other. What they know of one another stands in that place: an address
stays its checkpoint's as long as that is there, and a file says which job goes on with a guest.
Whether that job is over the batch system knows.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from vtorque_core.api import (
    HostFault,
    JobAttempt,
    Refused,
    dataclass,
    hookimpl,
    replace_file,
    take_lock,
)
from vtorque_core.api.acquired import Resource, unjournalled
from vtorque_core.api.batch_system import Life
from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.node_job import Site
from vtorque_core.live import service
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Manifest, Store

# Those of one machine (proc(5), filesystems). Of any other kind others may be able to read it.
_OWN = {
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "xfs",
    "zfs",
}  # fmt: skip
_OVER, _LOOK = 60.0, 1.0  # seconds for a job elsewhere to end, and between two questions for it
_LOCK = 10.0  # seconds for another job of the user's that looks who has a guest


def require_not_shared(settings: Settings) -> None:
    """Raise Refused if checkpoints would lie in the clear where others may see them."""
    kind = file_system(Path(settings.checkpoints))
    if kind not in _OWN and not settings.checkpoints_shared:
        raise Refused(
            f"the place for checkpoints is on a file system of the kind {kind}, which other hosts "
            "may read, and memory would lie there in the clear: the site has to name another "
            "([plugin.survive] checkpoints), or accept it (checkpoints_shared = true)"
        )


def file_system(path: Path, mounts: str | None = None) -> str:
    """Return the kind of a directory's file system, by mountinfo of proc(5). Raises HostFault."""
    try:
        real = path.resolve(strict=True)
        text = Path("/proc/self/mountinfo").read_text("utf-8") if mounts is None else mounts
    except OSError as error:
        raise HostFault(f"{path}: {error.strerror}") from None
    kinds = {}
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields.split()[4])
        kinds[point] = rest.split()[0]
    return next(kinds[str(each)] for each in (real, *real.parents) if str(each) in kinds)


@dataclass(frozen=True)
class Held(Resource):
    """The file that says which job goes on with the guests of a checkpoint, and where.

    ``over``: jobs that the batch system does not know any more.
    """

    kind = "survive-held"
    volatile = False
    path: str
    job: str
    key: str
    node: str
    over: tuple[str, ...] = unjournalled(())

    def create(self) -> None:
        """Write it. Raises HostFault: another job has them."""
        lock = take_lock(Path(self.path).with_name(".lock"), _LOCK)
        try:
            found = _read(Path(self.path))
            if found and found["job"] not in (self.job, *self.over):
                raise in_use(f"job {found['job']} goes on with it, on node {found['node']}")
            replace_file(self.path, json.dumps(self._said()).encode(), mode=0o600, ready=os.fsync)
        except OSError as error:
            raise HostFault(f"cannot write {self.path}: {error.strerror}") from None
        finally:
            os.close(lock)

    def release(self) -> None:
        """Remove it, if it is this job's still; missing is fine."""
        try:
            if _read(Path(self.path)) == self._said():
                Path(self.path).unlink(missing_ok=True)
        except OSError as error:
            raise HostFault(f"cannot remove {self.path}: {error.strerror}") from None

    def _said(self) -> dict[str, str]:
        return {"job": self.job, "key": self.key, "node": self.node}


def held(store: Store, found: Manifest, job: JobAttempt, site: Site) -> Held:
    """Return what says that a job goes on with a checkpoint. Raises HostFault: another does.

    Or the job that was saved has not ended. Its own node knows that without the batch system.
    """
    path = store.directory / f".{found.guests[0].uuid}.held"
    others = [(found.job, found.node)]
    if has := _read(path):
        others.append((has["job"], has["node"]))
    for other, node in others:
        if other != job.id and node != job.node:
            _await_over(found, other, node, site)
    return Held(str(path), job.id, job.key, job.node, tuple(other for other, _ in others))


def _await_over(found: Manifest, job_id: str, node: str, site: Site) -> None:
    """Wait until the batch system has no such job any more; it tells nobody. Raises HostFault."""
    config, batch = service.batch_system(site.path)
    until = time.monotonic() + _OVER
    while batch.node(config).alive([job_id])[job_id] is not Life.GONE:
        if time.monotonic() >= until:
            raise in_use(f"checkpoint {found.id}: its guests are those of job {job_id} on {node}")
        time.sleep(_LOOK)


def in_use(text: str) -> HostFault:
    """Return a fault that is not the node's."""
    fault = HostFault(text)
    fault.blames_node = False
    return fault


@hookimpl
def vtorque_away(guests: Sequence[GuestPlan], site: Site) -> Iterator[PoolClaim]:
    """Yield the addresses of checkpoints, but those that these guests go on with.

    Raises HostFault: the place is not there, and nobody knows which they are.
    """
    settings = site[Settings]
    if not (settings.checkpoints and settings.checkpoints_shared):
        return
    mine = {lease for guest in guests if guest.saved for lease in guest.saved.leased}
    top = Path(settings.checkpoints)
    try:
        users = [int(path.name) for path in top.iterdir() if path.name.isdecimal()]
    except OSError as error:
        raise HostFault(f"{top}, which all nodes are to see: {error.strerror}") from None
    for uid in users:
        for found in Store(top, uid).all():
            for guest in found.guests:
                yield from (PoolClaim(at[0], at[1:]) for at in guest.leased if at not in mine)


def _read(path: Path) -> dict[str, str]:
    """Return what such a file says; empty: there is none, or it is of no use."""
    with suppress(FileNotFoundError, ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and all(isinstance(found.get(k), str) for k in ("job", "node")):
            return found
    return {}
