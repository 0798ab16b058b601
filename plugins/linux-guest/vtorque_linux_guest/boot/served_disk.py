"""Check the qemu-storage-daemon that serves a user's disk (``disk=``) to QEMU.

Runs as root before the boot.
"""

from __future__ import annotations

import os
from pathlib import Path

from vtorque_core.api import HostFault, Refused
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.vm_options import DISK
from vtorque_core.live.suspend import holder_of


def require_one_file(guest: GuestPlan) -> None:
    """Refuse a guest if the qemu-storage-daemon of its ``disk`` has opened more than one file.

    Code in a guest that shares the disk's directory can change a checked qcow2 header before the
    daemon opens the disk. The header could then name any file of the user as data file, and a
    guest could write to that file. Does not access the user's file systems, which can hang. Raises
    Refused, HostFault.
    """
    lock = guest.run_dir / "disk-data.lock"
    if not lock.exists():  # only the first guest has the disk
        return
    try:
        opened = {_target(each) for each in Path(f"/proc/{holder_of(lock)}/fd").iterdir()}
    except OSError as error:
        raise HostFault(f"cannot check the process that serves {guest[DISK]}: {error}") from None
    if len({each for each in opened if _is_file(each, lock)}) != 1:
        why = "was changed during the start, so that it refers to another file"
        raise Refused(why, key=DISK.key, value=guest[DISK])


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # closed meanwhile
        return ""


def _is_file(target: str, lock: Path) -> bool:
    own = (os.path.realpath(lock), os.devnull, "/memfd:vtorque-daemon-log (deleted)")
    return target.startswith("/") and target not in own
