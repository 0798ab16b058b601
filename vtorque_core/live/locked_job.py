"""Lock a job, read its journal and record its phase.

While a process holds a job's lock, no other process starts, changes or releases the job.

Privileges: root.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vtorque_core.base.locks import job_lock, node_lock
from vtorque_core.base.names import Paths
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import DOMAIN, JournalState, lock_name, read, read_if_any

WAIT = 2.0
"""Seconds to wait for a job's lock, which a prologue or an epilogue may hold for minutes."""


@dataclass(frozen=True)
class LockedJob:
    """A job whose lock this process holds. ``state`` is the journal when it was acquired."""

    paths: Paths
    state: JournalState

    @property
    def domains(self) -> dict[str, bool]:
        """UUID of each domain that the job has had on this node, and whether it was created."""
        records = self.state.records.values()
        return {str(r.args["uuid"]): r.created for r in records if r.kind == DOMAIN}

    def enter(self, phase: str) -> bool:
        """Record a phase of the job. Return False if it is the current one already.

        Acquires the node's lock. Raises HostFault if that fails, or writing the journal.
        """
        with node_lock(self.paths), Journal.open(self.paths, self.state.path) as journal:
            if read(self.state.path).phase == phase:
                return False
            journal.phase(phase)
        return True


def journal_of(paths: Paths, key: str) -> JournalState | None:
    """Return the journal of a job attempt, or None if this node has none. Raises JournalError."""
    return read_if_any(paths.journal / f"{key}.jsonl")


@contextmanager
def locked_job(paths: Paths, key: str) -> Iterator[LockedJob | None]:
    """Hold the lock of a job attempt. Yield None if this node has no journal of it.

    A process that holds the lock may acquire it again. Not for threads. Raises Busy if another
    process holds it for ``WAIT`` seconds, JournalError.
    """
    with job_lock(paths, lock_name(paths.journal / f"{key}.jsonl"), WAIT):
        state = journal_of(paths, key)
        yield LockedJob(paths, state) if state else None
