"""A kind of what is acquired: an item of a pool."""

from __future__ import annotations

from vtorque_core.api.acquired import CoreResource
from vtorque_core.base.record import dataclass


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
