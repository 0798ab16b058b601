"""Run each guest's QEMU with its own uid, leased from the site's range.

A guest that breaks out of QEMU then cannot open files of other guests, even without AppArmor or
SELinux.
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


def free_uids(site: Site) -> tuple[str, ...]:
    """Return the unused uids of the site's range, in random order to avoid reuse."""
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
    """Yield the claim for the guest's uid, if the site has a range.

    Omits aarch64 guests that boot a disk: libvirt creates their UEFI variables for the user in
    qemu.conf.
    """
    if uids and (guest.image.arch == "x86_64" or guest.image.kernel is not None):
        yield PoolClaim(POOL, uids)


def guest_uid(guest: GuestPlan, site: Site) -> int:
    leased = guest.leased_items(POOL)
    if not leased:
        return hypervisor.qemu_uid(site.node.qemu_user) if site.node.qemu_user else site.owner
    uid = int(leased[0])
    subordinate_ids.require_unused(uid, f"[node] guest_uids includes {uid}")
    return uid
