"""Save the paused guests of a job to files.

Privileges: root. Errors: HostFault if libvirt fails.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault, Paths, Refused
from vtorque_core.api.guest_driver import DetachableDriver
from vtorque_core.api.guest_plan import ROOT_DISK
from vtorque_core.live import libvirt, suspend
from vtorque_core.live.jobs import RunningGuest, RunningJob
from vtorque_core.live.locked_job import SPARE, JournalState, LockedJob
from vtorque_survive import domains

_BREAKS_OFF = 5.0  # seconds for libvirt to abort: half of what domains.abort_operation waits
_POLL = 0.1  # seconds; libvirt sends no event when it has saved a guest


@dataclass(frozen=True)
class GuestData:
    """A guest with the data that must be saved.

    Attributes:
        leased: pool name and address of each network address that the guest leases.
        disk: the guest's own disk (an overlay or a copy of its image).
    """

    guest: RunningGuest
    leased: tuple[tuple[str, str], ...]
    state_dir: Path
    disk: Path | None


@contextmanager
def hold(paths: Paths, job: RunningJob, phase: str) -> Iterator[tuple[LockedJob, list[GuestData]]]:
    """Hold the lock of a job. Yield the locked job, and its guests by index.

    Log messages go only to the job's log. Raises HostFault if the job has ended or is not in
    ``phase``, Busy if the lock is held, Refused if the job uses warm guests.
    """
    with suspend.locked(paths, job) as locked, suspend.log_to_job(paths, job, phase):
        if locked.state.phase != phase:
            raise HostFault(f"the job is ending, or is no longer in the phase {phase}")
        yield locked, _saveable(paths, job, locked.state)


def _saveable(paths: Paths, job: RunningJob, state: JournalState) -> list[GuestData]:
    if any(record.kind == SPARE for record in state.open):
        raise Refused("a job with warm guests cannot be checkpointed or migrated yet")
    disks = own_disks(state)
    return [
        GuestData(
            guest,
            tuple(
                (str(r.args["pool"]), str(r.args["item"]))
                for r in state.leases
                if r.guest == guest.index and str(r.args["pool"]).startswith("address")
            ),
            paths.job_state(job.job.key) / f"g{guest.index}",
            disks.get(guest.index),
        )
        for guest in sorted(job.guests, key=lambda guest: guest.index)
    ]


def own_disks(state: JournalState) -> dict[int | None, Path]:
    """Return the guests' own disks, by the guests' index on this node."""
    paths_of = ((r.guest, Path(str(r.args.get("path", "")))) for r in state.open)
    return {guest: path for guest, path in paths_of if path.name == ROOT_DISK}


def has_user_disk(run_dir: Path) -> bool:
    """Return True if a guest uses a disk file of the job's owner."""
    return any(_disks(run_dir))


def user_disks(run_dir: Path) -> dict[str, os.stat_result]:
    """Return the stat(2) results of the owner's disk files that a guest uses, by name.

    Call this in a child process with a deadline, because a user's file system can hang. Raises
    HostFault.
    """
    return {lock.stem: suspend.served_file(lock) for lock in _disks(run_dir)}


def _disks(run_dir: Path) -> Iterator[Path]:
    return run_dir.glob("disk-*.lock")


def has_domain(guest: RunningGuest) -> bool:
    """Return True if the guest's domain exists."""
    return libvirt.domain_runs(guest.uri, guest.uuid)


def allow_disconnect(paths: Paths, job: RunningJob, seconds: int, deadline: float) -> None:
    """Make the first guest and the job shell wait ``seconds`` when their connection breaks.

    Call this within ``helper_process`` of :mod:`vtorque_core.api.unprivileged_parser`. Raises
    HostFault if the guest does not confirm before ``deadline`` (``time.monotonic()``), Refused if
    guests of this type cannot be saved.
    """
    kind, driver = suspend.driver_of(paths, job)
    first = min(job.guests, key=lambda guest: guest.rank)
    if not isinstance(driver, DetachableDriver):
        raise Refused(f"guests of type {kind} cannot be saved")
    driver.allow_disconnect(first.run_dir, seconds, deadline)


def libvirt_operation(
    paths: Paths,
    job: RunningJob,
    guest: RunningGuest,
    seconds: float,
    failed: threading.Event,
    patience: float,
) -> AbstractContextManager[None]:
    """Reserve one of libvirtd's worker threads for a long operation on a guest.

    Until the operation ends, kill the guest's daemons if the user stops them (SIGSTOP), because
    QEMU would wait for them. After ``seconds``, kill all daemons of the guest. Raises HostFault if
    no thread is free within ``patience`` seconds, or if ``failed`` is set.
    """
    until = time.monotonic() + patience
    return suspend.worker(paths, job, guest, until, failed, seconds + _BREAKS_OFF)


def save(paths: Paths, job: RunningJob, guest: RunningGuest, file: Path, seconds: float) -> None:
    """Save a guest, which stays paused, to a file. Call this in one thread per guest.

    Does nothing if the domain no longer exists. Raises HostFault after ``seconds``.
    """
    until = time.monotonic() + seconds
    while domains.is_busy(guest.uri, guest.uuid) and time.monotonic() < until:
        time.sleep(_POLL)
    if not has_domain(guest):
        return
    with libvirt_operation(paths, job, guest, seconds, threading.Event(), seconds):
        domains.save_domain(guest.uri, guest.uuid, str(file), seconds)
