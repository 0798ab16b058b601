"""Which uid a guest's QEMU runs as: its own while it is there, one of a range of the site's.

A QEMU that its guest has broken out of then opens nothing of another guest's, also on nodes without
a security module (AppArmor, SELinux). The uid is leased before anything is made for it, and is
free for others when all of the job has been released.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.base import hypervisor
from vtorque_core.plan import subordinate_ids
from vtorque_core.site.config import Site

COUNT = 1000  # guests of a node at the same time
POOL = "qemu-uid"
"""The pool that the uids are leased from."""


def free(site: Site) -> tuple[str, ...]:
    """Return the uids of the site's range that no process has, in any order; none: it has none.

    Else the next guest would mostly get what the last one had.
    """
    first = site.node.guest_uids
    if not first:
        return ()
    busy, uids = set(), list(range(first, first + COUNT))
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            busy.add(process.stat().st_uid)
    random.shuffle(uids)
    return tuple(str(uid) for uid in uids if uid not in busy)


def claims(guest: GuestPlan, uids: tuple[str, ...]) -> Iterator[PoolClaim]:
    """Yield the claim for the guest's uid, if the site has any.

    An aarch64 guest that boots a disk has none: libvirt makes the file of its UEFI variables for
    the user that qemu.conf names. On x86 there is no such file.
    """
    if uids and (guest.image.arch == "x86_64" or guest.image.kernel is not None):
        yield PoolClaim(POOL, uids)


def of_guest(guest: GuestPlan, site: Site) -> int:
    """Return what QEMU runs as for a placed guest. Raises HostFault: it is somebody's."""
    leased = guest.leased(POOL)
    if not leased:
        return hypervisor.qemu_uid(site.node.qemu_user) if site.node.qemu_user else site.owner
    uid = int(leased[0])
    subordinate_ids.require_nobodys(uid, f"a uid of [node] guest_uids is {uid}")
    return uid
