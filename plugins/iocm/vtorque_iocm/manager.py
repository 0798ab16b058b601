"""The node's I/O manager: adjust each guest's number of I/O cores to its load.

The resource ``iocm-manager`` starts this process after the first IOcm job (``-vm iocm=true``) has
booted and ends it with the last IOcm job. The process may be killed at any time, because its state
is in the job journals and in the file of original IRQ affinities. The next IOcm job then starts a
new process, which pins the vhost threads of all guests.

The manager waits for journal changes. While guests run, it also measures their load once per
interval.

Privileges: root, on the node.
"""

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vtorque_core.api import HostFault, Paths
from vtorque_core.api.children import wait_readable
from vtorque_core.api.vcpu_threads import process_of
from vtorque_core.live import changes, cores
from vtorque_core.live.cores import GuestCores
from vtorque_core.live.node_process import initialize
from vtorque_iocm import irqs, threads
from vtorque_iocm.wanted_cores import CoresRule, CoresState, decide

log = logging.getLogger("iocm")


@dataclass
class WatchedGuest:
    """A guest with I/O cores, its state for :func:`decide`, and the last measurement of its load.

    ``guest.cores`` are the I/O cores in the journal. ``state.cores`` is the number of I/O cores at
    the last decision. If the numbers differ, another process has changed the journal. ``pinned`` is
    true after the vhost threads were pinned to ``guest.cores``.
    """

    guest: GuestCores
    state: CoresState
    pinned: bool = False
    vhost: Sequence[Path] = ()
    at: float = 0.0
    spent: Mapping[str, int] = field(default_factory=dict)
    moved: int | None = None
    said: str = ""

    def log(self, text: str) -> None:
        """Log a message about this guest, unless it repeats the last message."""
        if text != self.said:
            log.info("%s guest %d: %s", self.guest.job, self.guest.guest, text)
        self.said = text

    def load(self, process: Path) -> float | None:
        """Return the I/O load since the last call, in cores; None on the first call.

        The load is 0 if no bytes were transferred: QEMU's threads then did other work.
        """
        now, spent, moved = time.monotonic(), threads.thread_times(process, self.vhost), None
        with contextlib.suppress(HostFault):
            moved = threads.transferred_bytes(self.guest.uri, self.guest.uuid)
        before, had, seconds = self.spent, self.moved, now - self.at
        self.spent, self.moved, self.at = spent, moved, now
        if not before:
            return None
        return 0.0 if moved is not None and moved == had else threads.load(before, spent, seconds)

    def tick(self, paths: Paths, busy: float) -> None:
        """Measure the load once, and change the number of cores if :func:`decide` requires it.

        Raises the exceptions of :meth:`resize`.
        """
        guest, process = self.guest, process_of(self.guest.name, self.guest.uuid)
        if process is None:
            return
        if not self.pinned or self.state.cores != len(guest.cores):
            self.state, self.pinned = (
                CoresState(self.resize(paths, process, len(guest.cores))),
                True,
            )
            self.log(f"cores {guest.cores}, {guest.least} to {guest.most}")
        load = self.load(process)
        if load is None or not guest.most:
            return
        rule = CoresRule(guest.least, guest.most, busy)
        after = decide(self.state, load, rule)
        if after.cores != self.state.cores:
            got = self.resize(paths, process, after.cores)
            after = after if got == after.cores else CoresState(got, pause=rule.down)
            self.log(f"load {load:.2f}: cores {guest.cores} -> {self.guest.cores}")
        self.state = after

    def resize(self, paths: Paths, process: Path, count: int) -> int:
        """Lease ``count`` I/O cores, and pin the vhost threads to them. Return the number leased.

        The vhost threads are listed again on each call, because thread ids are reused. With an
        unchanged ``count``, only the pinning is repeated. Raises the exceptions of
        ``live.cores.resize``.
        """
        guest = self.guest
        if guest.most:  # a short wait, because a prologue or epilogue holds the lock for long
            now = cores.resize(paths, guest.job, guest.guest, "io", count, wait=0.1)
            self.guest = replace(guest, cores=now.cores)
        self.vhost = threads.vhost_threads(process)
        threads.pin(self.vhost, self.guest.cores)
        return len(self.guest.cores)


@dataclass
class ManagerLoop:
    """The manager's loop over all guests of the node with I/O cores.

    An error of one guest does not affect the others.
    """

    paths: Paths
    interval: float
    busy: float
    watched: dict[tuple[str, int], WatchedGuest] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()

    def poll(self) -> None:
        """Update the list of guests from the journals."""
        try:
            found = {(g.job, g.guest): g for g in cores.guests_with_cores(self.paths, "io")}
        except Exception:
            log.exception("journals")
            return
        for key in self.watched.keys() - found.keys():
            self.watched.pop(key).log("gone")
        for key, guest in found.items():
            each = self.watched.setdefault(key, WatchedGuest(guest, CoresState(len(guest.cores))))
            each.guest = guest

    def tick(self) -> None:
        """Adjust each guest's number of I/O cores, and the affinity of interrupts and this process.

        This process and the interrupts of the configured network interfaces run on the I/O cores of
        all guests.
        """
        for each in self.watched.values():
            try:
                each.tick(self.paths, self.busy)
            except Exception as error:
                each.pinned = False
                each.log(f"{type(error).__name__}: {error}")
        cpus = tuple(sorted({cpu for each in self.watched.values() for cpu in each.guest.cores}))
        if cpus and cpus != self.cpus:
            self.cpus = cpus
            threads.pin([Path("/proc/0")], cpus)  # 0: this process, sched_setaffinity(2)
            irqs.direct(irqs.memo(self.paths), cpus)

    def serve(self) -> None:
        """Manage the guests until the process is killed."""
        events = changes.events()
        changes.watch(events, self.paths.journal)
        self.poll()
        while True:
            with contextlib.suppress(BlockingIOError):
                os.read(events, 65536)
                self.poll()
            self.tick()
            if self.watched:
                time.sleep(self.interval)
            else:
                wait_readable([events])


def main() -> None:
    """Run the manager. Arguments: interval in seconds, busy threshold (0 to 1)."""
    paths, (interval, busy) = initialize("iocm")
    ManagerLoop(paths, float(interval), float(busy)).serve()


if __name__ == "__main__":
    main()
