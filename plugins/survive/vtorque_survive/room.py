"""Check limits and reserve disk space for a checkpoint. Runs as root.

Callers hold :meth:`Store.hold_lock`, because other jobs also reserve space.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from vtorque_core.api import HostFault, Refused, show_mib
from vtorque_survive.saving import GuestData
from vtorque_survive.settings import Settings
from vtorque_survive.stored import RESERVED, Store, disk_usage

_OVERHEAD = 64  # MiB in a guest's file besides its memory
_MIB = 1 << 20


def require_few(store: Store, job_id: str, settings: Settings) -> None:
    """Raise Refused if too many of the user's jobs have checkpoints.

    The limit exists because a checkpoint keeps its guests' network addresses.
    """
    of = {each.job for each in store.manifests()} | {job_id}
    if settings.max_checkpointed_jobs and len(of) > settings.max_checkpointed_jobs:
        raise Refused(
            f"{len(of) - 1} jobs of yours already have checkpoints, and the limit is "
            f"{settings.max_checkpointed_jobs} ([plugin.survive] max_checkpointed_jobs). Remove "
            "some with vmgr checkpoints remove"
        )


def require_room(store: Store, part: Path, guests: list[GuestData], settings: Settings) -> None:
    """Reserve disk space for the checkpoint, so that concurrent checkpoints cannot use it.

    Raises:
        Refused: If the user's quota is too small.
        HostFault: If the disk has too little free space.
    """
    if (reserved := _reserve_file(part, guests)).exists():
        return
    need = _required_bytes(guests)
    had, _ = disk_usage(part)
    used = store.used_bytes() - had
    if settings.checkpoint_quota and used + need > settings.checkpoint_quota * _MIB:
        raise Refused(
            f"the checkpoint needs up to {show_mib(need // _MIB)}, but {show_mib(used // _MIB)} "
            f"of your quota of {show_mib(settings.checkpoint_quota)} are in use "
            "([plugin.survive] checkpoint_quota). Remove some with vmgr checkpoints remove"
        )
    free = shutil.disk_usage(part).free + had - store.reserved_bytes()
    if need > free:
        raise HostFault(
            f"the checkpoint needs up to {show_mib(need // _MIB)} in {store.top}, which has "
            f"{show_mib(free // _MIB)} free"
        )
    with reserved.open("wb") as file:
        file.truncate(need)


def _reserve_file(part: Path, guests: list[GuestData]) -> Path:
    return part / f"{RESERVED}{guests[0].guest.rank}"


def _required_bytes(guests: list[GuestData]) -> int:
    need = sum((each.guest.ram_mib + _OVERHEAD) * _MIB for each in guests)
    return need + sum(each.disk.stat().st_blocks * 512 for each in guests if each.disk is not None)


def require_no_more(part: Path) -> None:
    """Raise Refused if the checkpoint is larger than its reserved disk space."""
    had, reserved = disk_usage(part)
    if had > reserved:
        most = show_mib(reserved // _MIB)
        raise Refused(
            f"the checkpoint uses {show_mib(had // _MIB)}, but only {most} were reserved for it"
        )
