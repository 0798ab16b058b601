"""Find, measure and pin the threads that do a guest's I/O.

These threads are the vhost workers (QEMU threads or kernel threads), and all other QEMU threads
except the vCPUs.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vtorque_core.api.vcpu_threads import (
    kernel_vhost_threads,
    own_vhost_threads,
    thread_name,
    threads,
)
from vtorque_core.live.libvirt import ask_qemu

_VCPU = re.compile(r"(CPU \d+|ALL CPUs)/")  # QEMU's names of vCPU threads
_GONE = (OSError, ValueError, IndexError)


def vhost_threads(process: Path) -> list[Path]:
    """Return the /proc directories of a QEMU's vhost workers; ``process`` is ``/proc/<pid>``."""
    return own_vhost_threads(process) + kernel_vhost_threads(process)


def thread_times(process: Path, vhost: Iterable[Path]) -> dict[str, int]:
    """Return, for each I/O thread, the nanoseconds that it has run or waited to run (schedstat).

    Waiting counts, because threads that share too few cores need more time than they get.
    """
    own = [task for task in threads(process) if not _VCPU.match(thread_name(task))]
    times = {}
    for task in (*own, *vhost):
        with contextlib.suppress(*_GONE):
            ran, waited = (task / "schedstat").read_text(encoding="ascii").split()[:2]
            times[task.name] = int(ran) + int(waited)
    return times


def load(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> float:
    """Return how many cores the threads needed between two results of :func:`thread_times`."""
    pairs = ((before.get(tid, 0), now) for tid, now in after.items())
    # A smaller value: the thread id was reused by another thread.
    return sum(now - old if now >= old else now for old, now in pairs) / 1e9 / seconds


def pin(those: Iterable[Path], cpus: Iterable[int]) -> None:
    """Pin threads to these CPUs; skip threads that have ended or cannot be moved."""
    for thread in those:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), cpus)


def transferred_bytes(uri: str, uuid: str) -> int | None:
    """Return the bytes that a guest's disks and NICs transferred; None if the guest has ended.

    Raises HostFault.
    """
    ends = (".rd.bytes", ".wr.bytes", ".rx.bytes", ".tx.bytes")

    def work(domain: Any) -> int:
        # Statistics of block devices and interfaces, without a wait for a libvirt job
        # (virDomainStatsTypes).
        found = domain.connect().domainListGetStats([domain], 1 << 5 | 1 << 4, 1 << 29)
        return sum(value for name, value in found[0][1].items() if name.endswith(ends))

    return ask_qemu(uri, uuid, "I/O of a guest", work)
