"""The node's I/O manager: gives guests more or fewer I/O cores, as their load is. Root.

The node-wide resource ``iocm-manager`` starts this process after the first IOcm job's boot and ends
it with the last. It keeps nothing that matters: who has which cores stands in the journals, where
interrupts went in a file. So it may be killed at any time: the next IOcm job starts it again, and
it begins by pinning every guest to what the journals say.

It waits for two things: a change of a journal, which says which guests there are, and, while there
are any, the time of the next look at their load.
"""

import contextlib
import logging
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vtorque_core.api import HostFault, Paths
from vtorque_core.api.vcpu_threads import process_of
from vtorque_core.live import changes, cores
from vtorque_core.live.cores import GuestCores
from vtorque_core.live.node_process import begin
from vtorque_iocm import irqs, threads
from vtorque_iocm.wanted_cores import Rule, State, decide

log = logging.getLogger("iocm")


@dataclass
class Watched:
    """A guest, the rule's state of it, and the last look at its threads.

    ``guest.cores`` is what the journal says that it has, ``state.cores`` how many it had when the
    rule last looked: if they differ, somebody else has changed them. ``pinned``: its threads run
    on these cores, as far as we know: not before we have seen to it, nor after a fault.
    """

    guest: GuestCores
    state: State
    pinned: bool = False
    vhost: Sequence[Path] = ()
    at: float = 0.0
    spent: Mapping[str, int] = field(default_factory=dict)
    moved: int | None = None
    said: str = ""

    def say(self, text: str) -> None:
        """Log what is news of this guest."""
        if text != self.said:
            log.info("%s guest %d: %s", self.guest.job, self.guest.guest, text)
        self.said = text

    def load(self, process: Path) -> float | None:
        """Return the cores that its I/O has needed since the last look; None: not known yet.

        QEMU can be busy with other things too: while no byte moves, that is no load.
        """
        now, spent, moved = time.monotonic(), threads.spent(process, self.vhost), None
        with contextlib.suppress(HostFault):
            moved = cores.moved_bytes(self.guest.uri, self.guest.uuid)
        before, had, seconds = self.spent, self.moved, now - self.at
        self.spent, self.moved, self.at = spent, moved, now
        if not before:
            return None
        return 0.0 if moved is not None and moved == had else threads.load(before, spent, seconds)

    def tick(self, paths: Paths, busy: float) -> None:
        """Look at the load, and change the cores if the rule says so. Raises as ``resize``."""
        guest, process = self.guest, process_of(self.guest.name, self.guest.uuid)
        if process is None:
            return
        if not self.pinned or self.state.cores != len(guest.cores):
            self.state, self.pinned = State(self.resize(paths, process, len(guest.cores))), True
            self.say(f"cores {guest.cores}, {guest.least} to {guest.most}")
        load = self.load(process)
        if load is None or not guest.most:
            return
        rule = Rule(guest.least, guest.most, busy)
        after = decide(self.state, load, rule)
        if after.cores != self.state.cores:
            got = self.resize(paths, process, after.cores)
            after = after if got == after.cores else State(got, pause=rule.down)
            self.say(f"load {load:.2f}: cores {guest.cores} -> {self.guest.cores}")
        self.state = after

    def resize(self, paths: Paths, process: Path, count: int) -> int:
        """Have the core lease and pin so many cores, pin vhost too; return how many it got.

        vhost's threads are looked for anew: another may have the number of one since the last time.
        The count that it has already pins anew. Raises as ``live.cores.resize``.
        """
        guest = self.guest
        if guest.most:  # a short wait: a job's prologue and epilogue have its lock for long
            now = cores.resize(paths, guest.job, guest.guest, "io", count, wait=0.1)
            self.guest = replace(guest, cores=now.cores)
        self.vhost = threads.vhost_threads(process)
        threads.pin(self.vhost, self.guest.cores)
        return len(self.guest.cores)


@dataclass
class Loop:
    """All guests of the node with I/O cores. Nothing that is wrong with one of them ends it."""

    paths: Paths
    interval: float
    busy: float
    watched: dict[tuple[str, int], Watched] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()

    def look(self) -> None:
        """Read from the journals which guests there are."""
        try:
            found = {(g.job, g.guest): g for g in cores.guests_with(self.paths, "io")}
        except Exception:
            log.exception("journals")
            return
        for key in self.watched.keys() - found.keys():
            self.watched.pop(key).say("gone")
        for key, guest in found.items():
            each = self.watched.setdefault(key, Watched(guest, State(len(guest.cores))))
            each.guest = guest

    def tick(self) -> None:
        """Look at each guest, then have interrupts and this process follow: no vCPU is there."""
        for each in self.watched.values():
            try:
                each.tick(self.paths, self.busy)
            except Exception as error:
                each.pinned = False
                each.say(f"{type(error).__name__}: {error}")
        cpus = tuple(sorted({cpu for each in self.watched.values() for cpu in each.guest.cores}))
        if cpus and cpus != self.cpus:
            self.cpus = cpus
            threads.pin([Path("/proc/0")], cpus)  # 0: this one, sched_setaffinity(2)
            irqs.direct(irqs.memo(self.paths), cpus)

    def serve(self) -> None:
        """Manage until killed."""
        events = changes.events()
        changes.watch(events, self.paths.journal)
        self.look()
        while True:
            with contextlib.suppress(BlockingIOError):
                os.read(events, 65536)
                self.look()
            self.tick()
            if self.watched:
                time.sleep(self.interval)
            else:
                select.select([events], [], [])


def main() -> None:
    """Run with the arguments of ``node.Manager.of``: seconds between looks, and a load (Rule)."""
    paths, (interval, busy) = begin("iocm")
    Loop(paths, float(interval), float(busy)).serve()


if __name__ == "__main__":
    main()
