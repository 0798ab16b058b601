"""Pause and resume the guests of a job.

Users may pause a job. Only the batch system may suspend a job, because it gives the CPUs of a
suspended job to other jobs. If the process that changes a job is killed, repeat the change.

Privileges: root.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from vtorque_core.api.children import Child
from vtorque_core.api.guest_driver import GuestDriver
from vtorque_core.base import hypervisor, safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import holder_of as holder_of
from vtorque_core.base.locks import libvirt_worker
from vtorque_core.base.names import Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.live.jobs import RunningGuest, RunningJob
from vtorque_core.live.locked_job import LockedJob, journal_of, locked_job
from vtorque_core.records import log, reading
from vtorque_core.resources import stopped_daemons
from vtorque_core.resources.user_disk import served_file as served_file

STOPS = 20.0
"""Seconds in which libvirt must pause all guests of a job: less than stopped_daemons.HANDSHAKE."""
_GOES_ON = 10.0  # seconds in which libvirt must resume all guests
_TIME = STOPS + _GOES_ON + 5.0  # for one change: less than an epilogue waits for the job's lock

RUNS, PAUSED, SUSPENDED = "run", "paused", reading.SUSPENDED
"""Phases of a job whose script has begun."""

_PHASES = frozenset({RUNS, PAUSED, SUSPENDED})
_log = logging.getLogger(__name__)


def is_shell_stopped(paths: Paths, job: RunningJob) -> bool | None:
    """Return True if this node's job shell is stopped or frozen; None if it cannot be found.

    The job's owner controls the result, so treat it as untrusted input.
    """
    with suppress(OSError):
        pid = holder_of(paths.job_shell(job.job.key))
        return None if pid is None else stopped_daemons.is_stopped(pid)
    return None


def phase(job: RunningJob) -> str:
    """Return ``RUNS``, ``PAUSED`` or ``SUSPENDED``; empty while guests start or end."""
    last = job.phases[-1][0] if job.phases and job.guests else ""
    return last if last in _PHASES else ""


def is_suspended(job: RunningJob) -> bool:
    """Return True if the phase is ``PAUSED`` or ``SUSPENDED``."""
    return phase(job) in (PAUSED, SUSPENDED)


def is_incomplete(paths: Paths, job: RunningJob) -> bool:
    """Return True if a phase change is incomplete. The recorded phase may then be wrong."""
    return _marker_file(paths, job).exists()


def begin(paths: Paths, job: RunningJob, to: str, why: str) -> Child:
    """Change the phase of a job on this node in a child process, and return the child.

    ``to`` is ``RUNS``, ``PAUSED`` or ``SUSPENDED``, ``why`` a reason for the job's log. Idempotent.
    The calling process must have no other threads. It must call :meth:`Child.check` when the child
    has ended. Raises OSError.
    """

    def work() -> None:
        with log_to_job(paths, job, to):
            change_phase(paths, job, to, why)

    return Child(work, _TIME)


def change_phase(paths: Paths, job: RunningJob, to: str, why: str) -> None:
    """Change the phase of a job like :func:`begin`, but in this process. Raises HostFault.

    The caller may hold the job's lock.
    """
    (_resume if to == RUNS else _suspend)(paths, job, to, why)


def _suspend(paths: Paths, job: RunningJob, to: str, why: str) -> None:
    with _record_change(paths, job, to) as mark:
        try:
            _run_for_guests(paths, job, hypervisor.suspend_domain, STOPS)
        except HostFault:
            with suppress(HostFault):  # the incomplete change is repeated later
                _run_for_guests(paths, job, hypervisor.resume_domain, _GOES_ON)
            raise
        if mark():
            _log.info("%s: %s", to, why)


def _resume(paths: Paths, job: RunningJob, to: str, why: str) -> None:
    with _record_change(paths, job, to) as mark:
        if mark():  # before the guests run, because the ledger must count their CPUs again
            _log.info("resumed: %s", why)
        _run_for_guests(paths, job, hypervisor.resume_domain, _GOES_ON)


@contextmanager
def locked(paths: Paths, job: RunningJob) -> Iterator[LockedJob]:
    """Hold the lock of a job. Raises HostFault if the job has ended, Busy if the lock is held."""
    with locked_job(paths, job.job.key) as held:
        if held is None:
            raise HostFault("the job has ended")
        yield held


@contextmanager
def _record_change(paths: Paths, job: RunningJob, to: str) -> Iterator[Callable[[], bool]]:
    with locked(paths, job) as held:
        if held.state.phase and held.state.phase not in _PHASES:
            raise HostFault("the job is ending")
        with safefs.name_errors(_marker_file(paths, job)):
            _marker_file(paths, job).touch(mode=0o600)
        yield lambda: held.enter(to)
        _marker_file(paths, job).unlink(missing_ok=True)


def _marker_file(paths: Paths, job: RunningJob) -> Path:
    return paths.job_state(job.job.key) / "suspending"


@contextmanager
def log_to_job(paths: Paths, job: RunningJob, phase: str) -> Iterator[None]:
    """Log only to the job's log, with this phase. Removes all other log handlers."""
    logging.getLogger().handlers.clear()
    told = log.teardown_log(paths, job.job)
    told.phase = phase
    with log.open_log(told):
        yield


def kill_stopped(guest: RunningGuest, seconds: float | None = None) -> AbstractContextManager[None]:
    """During a ``with`` block, kill daemons of shares and disks that SIGSTOP has stopped.

    QEMU would wait for them. After ``seconds`` (default: 30), kills all these daemons.
    """
    return stopped_daemons.kill_stopped(stopped_daemons.locks_of(guest.run_dir), seconds)


@contextmanager
def worker(
    paths: Paths,
    job: RunningJob,
    guest: RunningGuest,
    deadline: float,
    failed: threading.Event,
    seconds: float | None = None,
) -> Iterator[None]:
    """During a ``with`` block, reserve a libvirtd worker thread for an operation on a guest.

    Calls :func:`kill_stopped`, because a stopped daemon would block the worker. Raises HostFault
    if no worker is free by ``deadline`` (monotonic), or if ``failed`` is set.
    """
    with libvirt_worker(paths, job.job.uid, deadline, failed), kill_stopped(guest, seconds):
        yield


def _run_for_guests(
    paths: Paths, job: RunningJob, work: Callable[[str, str, float], None], seconds: float
) -> None:
    deadline, failed = time.monotonic() + seconds, threading.Event()

    def one(guest: RunningGuest) -> None:
        try:
            with worker(paths, job, guest, deadline, failed):
                work(guest.uri, guest.uuid, deadline - time.monotonic())
        except HostFault:
            failed.set()
            raise

    with ThreadPoolExecutor(max(1, len(job.guests))) as threads:
        for done in [threads.submit(one, guest) for guest in job.guests]:
            done.result()


def driver_of(paths: Paths, job: RunningJob) -> tuple[str, GuestDriver]:
    """Return name and driver of the job's guest type. Loads only plugins that the journal names.

    Raises OSError, VtorqueError, and HostFault if the job has ended.
    """
    kind = str(job.kept.facts().get("guest_type", ""))
    if (state := journal_of(paths, job.job.key)) is None:
        raise HostFault("the job has ended")
    return kind, Plugins.load(node=False, only=set(state.header.plugins)).guest_type(kind).driver()
