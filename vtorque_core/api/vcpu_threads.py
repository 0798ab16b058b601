"""Find the threads of a guest's QEMU in /proc. As root."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, include/linux/sched.h: no user can forge it


def threads(process: Path) -> list[Path]:
    """Return the threads of a process, as directories in /proc."""
    return _numbered(process / "task")


def thread_name(thread: Path) -> str:
    """Return the name of a thread, at most 15 bytes (proc_pid_comm(5)); empty if it has ended."""
    with contextlib.suppress(OSError):
        return (thread / "comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    return ""


def own_vhost_threads(process: Path) -> list[Path]:
    """Return the vhost workers that are threads of this QEMU process (since Linux 6.4)."""
    return [task for task in threads(process) if thread_name(task).startswith("vhost-")]


def kernel_vhost_threads(process: Path) -> list[Path]:
    """Return QEMU's vhost workers that are kernel threads (always before Linux 6.4)."""
    name = f"vhost-{process.name}"
    return [p for p in _numbered(process.parent) if thread_name(p) == name and _is_kernel_thread(p)]


def _numbered(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [directory / name for name in os.listdir(directory) if name.isdigit()]  # noqa: PTH208
    return []


def _is_kernel_thread(process: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
        return bool(int(stat.rpartition(")")[2].split()[6]) & _KERNEL_THREAD)
    return False


RUNNING = Path("/run/libvirt/qemu")
"""Directory of libvirtd's pid files (libvirt 9.0, ``virPidFileBuildPath``)."""


def process_of(name: str, uuid: str) -> Path | None:
    """Return ``/proc/<pid>`` of a guest's QEMU, None if QEMU has ended. Does not call libvirt."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError, ValueError):
        with os.fdopen(os.open(RUNNING / f"{name}.pid", flags), "rb") as file:
            process = Path("/proc", str(int(file.read(32))))
        if f"\0-uuid\0{uuid}\0".encode() in (process / "cmdline").read_bytes():
            return process
    return None  # another process may have the pid of a guest that has ended
