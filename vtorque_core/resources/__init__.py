"""The core's resource kinds: released with every plugin gone."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.resources.files import (
    CoreResource,
    DiskCopy,
    File,
    Mount,
    Overlay,
    Setting,
    Shm,
    Tree,
)
from vtorque_core.resources.image import ImageUse
from vtorque_core.resources.netfilter import Netfilter
from vtorque_core.resources.pci import Vfio
from vtorque_core.resources.process import Domain, Process, Starter, UserDisk, Virtiofsd

__all__ = [
    "CORE_KINDS",
    "CoreResource",
    "DiskCopy",
    "Domain",
    "File",
    "ImageUse",
    "Lease",
    "Mount",
    "Netfilter",
    "Overlay",
    "Process",
    "Setting",
    "Shm",
    "Starter",
    "Tree",
    "UserDisk",
    "Vfio",
    "Virtiofsd",
]


@dataclass(frozen=True)
class Lease(CoreResource):
    """An item of a pool, the job's as long as the record is open: there is nothing to do.

    Made by :mod:`vtorque_core.ledger` alone, which says what each of its pools records.

    Args:
        mib: amount of memory; ``node``: on this NUMA node, -1: not known; ``page_kib``: in huge
            pages of this size, 0: ordinary.
        use: of a core: ``vcpu``, ``io``, ``emulator`` or ``idle``. ``least`` and ``most``: between
            what its number may change.
        cpus: a list as in cpuset(7).
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
        DiskCopy,
        ImageUse,
        Domain,
        Process,
        Starter,
        Virtiofsd,
        UserDisk,
        Mount,
        Netfilter,
        Vfio,
        Setting,
        Shm,
        Lease,
    )
}
