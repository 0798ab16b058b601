"""Epilogue: release everything in the job's journals. As root, on the node.

The batch system may call the epilogue several times, also for a job without a prologue. Standard
output of the epilogue appears in the job's output.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import syslog
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vtorque_core.api import kept_records
from vtorque_core.base import errors, hypervisor, safefs
from vtorque_core.base.locks import Busy, job_lock_holder
from vtorque_core.base.names import Paths
from vtorque_core.config.site_file import Node, load_for_teardown
from vtorque_core.node.end.teardown import release_job
from vtorque_core.node.shell import proof
from vtorque_core.records import console
from vtorque_core.records.reading import DOMAIN, JournalError, JournalState, find

_DYING = 1.5  # seconds that libvirt may take to see that a QEMU has ended


def run_hook(config: Path, argv: Sequence[str]) -> int:
    """Release all resources in the job's journals. Privileges: root.

    ``argv`` begins with the job id. The tenth argument, if given, is the job's exit status.
    """
    if not argv:
        raise errors.HostFault("the batch system passed no job id", stage="epilogue")
    return run(config, argv[0], argv[9] if len(argv) > 9 else "")


def run(config: Path, job_id: str, status: str = "") -> int:
    """Release everything that the job holds on this node, and return the hook's exit status.

    If a guest died, first print the end of its console. If the site config is invalid or untrusted,
    use the default directories, because the config could name directories with forged journals.
    ``status`` is the job's exit status, or empty if it is unknown.
    """
    paths, node = _settings(config)
    states = _states(paths, job_id)
    if status == str(errors.EXIT_GUEST_DIED):
        said = "".join(f"{line}\n" for line in _last_words(paths, states))
        # Not buffered: each fork would flush the buffer again and fail on a user's full disk.
        with contextlib.suppress(OSError):
            os.write(1, os.fsencode(said))
    if states:
        kept_records.keep_facts(paths, states[-1].header.job, status=status)
    # The job shell reported that the start was killed, so no script ran.
    lost = status == str(errors.EXIT_HOST_FAULT) and proof.starter_pid(paths, job_id) > 0
    try:
        _stop_start(paths, job_id)
        each, whole = node.release_timeout, node.teardown_timeout
        reports = release_job(paths, job_id, release_timeout=each, deadline=whole)
        clean = all(report.clean for report in reports)
    except Busy as error:  # the job's start, or another epilogue, holds the lock
        syslog.syslog(syslog.LOG_WARNING, f"vtorque {job_id}: {error}")
        reports, clean = [], False
    for line in (line for report in reports for line in report.lines()):
        syslog.syslog(syslog.LOG_WARNING, f"vtorque {line}")
    if not clean:
        sys.stderr.write(
            "vtorque: the job has ended, but its virtual machine could not be removed from this "
            "node yet. vTorque tries again; the node's syslog has the reason\n"
        )
    if states:
        from vtorque_core.node.end import after_release  # noqa: PLC0415 - the job need not wait

        after_release.finish(config, states[-1].header, reports, clean=clean, lost=lost)
    return errors.EXIT_OK if clean else errors.EXIT_FAILED


def _stop_start(paths: Paths, job_id: str) -> None:
    starter = proof.starter_pid(paths, job_id)
    with contextlib.suppress(OSError), safefs.closing(os.pidfd_open(starter)) as handle:
        if starter == job_lock_holder(paths, job_id):  # so the pid was not reused
            signal.pidfd_send_signal(handle, signal.SIGKILL)


def _states(paths: Paths, job_id: str) -> list[JournalState]:
    try:
        return find(paths, job_id)
    except JournalError:
        return []  # the release reports it


def _last_words(paths: Paths, states: Sequence[JournalState]) -> Iterator[str]:
    try:
        for state in states:
            for record in (each for each in state.open if each.kind == DOMAIN):
                if _is_dead(record.args["uri"], record.args["uuid"]):
                    log = paths.job_state(state.key) / f"g{record.guest}" / "console.log"
                    if lines := console.tail(log, console.PANIC):
                        yield console.heading(record.args["name"])
                        yield from (f"| {line}" for line in lines)
    except errors.VtorqueError as error:  # libvirtd is down: the release reports it too
        sys.stderr.write(f"vtorque: {error}\n")


def _is_dead(uri: str, uuid: str) -> bool:
    end = time.monotonic() + _DYING
    while hypervisor.domain_runs(uri, uuid):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _settings(config: Path) -> tuple[Paths, Node]:
    try:
        return load_for_teardown(config)
    except errors.ConfigError as error:
        sys.stderr.write(f"vtorque: warning: {error}\n")
        return Paths(), Node()
