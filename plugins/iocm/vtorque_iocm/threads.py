"""The threads that do a guest's I/O, as /proc shows them: QEMU's own and vhost's.

All threads of QEMU but its vCPUs do I/O. A vhost worker is a thread of QEMU too since Linux 6.4,
before that (and with vhost's fork_from_owner_default=0) a kernel thread named ``vhost-<pid>``.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_VCPU = re.compile(r"(CPU \d+|ALL CPUs)/")  # QEMU's names for them; libvirt has it name threads
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, include/linux/sched.h: no user can forge it
_GONE = (OSError, ValueError, IndexError)


def vhost_threads(process: Path) -> list[Path]:
    """Return the vhost workers of a QEMU as directories of /proc, given its ``/proc/<pid>``."""
    own = [task for task in _below(process / "task") if _comm(task).startswith("vhost-")]
    name = f"vhost-{process.name}"
    return own + [p for p in _below(process.parent) if _comm(p) == name and _of_kernel(p)]


def spent(process: Path, vhost: Iterable[Path]) -> dict[str, int]:
    """Return the nanoseconds that each I/O thread has run or waited to run (schedstat).

    Waiting counts: threads that share too few cores need more than they get.
    """
    own = [task for task in _below(process / "task") if not _VCPU.match(_comm(task))]
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


def pin(threads: Iterable[Path], cpus: Iterable[int]) -> None:
    """Have threads run on these CPUs; those that have ended or cannot be moved stay."""
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), cpus)


def _below(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in directory.iterdir() if path.name.isdigit()]
    return []


def _comm(task: Path) -> str:
    with contextlib.suppress(OSError):
        return (task / "comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    return ""


def _of_kernel(process: Path) -> bool:
    with contextlib.suppress(*_GONE):
        stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
        return bool(int(stat.rpartition(")")[2].split()[6]) & _KERNEL_THREAD)
    return False
