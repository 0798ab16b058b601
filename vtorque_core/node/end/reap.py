"""Reaper: release the journaled resources of jobs that no longer exist. As root."""

from __future__ import annotations

import fcntl
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vtorque_core.api import hooks
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.children import run_in_child
from vtorque_core.api.kept_records import place
from vtorque_core.base import safefs
from vtorque_core.base.detach import run_detached
from vtorque_core.base.errors import UsageError
from vtorque_core.base.locks import Busy, job_lock, take_lock, try_flock
from vtorque_core.base.names import Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site
from vtorque_core.node.end.teardown import TeardownReport, plugins_of, retire_spare, teardown
from vtorque_core.records import reading

_FIRST_PAUSE, _LONGEST_PAUSE, _A_DAY = 10.0, 600.0, 86400.0  # seconds
_LOCK = 3.0  # seconds to wait for a process that still changes the ended job, such as a checkpoint

Action = Literal["released", "partial", "would release", "alive", "unknown", "busy", "unreadable"]


@dataclass(frozen=True)
class ReapResult:
    """Result of reaping one journal; ``vtorque reap --json`` prints it.

    Attributes:
        action: ``partial``: some records stay open; ``unknown``: the batch system does not know if
            the job exists; ``busy``: the job's prologue or epilogue runs.
        open: numbers of the records that were open before the release.
    """

    job: str
    attempt: int
    journal: str
    action: Action
    message: str = ""
    open: tuple[int, ...] = ()
    report: TeardownReport | None = None

    @property
    def ok(self) -> bool:
        return self.action not in ("partial", "unreadable")


def reap(
    site: Site,
    alive: Callable[[Sequence[str]], Mapping[str, JobState]],
    plugins_for: Callable[[reading.JournalState], Plugins] = plugins_of,
    *,
    dry_run: bool = False,
    only: str | None = None,
    abandon: Collection[str] = (),
) -> list[ReapResult]:
    """Release the resources of jobs that no longer exist.

    ``alive`` asks the site's batch system for the states of jobs. Jobs of other batch systems are
    not released. ``only``: reap only the job with this id. ``abandon`` has records to mark as
    released: job id or key, and number of the record, such as ``"42.srv:7"`` or ``"42.srv.0:7"``.
    """
    paths = site.paths
    results: list[ReapResult] = []
    states: list[reading.JournalState] = []

    def report_error(path: Path, error: reading.JournalError) -> None:
        if isinstance(error, reading.EmptyJournal):
            states.extend(_drop_empty(paths, path, dry_run))
        else:
            results.append(
                ReapResult(reading.lock_name(path), 0, str(path), "unreadable", str(error))
            )

    # Read the journals before calling alive(): a job that starts in between must not be reaped.
    for state in reading.walk(paths, troubled=report_error):
        states.append(state)
    taken = reading.claimed_spares(states)
    if only is not None:
        states = [state for state in states if state.header.job.id == only]
    given_up = _to_abandon(states, abandon)
    lives = alive(sorted({s.header.job.id for s in states if not s.header.spare})) if states else {}
    for state in states:
        job = state.header.job
        life = lives.get(job.id, JobState.UNKNOWN)
        if keeper := state.header.spare:
            life = (
                JobState.ALIVE
                if state.key in taken or _is_running(paths, keeper)
                else JobState.GONE
            )
        elif state.header.batch != site.batch.system:
            life = JobState.UNKNOWN
        tear = functools.partial(
            teardown,
            release_timeout=site.node.release_timeout,
            deadline=site.node.teardown_timeout,
            abandon=given_up.get(state.path, set()),
        )
        action, message, report = _release(
            state, life, paths, plugins_for, None if dry_run else tear
        )
        seqs = tuple(record.seq for record in state.open)
        results.append(
            ReapResult(job.id, job.attempt, str(state.path), action, message, seqs, report)
        )
    return results


def reap_until_clean(
    site: Site,
    plugins: Plugins,
    job_id: str,
    alive: Callable[[Sequence[str]], Mapping[str, JobState]],
) -> None:
    """Reap in a separate process until the job holds no resources, for at most a day."""

    def reap_loop(begun: Callable[[], None]) -> int:
        try:
            take_lock(site.paths.run / "reaping.lock", 0)
        except Busy:
            return 0
        begun()
        mine = reading.journals(site.paths, job_id)
        until, pause, partial = time.monotonic() + _A_DAY, _FIRST_PAUSE, False
        while time.monotonic() < until:
            time.sleep(pause)
            others = any(
                record.error for state in reading.walk(site.paths) for record in state.open
            )
            if not (partial or others or any(path.exists() for path in mine)):
                break  # epilogues have released everything
            pause = min(2 * pause, _LONGEST_PAUSE)
            found = reap(site, alive)
            notify(site, plugins, (result.report for result in found))
            partial = any(result.action in ("partial", "unknown", "busy") for result in found)
        return 0

    run_detached(reap_loop)


def _release(
    state: reading.JournalState,
    life: JobState,
    paths: Paths,
    plugins_for: Callable[[reading.JournalState], Plugins],
    tear: Callable[[Path, Paths, Plugins], TeardownReport] | None,
) -> tuple[Action, str, TeardownReport | None]:
    if life is not JobState.GONE:
        why = f"batch system {state.header.batch} does not say whether the job exists"
        return ("unknown", why, None) if life is JobState.UNKNOWN else ("alive", "", None)
    try:
        with job_lock(paths, state.header.job.id, _LOCK):
            if tear is None:
                return "would release", "", None
            if state.header.spare and (left_alone := _skip_reason(state, paths)):
                return left_alone
            # Read again: the start may have acquired more before it ended.
            report = tear(state.path, paths, plugins_for(reading.try_read(state.path) or state))
    except Busy as error:
        return "busy", str(error), None
    except reading.JournalError as error:
        return "unreadable", str(error), None
    left = len(report.failed) + len(report.orphaned) + len(report.held)
    message = f"{left} of {len(state.open)} records could not be released" if left else ""
    return "partial" if left else "released", message, report


def _skip_reason(state: reading.JournalState, paths: Paths) -> tuple[Action, str, None] | None:
    try:
        return None if retire_spare(paths, state.key) else ("alive", "", None)
    except reading.JournalError as error:
        return "unknown", f"cannot determine whether the job still runs: {error}", None


def _is_running(paths: Paths, name: str) -> bool:
    try:
        descriptor = os.open(paths.run / f"{name}.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    with safefs.closing(descriptor):
        return not try_flock(descriptor, fcntl.LOCK_SH, 0.0)


def _drop_empty(paths: Paths, path: Path, dry_run: bool) -> list[reading.JournalState]:
    try:
        with job_lock(paths, reading.lock_name(path), 0):
            return [reading.read(path)]
    except reading.EmptyJournal:
        if not dry_run:
            teardown(path, paths, Plugins(), deadline=0)
    except (Busy, FileNotFoundError):
        pass
    return []


def _to_abandon(
    states: Sequence[reading.JournalState], wanted: Collection[str]
) -> dict[Path, set[int]]:
    found: dict[Path, set[int]] = {}
    for text in wanted:
        name, _, number = text.rpartition(":")
        if not name or not number.isdecimal():
            raise UsageError(f"--abandon {text}: write a job and a record's number, like 42.srv:7")
        seq = int(number)
        matches = [
            state
            for state in states
            if name in (state.header.job.id, state.key) and seq in {r.seq for r in state.open}
        ]
        if not matches:
            raise UsageError(f"--abandon {text}: job {name} holds no resource {seq} on this node")
        if len(matches) > 1:
            names = ", ".join(f"{state.key}:{seq}" for state in matches)
            raise UsageError(f"--abandon {text}: matches several resources: write one of {names}")
        found.setdefault(matches[0].path, set()).add(seq)
    return found


AFTER = 30.0  # timeout in seconds of each step after the release


def notify(site: Site, plugins: Plugins, reports: Iterable[TeardownReport | None]) -> list[str]:
    """Call ``vtorque_job_ended`` for each completely released attempt, and return errors.

    Each plugin runs in a child.
    """
    faults = []
    for report in reports:
        if report is None or report.ended is None:
            continue
        ended = place(site.paths, report.ended.job)
        for name in plugins.names:
            if name not in report.ended.off and "vtorque_job_ended" in plugins.hooks_of(name):
                call = plugins.only_plugin(name).collect
                work = functools.partial(call, hooks.vtorque_job_ended, place=ended, site=site)
                error = run_in_child(work, AFTER)
                faults += [f"plugin {name}, vtorque_job_ended: {error}"] if error else []
    return faults
