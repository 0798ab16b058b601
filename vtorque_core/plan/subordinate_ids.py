"""Host ids of guest root in shared directories: one per user, equal on all nodes.

With a common id, root in one user's guest could create a setuid program that accesses root's files
in other users' guests, and quotas would count all users together.
"""

from __future__ import annotations

import contextlib
import pwd
from collections.abc import Iterator, Sequence
from pathlib import Path

from vtorque_core.base.errors import HostFault

TABLES = (Path("/etc/subuid"), Path("/etc/subgid"))
MAX_ID = 2**32 - 2  # chown(2) treats -1 as "do not change"
_KEY = "[node] subordinate_ids"


def ranges(table: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the lines of a table: owner (name or uid), first id, count."""
    if not table.exists():
        return
    for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
        owner, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if first.isdecimal() and count.isdecimal():
            yield owner, int(first), int(count)


def root_id(name: str, uid: int, base: int, tables: Sequence[Path] = TABLES) -> int:
    """Return the uid and gid of root in this user's guests: ``base`` plus the uid.

    If ``base`` is 0, it is the first id that subuid(5) and subgid(5) both assign to the user.
    """
    given = [list(ranges(table)) for table in tables]
    if base == 0:
        names = (name, str(uid))
        own = [{first for owner, first, _ in table if owner in names} for table in given]
        if both := set.intersection(*own):
            return min(both)
        where = " and ".join(map(str, tables))
        raise HostFault(f"{where} have no range for {name} with the same first id ({_KEY} = 0)")
    found = base + uid
    if found > MAX_ID:
        raise HostFault(f"{_KEY} + uid {uid} is {found}: more than {MAX_ID}, the largest id")
    require_unused(found, f"{_KEY} + uid {uid} is {found}", tables)
    return found


def require_unused(found: int, said: str, tables: Sequence[Path] = TABLES) -> None:
    """Raise HostFault, with the prefix ``said``, if the id belongs to a user or table entry."""
    for owner, first, count in (line for table in tables for line in ranges(table)):
        if first <= found < first + count:
            raise HostFault(f"{said}, which belongs to {owner} ({TABLES[0]})")
    with contextlib.suppress(KeyError):
        raise HostFault(f"{said}, which is the uid of {pwd.getpwuid(found).pw_name}")
