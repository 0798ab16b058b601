"""Reserve checkpoints, and their guests' network addresses, in a directory that all nodes mount.

A checkpoint keeps the network addresses of its guests while it exists. A file beside the checkpoint
names the job that uses the checkpoint (:class:`UseMark`). Until that job has ended, no other job
can use the checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from vtorque_core.api import (
    HostFault,
    InUse,
    JobAttempt,
    Refused,
    name_errors,
    replace_file,
)
from vtorque_core.api.batch_system import JobState, MigrationAdapter
from vtorque_core.api.children import Child, wait_readable
from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.node_job import Site
from vtorque_core.live import service
from vtorque_core.live.placement import job_leases
from vtorque_survive.resources import UseMark, in_use_fault, lock_file, read_mark
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Manifest, Store

# File systems of one machine (proc(5), filesystems). Other hosts may be able to read all others.
_OWN = {
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "xfs",
    "zfs",
}  # fmt: skip
SEEN = ".vtorque-checkpoints"
"""A marker file in the shared directory. It is missing if the directory is not mounted."""

_OVER, _POLL = 60.0, 5.0  # seconds for another node's job to end; between polls
_READ = 30.0  # seconds to read the addresses of all checkpoints
_GATE = 0.1  # seconds; other nodes send no events


def require_private(settings: Settings) -> None:
    """Raise Refused if other hosts may read checkpoints, and ``checkpoints_shared`` is false."""
    kind = file_system(Path(settings.checkpoints))
    if kind not in _OWN and not settings.checkpoints_shared:
        raise Refused(
            f"the checkpoints' directory is on a file system of type {kind}. Other hosts that "
            "mount it may read the guests' memory in plain text. Set another directory "
            "([plugin.survive] checkpoints), or accept that (checkpoints_shared = true)"
        )
    if settings.checkpoints_shared:
        require_mounted(Path(settings.checkpoints))


def require_mounted(top: Path) -> None:
    """Raise HostFault unless the shared directory is mounted."""
    try:
        (top / SEEN).stat(follow_symlinks=False)
    except OSError as error:
        raise HostFault(
            f"{top / SEEN}: {error.strerror}: either the checkpoints' directory is not mounted "
            "on this node, or this file is missing (create it once, as root, with touch)"
        ) from None


def is_shared_by_nodes(site: Site) -> bool:
    """Return whether any node can restore a checkpoint, not only the node that saved it.

    Return False if the batch system cannot report whether a job on another node has ended.
    """
    return site[Settings].checkpoints_shared and service.batch_system(site.path)[1].knows_all_nodes


def file_system(path: Path, mounts: str | None = None) -> str:
    """Return the type of a directory's file system, from proc(5) mountinfo."""
    with name_errors(path):
        real = path.resolve(strict=True)
        text = Path("/proc/self/mountinfo").read_text("utf-8") if mounts is None else mounts
    kinds = {}
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields.split()[4])
        kinds[point] = rest.split()[0]
    return next(kinds[str(each)] for each in (real, *real.parents) if str(each) in kinds)


class Gate:
    """A barrier: guests of a restored multi-node job resume when all of them are restored.

    Each node records in its :class:`UseMark` file that its guests are ready. A node that times out
    removes this record. A lock ensures that either all guests resume, or none.
    """

    def __init__(
        self, store: Store, found: Manifest, nodes: Sequence[str], job: JobAttempt, site: Site
    ) -> None:
        self._files = {
            node: str(_mark_of(store, found.node_part(index))) for index, node in enumerate(nodes)
        }
        self._job, self._mine, self._id = job, self._files[job.node], found.id
        self._config = site.path
        self._missing = len(found.guests) // found.nodes
        self._lock = threading.Lock()

    def __call__(self, until: float, failed: threading.Event) -> None:
        """Wait until all other guests are restored. Runs in one thread per guest on this node.

        Raises:
            HostFault: If another guest on this node has failed.
            InUse: If another node is late or has failed, or the job has ended.
        """
        with self._lock:
            self._missing -= 1
            if not self._missing:
                with lock_file(self._mine, "write"):
                    self._write(ready=True)
        seen: set[str] = set()
        asks = time.monotonic() + _POLL
        while self._missing_nodes(seen) or self._recheck_missing():
            if failed.wait(_GATE):
                raise HostFault("another guest of the job has failed")
            if time.monotonic() >= until and (missing := self._end_timeout()):
                raise InUse(
                    f"the job's guests on {', '.join(missing)} did not become ready in time"
                )
            if time.monotonic() >= asks:
                self._require_active()
                asks = time.monotonic() + _POLL

    def _require_active(self) -> None:
        config, batch = service.batch_system(self._config)
        adapter, over = batch.node(config), False
        with suppress(HostFault):  # the batch system does not answer now
            if isinstance(adapter, MigrationAdapter):
                over = adapter.has_ended(self._job.id, self._job.attempt)
        if over:
            raise InUse("the job has ended or is being restarted by the batch system")

    def _missing_nodes(self, seen: set[str]) -> list[str]:
        """Return the nodes whose guests are not ready.

        Add to ``seen`` the nodes that have begun to start this job attempt.

        Raises:
            InUse: If the start has failed on a node in ``seen``, or if another node restores a
                different checkpoint. In both cases, the batch system may start the job again.
        """
        said = {node: read_mark(Path(file)) for node, file in self._files.items()}
        ours = {node for node, each in said.items() if each.get("key") == self._job.key}
        for node in ours:
            if (other := said[node].get("checkpoint")) != self._id:
                raise InUse(
                    f"the job has different checkpoints: {self._id} on this node, {other} on {node}"
                )
        if gone := seen - ours:
            raise InUse(f"the job's start on {', '.join(sorted(gone))} has failed")
        seen |= ours
        return [node for node in said if node not in ours or not said[node].get("ready")]

    def _recheck_missing(self) -> list[str]:
        """Return the nodes whose guests are not ready, read under the lock.

        Without the lock, another node could time out while this node reads the records.
        """
        with lock_file(self._mine, "read"):
            return self._missing_nodes(set())

    def _end_timeout(self) -> list[str]:
        with lock_file(self._mine, "read"):
            missing = self._missing_nodes(set())
            if missing:
                self._write(ready=False)
        return missing

    def _write(self, *, ready: bool) -> None:
        said = json.dumps({**read_mark(Path(self._mine)), "ready": ready})
        replace_file(self._mine, said.encode(), mode=0o600)


def acquire_mark(store: Store, found: Manifest, job: JobAttempt, site: Site) -> UseMark:
    """Wait until no other job uses the checkpoint, then return the job's :class:`UseMark`.

    Asks the batch system only about jobs on other nodes. For a job on this node, the journals show
    whether it has ended.

    Raises:
        HostFault: If another job still uses the checkpoint.
    """
    path = _mark_of(store, found)
    others = [(found.job, found.node)]
    if has := read_mark(path):
        others.append((has["job"], has["node"]))
    for other, node in others:
        if other != job.id and node != job.node:
            _await_job_end(found, other, node, site)
    over = tuple(other for other, _ in others)
    leased = tuple(each for guest in found.guests for each in guest.leased)
    return UseMark(str(path), job.id, job.key, job.node, found.id, over, leased)


def _mark_of(store: Store, found: Manifest) -> Path:
    return store.directory / f".{found.guests[0].uuid}.held"


def _await_job_end(found: Manifest, job_id: str, node: str, site: Site) -> None:
    """Poll the batch system, which sends no events, until it no longer knows the job."""
    config, batch = service.batch_system(site.path)
    until = time.monotonic() + _OVER
    while batch.node(config).job_states([job_id])[job_id] is not JobState.GONE:
        if time.monotonic() >= until:
            raise in_use_fault(f"checkpoint {found.id} is in use by job {job_id} on {node}")
        time.sleep(_POLL)


def reserved_addresses(guests: Sequence[GuestPlan], site: Site) -> Iterator[PoolClaim]:
    """Yield the network addresses in all checkpoints and in this node's leases.

    The addresses of ``guests`` are not included, because a restored guest keeps its addresses.

    Raises:
        HostFault: If the checkpoint directory is missing or hangs.
    """
    if not (site[Settings].checkpoints and is_shared_by_nodes(site)):
        return
    leases = [lease for job in job_leases(site.paths) for _, lease in job.leases]
    taken = {(lease.pool, lease.item) for lease in leases}
    taken |= _read_addresses(Path(site[Settings].checkpoints), _READ)
    known = [guest.source.identity for guest in guests]
    mine = {lease for each in known if each is not None for lease in each.leased}
    for pool, item in taken - mine:
        if pool.startswith("address"):
            yield PoolClaim(pool, (item,))


def _read_addresses(top: Path, seconds: float) -> set[tuple[str, str]]:
    """Return pairs of address pool and address: the addresses of guests in all checkpoints.

    A child process reads the checkpoints, because reading may hang.
    """
    answer, told = os.pipe()
    said, until = b"", time.monotonic() + seconds
    with os.fdopen(answer, "rb", buffering=0) as reads:
        with os.fdopen(told, "wb") as writes:
            child = Child(lambda: _write_addresses(top, writes), seconds)
        while (left := until - time.monotonic()) > 0 and wait_readable([answer], left):
            if not (part := reads.read(1 << 16)):
                break
            said += part
    if problem := child.wait():
        raise in_use_fault(
            f"the checkpoints' directory {top}, which all nodes share: {problem}",
            stage="checkpoints' directory",
        )
    pairs = (line.split(" ") for line in said.decode().splitlines())
    return {(pool, item) for pool, item in pairs}


def _write_addresses(top: Path, to: BinaryIO) -> None:
    require_mounted(top)
    for path in top.iterdir():
        for pool, item in _user_addresses(path) if path.name.isdecimal() else ():
            to.write(f"{pool} {item}\n".encode())
    to.flush()


def _user_addresses(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield pairs of address pool and address from a user's checkpoints and UseMark files."""
    for found in Store(directory.parent, int(directory.name)).manifests():
        for guest in found.guests:
            yield from guest.leased
    for path in directory.glob(".*.held"):
        yield from map(tuple, read_mark(path).get("leased", ()))
