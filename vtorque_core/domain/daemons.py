"""The daemons that a guest's shares and its user's own disk need, as resources."""

from __future__ import annotations

from vtorque_core.api_domain import Disk, Filesystem
from vtorque_core.api_node import GuestPlan
from vtorque_core.resources import UserDisk, Virtiofsd
from vtorque_core.userdisk import DiskFile
from vtorque_core.virtiofs import Share


def share_daemon(guest: GuestPlan, element: Filesystem) -> Virtiofsd:
    """Return the daemon that serves one share of the guest to its QEMU."""
    stem = guest.run_dir / f"fs-{element.name}"
    user = guest.user
    return Virtiofsd(
        Share(
            source=element.source,
            socket=f"{stem}.sock",
            lock=f"{stem}.lock",
            log=f"{stem}.log",
            uid=user.uid,
            gid=user.gid,
            groups=tuple(gid for _, gid in user.groups),
            subordinate_id=user.subordinate_id,
            readonly=element.readonly,
            owner_check=element.user_owned,
            socket_owner=guest.qemu_uid,
        )
    )


def disk_daemon(guest: GuestPlan, element: Disk) -> UserDisk:
    """Return the daemon that opens the user's own disk as them and serves it to QEMU."""
    stem = guest.run_dir / f"disk-{element.name}"
    return UserDisk(
        DiskFile(
            source=element.path,
            socket=f"{stem}.sock",
            lock=f"{stem}.lock",
            log=f"{stem}.log",
            uid=guest.user.uid,
            gid=guest.user.gid,
            groups=tuple(gid for _, gid in guest.user.groups),
            readonly=element.readonly,
            socket_owner=guest.qemu_uid,
        )
    )
