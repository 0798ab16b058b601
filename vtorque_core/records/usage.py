"""What a guest has used so far: CPU time and greatest memory of its QEMU process. As root."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from vtorque_core.api_batch import Usage

RUNNING = Path("/run/libvirt/qemu")
"""Where libvirtd keeps the process id of each guest (libvirt 9.0, ``virPidFileBuildPath``)."""


def of_guest(name: str, uuid: str) -> Usage | None:
    """Return what the guest has used; None if its QEMU is gone. Asks no daemon."""
    process = process_of(name, uuid)
    if process is None:
        return None
    try:
        after_name = (process / "stat").read_text(encoding="utf-8", errors="replace")
        fields = after_name.rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # utime, stime: proc_pid_stat(5)
        status = (process / "status").read_text(encoding="utf-8", errors="replace")
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return Usage(ticks / os.sysconf("SC_CLK_TCK"), int(peak.split()[1]) >> 10)
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def process_of(name: str, uuid: str) -> Path | None:
    """Return ``/proc/<pid>`` of the guest's QEMU; None if it is gone. Asks no daemon."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(RUNNING / f"{name}.pid", flags)
        with os.fdopen(descriptor, "rb") as file:
            process = Path("/proc", str(int(file.read(32))))
        if f"\0-uuid\0{uuid}\0".encode() in (process / "cmdline").read_bytes():
            return process
    except (OSError, ValueError):
        pass
    return None  # perhaps another process has the number of a guest that has ended


def total(parts: Iterable[Usage | None]) -> Usage | None:
    """Return the sum; None of nothing."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return Usage(sum(p.cpu_seconds for p in known), sum(p.peak_mib for p in known))
