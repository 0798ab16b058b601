"""The core's resource kinds that plugins may acquire; released even with every plugin gone."""

from __future__ import annotations

from pathlib import Path

from vtorque_core.api_node import GuestPlan
from vtorque_core.api_options import FS_TYPE
from vtorque_core.resources import File, Mount, Process, Setting, Shm, Tree

__all__ = ["File", "Mount", "Process", "Setting", "Shm", "Tree", "ramdisk_dir", "root_disk"]


def ramdisk_dir(guest: GuestPlan) -> Path | None:
    """Return where the guest's own tmpfs is mounted, with fs_type=ramdisk."""
    return guest.run_dir / "ram" if guest[FS_TYPE] == "ramdisk" else None


def root_disk(guest: GuestPlan) -> Path:
    """Return the qcow2 file that the guest writes to: on disk, or in memory with fs_type=ramdisk.

    A layer over the image's disk, or with ``[images] ramdisk = "copy"`` a disk that stands alone.
    """
    return (ramdisk_dir(guest) or guest.state_dir) / "root.qcow2"
