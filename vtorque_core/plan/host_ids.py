"""Host ids of guests: the uid of each QEMU, and the id of guest root in shared directories.

Each guest's QEMU runs with its own uid, leased from the site's range. A compromised QEMU thus
cannot open other guests' files, even without AppArmor or SELinux.

Guest root has one id per user, equal on all nodes. With one id for all users, a setuid program that
guest root creates in a share could access files of other users' guest root, and quotas would count
all users together.
"""

from __future__ import annotations

import contextlib
import pwd
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.config.site_config import Site

COUNT = 1000  # guests of a node at the same time
POOL = "qemu-uid"


def free_uids(site: Site) -> tuple[str, ...]:
    """Return the unused uids of the site's range, in random order, so that reuse is rare."""
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
    """Yield the claim for the uid of the guest's QEMU, if the site has a range of uids.

    Yields nothing for an aarch64 guest that boots from a disk: libvirt gives the guest's UEFI
    variables to the user in qemu.conf, so QEMU must run as this user.
    """
    if uids and (guest.image.arch == "x86_64" or guest.image.kernel is not None):
        yield PoolClaim(POOL, uids)


def guest_uid(guest: GuestPlan, site: Site) -> int:
    leased = guest.leased_items(POOL)
    if not leased:
        return hypervisor.qemu_uid(site.node.qemu_user) if site.node.qemu_user else site.owner
    uid = int(leased[0])
    require_unused(uid, f"[node] guest_uids includes {uid}")
    return uid


TABLES = (Path("/etc/subuid"), Path("/etc/subgid"))
MAX_ID = 2**32 - 2  # chown(2) treats -1 as "do not change"
_KEY = "[node] subordinate_ids"


def ranges(table: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the entries of a subuid(5) file: owner (name or uid), first id, count."""
    if not table.exists():
        return
    for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
        owner, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if first.isdecimal() and count.isdecimal():
            yield owner, int(first), int(count)


def root_id(name: str, uid: int, base: int, tables: Sequence[Path] = TABLES) -> int:
    """Return the uid and gid of root in this user's guests: ``base`` plus ``uid``.

    If ``base`` is 0, return the first id that subuid(5) and subgid(5) both assign to the user.
    """
    given = [list(ranges(table)) for table in tables]
    if base == 0:
        names = (name, str(uid))
        own = [{first for owner, first, _ in table if owner in names} for table in given]
        if both := set.intersection(*own):
            return min(both)
        files = " and ".join(map(str, tables))
        raise HostFault(
            f"{files} have no ranges of user {name} that begin with the same id: see {_KEY}"
        )
    found = base + uid
    if found > MAX_ID:
        raise HostFault(f"{_KEY} + uid {uid} is {found}: more than {MAX_ID}, the largest id")
    require_unused(found, f"{_KEY} + uid {uid} is {found}", tables)
    return found


def require_unused(found: int, setting: str, tables: Sequence[Path] = TABLES) -> None:
    """Raise HostFault if ``found`` is a user's uid or in a range of subuid(5).

    The message begins with ``setting``.
    """
    for owner, first, count in (line for table in tables for line in ranges(table)):
        if first <= found < first + count:
            raise HostFault(f"{setting}, which belongs to {owner} ({TABLES[0]})")
    with contextlib.suppress(KeyError):
        raise HostFault(f"{setting}, which is the uid of {pwd.getpwuid(found).pw_name}")
