"""Kernel counters of a QEMU process: CPU time by kind of thread, memory, page faults.

The files in /proc stay open and are read directly, because psutil takes six times as long. An open
file in /proc belongs to its thread, and never shows another thread with the same id. Privileges:
root.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api.vcpu_threads import (
    kernel_vhost_threads,
    own_vhost_threads,
    thread_name,
    threads,
)

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GONE = (OSError, ValueError, IndexError)
LOOK_AGAIN = 15  # number of samplings after which threads are searched again


@dataclass(frozen=True)
class ProcessUsage:
    """CPU seconds and page faults (``minor``, ``major``) of a QEMU process, and memory in bytes.

    ``process`` is the CPU time without that of iothreads and vhost threads.
    """

    process: float
    iothreads: float
    vhost: float
    rss: int
    minor: int
    major: int


class QemuProcess:
    """A QEMU process whose counters this process reads.

    ``directory`` is ``/proc/PID`` of the QEMU process. The files with the counters stay open.
    """

    def __init__(self, directory: Path) -> None:
        """Open the files in /proc. Raises OSError if the QEMU process has ended."""
        self._directory = directory
        self._stat = _open(directory / "stat")
        self._threads: dict[str, int] = {}  # path of a thread to its schedstat
        self._kinds: dict[str, str] = {}
        self._ended = {"io": 0.0, "vhost": 0.0, "own vhost": 0.0}
        self._last: dict[str, float] = {}
        self._looks = 0

    def close(self) -> None:
        """Close all files."""
        for descriptor in (self._stat, *self._threads.values()):
            os.close(descriptor)
        self._threads.clear()
        self._stat = -1

    def usage(self) -> ProcessUsage:
        """Return the current usage. Raises OSError if the QEMU process has ended."""
        if self._looks % LOOK_AGAIN == 0:
            self._add_threads()
        self._looks += 1
        spent = {"io": 0.0, "vhost": 0.0, "own vhost": 0.0}
        for path, descriptor in list(self._threads.items()):
            try:
                self._last[path] = int(os.pread(descriptor, 64, 0).split()[0]) / 1e9
            except _GONE:  # keep the thread's time, because counters never decrease
                os.close(self._threads.pop(path))
                self._ended[self._kinds[path]] += self._last.pop(path, 0.0)
                continue
            spent[self._kinds[path]] += self._last[path]
        spent = {kind: spent[kind] + self._ended[kind] for kind in spent}
        fields = os.pread(self._stat, 1024, 0).rpartition(b")")[2].split()
        return ProcessUsage(  # proc_pid_stat(5): fields[0] is the third
            process=(int(fields[11]) + int(fields[12])) / _TICK
            - spent["io"] - spent["own vhost"],
            iothreads=spent["io"],
            vhost=spent["vhost"] + spent["own vhost"],
            rss=int(fields[21]) * _PAGE,
            minor=int(fields[7]),
            major=int(fields[9]),
        )  # fmt: skip

    def _add_threads(self) -> None:
        for task in threads(self._directory):
            if thread_name(task).startswith("IO iothread"):
                self._add(task, "io")
        for task in own_vhost_threads(self._directory):
            self._add(task, "own vhost")
        if self._looks <= LOOK_AGAIN:  # kernel threads exist from the start, and /proc is large
            for task in kernel_vhost_threads(self._directory):
                self._add(task, "vhost")

    def _add(self, task: Path, kind: str) -> None:
        path = str(task)
        if path not in self._threads:
            with contextlib.suppress(OSError):
                self._threads[path] = _open(task / "schedstat")
                self._kinds[path] = kind


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
