"""What a guest has used so far: CPU time and greatest memory of its QEMU process. As root."""

from __future__ import annotations

import os
from collections.abc import Iterable

from vtorque_core.api.batch_system import Usage
from vtorque_core.api.vcpu_threads import process_of


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


def total(parts: Iterable[Usage | None]) -> Usage | None:
    """Return the sum; None of nothing."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return Usage(sum(p.cpu_seconds for p in known), sum(p.peak_mib for p in known))
