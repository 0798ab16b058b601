"""The core's resource kinds: released with every plugin gone."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.resources.files import CoreResource, File, Mount, Overlay, Setting, Shm, Tree
from vtorque_core.resources.netfilter import Netfilter
from vtorque_core.resources.process import Domain, Process, UserDisk, Virtiofsd

__all__ = [
    "CORE_KINDS",
    "CoreResource",
    "Domain",
    "File",
    "Lease",
    "Mount",
    "Netfilter",
    "Overlay",
    "Process",
    "Setting",
    "Shm",
    "Tree",
    "UserDisk",
    "Virtiofsd",
]


@dataclass(frozen=True)
class Lease(CoreResource):
    """An item of a pool, the job's as long as the record is open: there is nothing to do.

    ``mib`` is the amount for the pool ``memory``. Made by :mod:`vtorque_core.ledger` alone.
    """

    kind = "lease"
    pool: str
    item: str
    mib: int = 0

    def create(self) -> None:
        """Do nothing: the record is the lease."""

    def release(self) -> None:
        """Do nothing: the record's end is the lease's end."""


CORE_KINDS: dict[str, type[CoreResource]] = {
    kind.kind: kind
    for kind in (
        File,
        Tree,
        Overlay,
        Domain,
        Process,
        Virtiofsd,
        UserDisk,
        Mount,
        Netfilter,
        Setting,
        Shm,
        Lease,
    )
}
