"""Public, for a plugin's process of the node: have a job's guests stand still, and go on. As root.

All that is changed is the guests' domains and one mark in the job's journal, its phase: who was
killed meanwhile finds there what was done, and does it again. A suspended job has its memory and no
CPU. A guest can have libvirt wait for it, so each change is made by a process of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from vtorque_core.api.children import Child
from vtorque_core.api.guest_driver import ClockDriver
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault, VtorqueError
from vtorque_core.base.locks import job_lock, lock_holder, node_lock
from vtorque_core.base.names import Paths
from vtorque_core.live.jobs import RunningGuest, RunningJob
from vtorque_core.records import log
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import RUNS, SUSPENDED, JournalState, lock_name, read
from vtorque_core.site.plugins import Plugins

_TIME = 90.0  # seconds for one change; libvirt's own limit for a call is 60
_CLOCKS = 5.0  # seconds for all guests of a job to say that they have set their clocks
_log = logging.getLogger(__name__)


def job_shell(paths: Paths, job: RunningJob) -> int | None:
    """Return the pid of the job shell on this node; None: there is none, or it cannot be found.

    It is found by its lock on ``Paths.job_shell``, a file of root's that a plugin acquires before
    the guests boot and that the job's user alone may read. Nothing but that pid is the user's word.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(paths.job_shell(job.job.key), flags)
    except OSError:
        return None
    try:
        return lock_holder(descriptor)
    finally:
        os.close(descriptor)


def is_suspended(job: RunningJob) -> bool:
    """Return whether the job's guests here stand still by :func:`suspend`."""
    return _phase(job) == SUSPENDED


def can_be_suspended(job: RunningJob) -> bool:
    """Return whether its guests are ready, and nobody starts or ends them, or they stand still."""
    return bool(job.guests) and _phase(job) in (RUNS, SUSPENDED)


def _phase(job: RunningJob) -> str:
    return job.phases[-1][0] if job.phases else ""


def begin(paths: Paths, job: RunningJob, why: str, *, still: bool) -> Child:
    """Have all guests of the job on this node stand still, at once, or go on. Twice is fine.

    Returns the process that does it, readable when it has ended; :meth:`Child.check` then, and
    its ``error``: its epilogue or prologue is at work, it has ended, libvirt's words. If one guest
    cannot be stopped none is left so. To be called without threads, and within
    :func:`vtorque_core.api.read_apart.reader`.

    Args:
        why: for the job's log.
        still: whether they are to stand still.
    """
    work = _suspend if still else _resume
    return Child(lambda: work(paths, job, why), _TIME)


def _suspend(paths: Paths, job: RunningJob, why: str) -> None:
    with _changing(paths, job, SUSPENDED) as (state, mark):
        try:
            _all(job, lambda guest: hypervisor.suspend_domain(guest.uri, guest.uuid))
        except HostFault:
            with suppress(HostFault):
                _all(job, lambda guest: hypervisor.resume_domain(guest.uri, guest.uuid))
            raise
        if not state.suspended:
            mark()
            _log.info("suspended: %s", why)


def _resume(paths: Paths, job: RunningJob, why: str) -> None:
    with _changing(paths, job, RUNS) as (state, mark):
        if state.suspended:  # first, since the CPUs are the job's again
            mark()
            _log.info("goes on: %s", why)
        _all(job, lambda guest: hypervisor.resume_domain(guest.uri, guest.uuid))
    with _logging(paths, job, RUNS):
        _set_clocks(job, state)


@contextmanager
def _changing(
    paths: Paths, job: RunningJob, phase: str
) -> Iterator[tuple[JournalState, Callable[[], None]]]:
    """Give what the journal says, and what marks the phase in it; the job's log is open."""
    path = paths.journal / f"{job.job.key}.jsonl"
    with job_lock(paths, lock_name(path), 0), _logging(paths, job, phase):
        try:
            state = read(path)
        except FileNotFoundError:
            raise HostFault("it has ended") from None
        marks = [mark.name for mark in state.phases if mark.guest is None]
        if marks[-1:] not in ([RUNS], [SUSPENDED]):
            raise HostFault("it is being ended")

        def mark() -> None:
            with node_lock(paths), Journal.open(paths, path) as journal:
                journal.phase(phase)

        yield state, mark


@contextmanager
def _logging(paths: Paths, job: RunningJob, phase: str) -> Iterator[None]:
    told = log.of_ended(paths, job.job)
    told.phase = phase
    with log.opened(told):
        yield


def _all(job: RunningJob, work: Callable[[RunningGuest], None]) -> None:
    """Do it for all guests at once. Raises HostFault."""
    with ThreadPoolExecutor(max(1, len(job.guests))) as threads:
        for done in [threads.submit(work, guest) for guest in job.guests]:
            done.result()


def _set_clocks(job: RunningJob, state: JournalState) -> None:
    """Have each guest set its clock, which has stood still, too. Best effort."""
    kind = str(job.kept.facts().get("guest_type", ""))
    try:
        plugins = Plugins.load(node=False, only=set(state.header.plugins))
        driver = plugins.guest_type(kind).driver()
    except VtorqueError as error:
        _log.warning("the guests' clocks are late: %s", error)
        return
    if not isinstance(driver, ClockDriver):
        return
    deadline = time.monotonic() + _CLOCKS
    for guest in job.guests:
        try:
            driver.set_clock(guest.run_dir, deadline)
            _log.info("its clock is set", extra={"guest": guest.index})
        except HostFault as error:
            _log.warning("its clock is late: %s", error, extra={"guest": guest.index})
