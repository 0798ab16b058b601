"""Lock a job, read its journal and record its phase.

While a process holds a job's lock, no other process starts, changes or releases the job.

Privileges: root.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vtorque_core.base import hypervisor
from vtorque_core.base.locks import job_lock, node_lock
from vtorque_core.base.names import Paths
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import ARRIVES as ARRIVES
from vtorque_core.records.reading import DOMAIN as DOMAIN
from vtorque_core.records.reading import SPARE as SPARE
from vtorque_core.records.reading import JournalState as JournalState
from vtorque_core.records.reading import Record, lock_name, read, try_read
from vtorque_core.resources import netfilter
from vtorque_core.resources.netfilter import Netfilter

WAIT = 2.0
"""Seconds to wait for a job's lock, which a prologue or an epilogue may hold for minutes."""


@dataclass(frozen=True)
class LockedJob:
    """A job whose lock this process holds. ``state``: journal when the lock was acquired."""

    paths: Paths
    state: JournalState

    @property
    def domains(self) -> dict[str, bool]:
        """Domains in the journal, by UUID. The value is True if the domain was created."""
        records = self.state.records.values()
        return {str(r.args["uuid"]): r.created for r in records if r.kind == DOMAIN}

    def enter(self, phase: str) -> bool:
        """Record a phase of the job. Return False if it is already the current phase.

        Acquires the node's lock. Raises HostFault if the lock is held or the journal is unwritable.
        """
        with node_lock(self.paths), Journal.open(self.paths, self.state.path) as journal:
            if read(self.state.path).phase == phase:
                return False
            journal.phase(phase)
        return True

    def release_domains(self, uuids: Collection[str]) -> None:
        """Destroy the domains of guests that have left this node, and journal the release."""
        with Journal.open(self.paths, self.state.path) as journal:
            for record in self._domains(uuids):
                hypervisor.destroy_domain(str(record.args["uri"]), str(record.args["uuid"]))
                journal.released(record.seq)

    def complete_arrival(self, uuids: Collection[str]) -> None:
        """Complete the start of guests that have migrated to this node. Idempotent."""
        came = self._domains(uuids)
        guests = {record.guest for record in came}
        for record in self.state.open:
            if record.kind == Netfilter.kind and record.guest in guests:
                netfilter.filter_tap(str(record.args["tap"]))
        with Journal.open(self.paths, self.state.path) as journal:
            for record in came:
                if not record.created:
                    journal.created(record.seq)

    def _domains(self, uuids: Collection[str]) -> list[Record]:
        return [r for r in self.state.open if r.kind == DOMAIN and r.args["uuid"] in uuids]


def journal_of(paths: Paths, key: str) -> JournalState | None:
    """Return the journal of a job attempt, or None if this node has none. Raises JournalError."""
    return try_read(paths.journal / f"{key}.jsonl")


@contextmanager
def locked_job(paths: Paths, key: str) -> Iterator[LockedJob | None]:
    """Hold the lock of a job. Yield None if this node has no journal of the attempt ``key``.

    A process that holds the lock may acquire it again. Not thread-safe. Raises JournalError, and
    Busy if another process holds the lock for ``WAIT`` seconds.
    """
    with job_lock(paths, lock_name(paths.journal / f"{key}.jsonl"), WAIT):
        state = journal_of(paths, key)
        yield LockedJob(paths, state) if state else None
