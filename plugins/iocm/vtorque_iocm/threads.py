"""The threads that do a guest's I/O, as /proc shows them: QEMU's own and vhost's.

All threads of QEMU but its vCPUs do I/O. A vhost worker is one of them, or a kernel thread.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from vtorque_core.api.vcpu_threads import (
    kernel_vhost_threads,
    own_vhost_threads,
    thread_name,
    threads,
)

_VCPU = re.compile(r"(CPU \d+|ALL CPUs)/")  # QEMU's names for them; libvirt has it name threads
_GONE = (OSError, ValueError, IndexError)


def vhost_threads(process: Path) -> list[Path]:
    """Return the vhost workers of a QEMU as directories of /proc, given its ``/proc/<pid>``."""
    return own_vhost_threads(process) + kernel_vhost_threads(process)


def spent(process: Path, vhost: Iterable[Path]) -> dict[str, int]:
    """Return the nanoseconds that each I/O thread has run or waited to run (schedstat).

    Waiting counts: threads that share too few cores need more than they get.
    """
    own = [task for task in threads(process) if not _VCPU.match(thread_name(task))]
    times = {}
    for task in (*own, *vhost):
        with contextlib.suppress(*_GONE):
            ran, waited = (task / "schedstat").read_text(encoding="ascii").split()[:2]
            times[task.name] = int(ran) + int(waited)
    return times


def load(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> float:
    """Return the cores that the threads needed between two answers of :func:`spent`."""
    pairs = ((before.get(tid, 0), now) for tid, now in after.items())
    # Less than before: another thread with the number of one that has ended.
    return sum(now - old if now >= old else now for old, now in pairs) / 1e9 / seconds


def pin(those: Iterable[Path], cpus: Iterable[int]) -> None:
    """Have threads run on these CPUs; those that have ended or cannot be moved stay."""
    for thread in those:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), cpus)
