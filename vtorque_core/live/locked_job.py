"""Public, for a plugin's processes of the node: hold a job's lock, and read and mark its journal.

While a process holds a job's lock, no other process starts, changes or releases the job.

Privileges: root, on the node.
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
"""Seconds to wait for a job's lock.

A prologue or an epilogue may hold it for minutes, so callers retry later or report Busy.
"""


@dataclass(frozen=True)
class LockedJob:
    """A job whose lock this process holds. ``state``: its journal when the lock was acquired."""

    paths: Paths
    state: JournalState

    @property
    def domains(self) -> dict[str, bool]:
        """The UUID of each domain that the job has had here, and whether it was created."""
        records = self.state.records.values()
        return {str(r.args["uuid"]): r.created for r in records if r.kind == DOMAIN}

    def enter(self, phase: str) -> bool:
        """Record a phase of the job; return False if the job was in it already.

        Takes the node's lock, because the ledger reads from the phase whether a job's cores are in
        use. Raises HostFault.
        """
        with node_lock(self.paths), Journal.open(self.paths, self.state.path) as journal:
            if read(self.state.path).phase == phase:
                return False
            journal.phase(phase)
        return True


def journal_of(paths: Paths, key: str) -> JournalState | None:
    """Return what the journal of a job attempt says now; None if nothing of it is here.

    Raises JournalError.
    """
    return read_if_any(paths.journal / f"{key}.jsonl")


@contextmanager
def locked_job(paths: Paths, key: str) -> Iterator[LockedJob | None]:
    """Hold a job's lock; yield None if nothing of the attempt ``key`` is here.

    A process that holds the lock may acquire it again. Not for threads.

    Raises Busy if another process holds the lock for ``WAIT`` seconds, JournalError.
    """
    with job_lock(paths, lock_name(paths.journal / f"{key}.jsonl"), WAIT):
        state = journal_of(paths, key)
        yield LockedJob(paths, state) if state else None
