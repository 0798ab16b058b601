"""Public, for a plugin's process of the node: save a job's guests to files. As root.

A guest is saved while it stands still (:mod:`vtorque_core.live.suspend`). How it goes on as a guest
of another job: :class:`vtorque_core.api.guest_plan.SavedGuest`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api.guest_driver import LeavableDriver
from vtorque_core.api.guest_plan import ROOT_DISK
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.base.locks import libvirt_worker
from vtorque_core.base.names import Paths
from vtorque_core.live import suspend
from vtorque_core.live.jobs import RunningGuest, RunningJob
from vtorque_core.live.locked_job import LockedJob
from vtorque_core.records.reading import SPARE, JournalState
from vtorque_core.resources import stopped_daemons
from vtorque_core.resources.user_disk import served
from vtorque_core.resources.virtiofs_daemon import VIRTIOFSD as VIRTIOFSD

_BREAKS_OFF = 5.0  # seconds for libvirt to do so: half of what hypervisor.give_up waits for it
_LOOK = 0.1  # seconds; that libvirt has saved a guest is no event


@dataclass(frozen=True)
class Saveable:
    """What has to be saved of a guest. ``leased``: (pool, item) of what it needs again.

    ``disk``: its own disk, a layer over its image's or a copy of that; None: it has none.
    """

    guest: RunningGuest
    leased: tuple[tuple[str, str], ...]
    state_dir: Path
    disk: Path | None


@contextmanager
def held(paths: Paths, job: RunningJob, phase: str) -> Iterator[tuple[LockedJob, list[Saveable]]]:
    """Hold the lock of a job that is in ``phase``; yield it and the job's guests, in order.

    Messages go to the job's log alone. Raises HostFault if the job ends or is in another phase,
    Busy, Refused.
    """
    with suspend.locked(paths, job) as locked, suspend.logged(paths, job, phase):
        if locked.state.phase != phase:
            raise HostFault("it is being ended, or goes on")
        yield locked, _saveable(paths, job, locked.state)


def _saveable(paths: Paths, job: RunningJob, state: JournalState) -> list[Saveable]:
    if any(record.kind == SPARE for record in state.open):
        raise Refused("a job with guests that were booted before it cannot be saved or moved yet")
    disks = own_disks(state)
    return [
        Saveable(
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
    """Return the own disk of each guest that has one, by its index on its node."""
    paths_of = ((r.guest, Path(str(r.args.get("path", "")))) for r in state.open)
    return {guest: path for guest, path in paths_of if path.name == ROOT_DISK}


def has_user_disk(run_dir: Path) -> bool:
    """Return whether a guest has a disk file of its user's. As root."""
    return any(_disks(run_dir))


def user_disks(run_dir: Path) -> Mapping[str, os.stat_result]:
    """Return what stat(2) says of the disk files of its user's that a guest has, by name.

    As root, in a child with a deadline: a file system that hangs is waited for. Raises HostFault:
    what serves one has ended, or its file system lets root not look.
    """
    return {lock.stem: served(lock) for lock in _disks(run_dir)}


def _disks(run_dir: Path) -> Iterator[Path]:
    return run_dir.glob("disk-*.lock")


def runs(guest: RunningGuest) -> bool:
    """Return whether its domain is there. Raises HostFault."""
    return hypervisor.domain_runs(guest.uri, guest.uuid)


def break_off(guest: RunningGuest) -> None:
    """Have libvirt save a guest, or send it to another node, no further; it may be done already."""
    hypervisor.give_up(guest.uri, guest.uuid)


def end(guest: RunningGuest, seconds: float) -> None:
    """End a guest that is saved. Gone is fine. Raises HostFault."""
    hypervisor.destroy_domain(guest.uri, guest.uuid, seconds)


def expect_break(paths: Paths, job: RunningJob, seconds: int, deadline: float) -> None:
    """Have the script's guest and the job shell wait for each other, see LeavableDriver. They run.

    Raises HostFault. To be called within :func:`vtorque_core.api.read_apart.reader`.
    """
    kind, driver = suspend.driver_of(paths, job)
    first = min(job.guests, key=lambda guest: guest.rank)
    if not isinstance(driver, LeavableDriver):
        raise Refused(f"guests of type {kind} cannot be saved")
    driver.expect_break(first.run_dir, seconds, deadline)


@contextmanager
def of_libvirt(
    paths: Paths,
    job: RunningJob,
    guest: RunningGuest,
    seconds: float,
    failed: threading.Event,
    patience: float,
) -> Iterator[None]:
    """Have a worker of libvirt's for so long (s); end daemons that the user stops meanwhile.

    And all of the guest's if libvirt cannot even break off then what it does. ``patience``: seconds
    for the worker, or until another guest of the job has ``failed``.
    """
    locks, until = stopped_daemons.locks_of(guest.run_dir), time.monotonic() + patience
    with (
        libvirt_worker(paths, job.job.uid, until, failed),
        stopped_daemons.ended(locks, seconds + _BREAKS_OFF),
    ):
        yield


def save(paths: Paths, job: RunningJob, guest: RunningGuest, file: Path, seconds: float) -> None:
    """Save a guest that stands still to a file; it stands still further. Raises HostFault.

    By a thread for each guest of the job. What libvirt does for a caller that was killed goes on:
    that is waited for.
    """
    until = time.monotonic() + seconds
    while hypervisor.is_busy(guest.uri, guest.uuid) and time.monotonic() < until:
        time.sleep(_LOOK)
    if not runs(guest):
        return
    with of_libvirt(paths, job, guest, seconds, threading.Event(), seconds):
        hypervisor.save_domain(guest.uri, guest.uuid, str(file), seconds)
