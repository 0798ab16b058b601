"""Kinds of resources that say what a job uses: a pool's item, a warm guest, an image's version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api.acquired import CoreResource
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.images import store
from vtorque_core.records.reading import SPARE


@dataclass(frozen=True)
class Lease(CoreResource):
    """An item of a pool, the job's as long as the record is open: there is nothing to do.

    Made by :mod:`vtorque_core.plan.placement.ledger` alone, which says what each of its pools
    records.

    Args:
        mib: amount of memory; ``node``: on this NUMA node, -1: not known; ``page_kib``: in huge
            pages of this size, 0: ordinary.
        use: of a core: ``vcpu``, ``io``, ``emulator`` or ``idle``. ``least`` and ``most``: between
            what its number may change.
        cpus: a list as in cpuset(7).
        amount: of a pool that is divided by amount, in its own unit; 0: a pool of items.
    """

    kind = "lease"
    pool: str
    item: str
    mib: int = 0
    use: str = ""
    node: int = -1
    page_kib: int = 0
    least: int = 0
    most: int = 0
    cpus: str = ""
    amount: int = 0

    def create(self) -> None:
        """Do nothing: the record is the lease."""

    def release(self) -> None:
        """Do nothing: the record's end is the lease's end."""


@dataclass(frozen=True)
class SpareUse(CoreResource):
    """A spare guest is the job's from this record on; its end is the end of all that it had.

    Written under the node's lock, so that no two jobs take one
    (:func:`vtorque_core.node.start.spare.with_offers`).

    Args:
        key: of the spare guest's journal, which the teardown of this one then tears down.
    """

    kind = SPARE
    blocking = True
    volatile = False  # after a reboot the spare guest's journal is still to go
    key: str

    def create(self) -> None:
        """Do nothing: the record is the use."""

    def release(self) -> None:
        """Do nothing: :mod:`vtorque_core.node.end.teardown` tears the spare guest down."""


_WAIT = 20.0  # seconds for a change of the pool to end


@dataclass(frozen=True)
class ImageUse(CoreResource):
    """The use of one version of an image: it stays on disk as long as a record names it.

    Node-wide: the release by its last job removes a version that no name has any more.

    Args:
        path: the version's directory, in the pool or in the node's cache.
    """

    kind = store.KIND
    scope = "node"
    volatile = False
    path: str

    def create(self) -> None:
        """Look whether it is still there, now that the journal names it. Raises HostFault.

        Who removes a version looks at the journals under the pool's lock: either they see the
        record and leave it, or this sees that it is gone.
        """
        version = Path(self.path)
        pool = version.parent.parent
        with (
            safefs.naming(f"image {self.path}"),
            store.locked(pool, shared=True, wait=_WAIT),
        ):
            there = version.is_dir()
        if not there:
            raise HostFault(f"image {self.path} was removed while the job was being started")

    def release(self) -> None:
        """Remove the version if no name has it and the time for which it was kept is over."""
        store.collect_version(Path(self.path))
