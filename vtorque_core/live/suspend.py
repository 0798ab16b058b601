"""Public, for a plugin's process of the node: have a job's guests stand still, and go on. As root.

All that is changed is the guests' domains and one mark in the job's journal, its phase: who was
killed meanwhile finds there what was done, and does it again. The guests of a job that is paused or
suspended stand still and keep their memory. The CPUs of one that is suspended are free: only the
batch system can say so. A guest can have libvirt wait for it, so each change is made by a process
of its own.
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
from vtorque_core.records import log, reading, timeline
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JournalState, lock_name, read
from vtorque_core.site.plugins import Plugins

_TIME = 90.0  # seconds for one change; libvirt's own limit for a call is 60
_CLOCKS = 5.0  # seconds for all guests of a job to say that they have set their clocks

RUNS, PAUSED, SUSPENDED = "run", "paused", reading.SUSPENDED
"""Phases of a job whose script has begun."""

_PHASES = frozenset({RUNS, PAUSED, SUSPENDED})
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


def phase(job: RunningJob) -> str:
    """Return ``RUNS``, ``PAUSED`` or ``SUSPENDED``; empty: its guests start, or end."""
    last = job.phases[-1][0] if job.phases and job.guests else ""
    return last if last in _PHASES else ""


def stands_still(job: RunningJob) -> bool:
    """Return whether the job's guests here stand still by :func:`begin`."""
    return phase(job) in (PAUSED, SUSPENDED)


def begin(paths: Paths, job: RunningJob, to: str, why: str) -> Child:
    """Have the job come into a phase on this node, all its guests at once. Twice is fine.

    Returns the process that does it, readable when it has ended; :meth:`Child.check` then, and
    its ``error``: its epilogue or prologue is at work, it has ended, libvirt's words. If one guest
    cannot be stopped none is left so. To be called without threads, and within
    :func:`vtorque_core.api.read_apart.reader`.

    ``why``: for the job's log.
    """
    work = _resume if to == RUNS else _suspend
    return Child(lambda: work(paths, job, to, why), _TIME)


def _suspend(paths: Paths, job: RunningJob, to: str, why: str) -> None:
    with _changing(paths, job, to) as (_, mark):
        try:
            _all(job, lambda guest: hypervisor.suspend_domain(guest.uri, guest.uuid))
        except HostFault:
            with suppress(HostFault):
                _all(job, lambda guest: hypervisor.resume_domain(guest.uri, guest.uuid))
            raise
        if mark():
            _log.info("%s: %s", to, why)


def _resume(paths: Paths, job: RunningJob, to: str, why: str) -> None:
    with _changing(paths, job, to) as (state, mark):
        if mark():  # first, since the CPUs are the job's again
            _log.info("goes on: %s", why)
        _all(job, lambda guest: hypervisor.resume_domain(guest.uri, guest.uuid))
    with _logging(paths, job, to):
        _set_clocks(job, state)


@contextmanager
def _changing(
    paths: Paths, job: RunningJob, to: str
) -> Iterator[tuple[JournalState, Callable[[], bool]]]:
    """Give what the journal says, and what marks the phase in it unless it has that already.

    The job's log is open.
    """
    path = paths.journal / f"{job.job.key}.jsonl"
    with job_lock(paths, lock_name(path), 0), _logging(paths, job, to):
        try:
            state = read(path)
        except FileNotFoundError:
            raise HostFault("it has ended") from None
        last = [mark.name for mark in state.phases if mark.guest is None][-1:]
        if not _PHASES.issuperset(last):
            raise HostFault("it is being ended")

        def mark() -> bool:
            if last == [to]:
                return False
            with node_lock(paths), Journal.open(paths, path) as journal:
                journal.phase(to)
            timeline.keep_start(paths, read(path))
            return True

        yield state, mark


@contextmanager
def _logging(paths: Paths, job: RunningJob, to: str) -> Iterator[None]:
    told = log.of_ended(paths, job.job)
    told.phase = to
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
