"""Disk files of the job's owner that a guest uses (``-vm disk=``). As root."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from vtorque_core.resources.user_disk import served


def has_user_disk(run_dir: Path) -> bool:
    """Return True if the guest with this run directory uses a disk file of the job's owner."""
    return any(_disks(run_dir))


def user_disks(run_dir: Path) -> Mapping[str, os.stat_result]:
    """Return the stat(2) results of the owner's disk files that a guest uses, by name.

    Call it in a child with a deadline, because a user's file system can hang. Raises HostFault.
    """
    return {lock.stem: served(lock) for lock in _disks(run_dir)}


def _disks(run_dir: Path) -> Iterator[Path]:
    return run_dir.glob("disk-*.lock")
