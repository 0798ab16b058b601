"""Kinds of resources that are no more than their record: a pool's item, the use of a guest."""

from __future__ import annotations

from vtorque_core.api.acquired import CoreResource
from vtorque_core.base.record import dataclass
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
    (:func:`vtorque_core.node.start.spare.take`).

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
