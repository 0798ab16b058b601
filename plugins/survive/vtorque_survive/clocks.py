"""Set the clocks of guests that were paused. As root."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

from vtorque_core.api import HostFault, Paths, VtorqueError
from vtorque_core.api.children import Child
from vtorque_core.api.guest_driver import ClockDriver
from vtorque_core.live.jobs import RunningGuest, RunningJob
from vtorque_core.live.suspend import RUNS, driver_of, log_to_job

_CLOCK = 5.0  # seconds for a guest to confirm that it has set its clock
log = logging.getLogger(__name__)


def set_clocks(paths: Paths, job: RunningJob) -> Child:
    """Start a process that sets the clocks of guests that were paused, and return the process.

    Errors go to the job's log. Call this function within the context
    :func:`vtorque_core.api.unprivileged_parser.helper_process`.
    """
    return Child(lambda: _set_clocks(paths, job), 2 * _CLOCK)


def _set_clocks(paths: Paths, job: RunningJob) -> None:
    with log_to_job(paths, job, RUNS):
        try:
            _, driver = driver_of(paths, job)
        except (OSError, VtorqueError) as error:
            log.warning("cannot set the guests' clocks: %s", error)
            return
        if not isinstance(driver, ClockDriver):
            return

        def one(guest: RunningGuest) -> None:
            try:
                driver.set_clock(guest.run_dir, time.monotonic() + _CLOCK)
                log.info("the guest's clock is set", extra={"guest": guest.index})
            except HostFault as error:
                log.warning("cannot set the guest's clock: %s", error, extra={"guest": guest.index})

        with ThreadPoolExecutor(max(1, len(job.guests))) as threads:
            list(threads.map(one, job.guests))
