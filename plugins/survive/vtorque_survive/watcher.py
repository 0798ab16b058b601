"""The node's watcher: pause a job's guests while the job is suspended. Runs as root.

Batch systems run no hook when they suspend a job. The watcher therefore queries the batch system
once per minute. It queries more often if the job shell is stopped or runs on another node, or if
the job was suspended. The watcher needs no query to pause the guests if the job shell is stopped
(SIGSTOP) or the job's owner requests a pause (``request``).

The watcher may be killed at any time, because it keeps no state: the owner's requests
are files, and completed actions are in the job's journal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vtorque_core.api import Paths
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.children import Child, wait_readable
from vtorque_core.api.unprivileged_parser import helper_process
from vtorque_core.live import changes, service, suspend
from vtorque_core.live.jobs import RunningJob, RunningJobs
from vtorque_core.live.node_process import initialize
from vtorque_survive import request
from vtorque_survive.checkpoint import ENDS, HOLDS, SAVED, SAVES, CheckpointWatcher
from vtorque_survive.clocks import set_clocks
from vtorque_survive.health import HealthWatcher
from vtorque_survive.hold_jobs import HoldAdapter, HoldWatcher
from vtorque_survive.lines import LineReader
from vtorque_survive.listing import RemovalWatcher
from vtorque_survive.migration_watch import MigrationWatcher
from vtorque_survive.process import NAME
from vtorque_survive.settings import Settings

_IDLE = 60.0  # seconds between two polls without a job on the node
_SELDOM = 60.0  # seconds between two queries to the batch system without a reason
_PAUSE, _LONGEST_PAUSE = 2.0, 60.0  # seconds until a failed change is retried: first, longest
_BATCH_TIME = 60.0  # seconds for an answer of the batch system
_MOST_PHASES = 1000  # of a job; after that, only the batch system can suspend it
_HELD = "held"  # reported for a held job in addition to its JobState
_NO_MORE = (
    f"the job was suspended or saved too often ({_MOST_PHASES} phases): further requests are "
    "ignored"
)
_OWNER = "requested by its owner"
ASKED = "paused-by-owner"  # a file in the job's state directory
log = logging.getLogger(NAME)


class BatchView:
    """The batch system's view of the jobs on this node.

    A child process queries the batch system, so the watcher never blocks. The last answer is used
    until the next one arrives.
    """

    def __init__(self, config: Path, seconds: float) -> None:
        self._config, self._seconds = config, seconds
        self._lines = LineReader(_BATCH_TIME)
        self._known: dict[str, JobState] = {}
        self.held: set[str] = set()  # running jobs that are held

    def known_states(self, ids: Sequence[str], *, soon: bool) -> Mapping[str, JobState]:
        """Return the last known states of these jobs.

        The next query starts after a minute or, with ``soon``, after the site's ``query_interval``.
        """
        self._known = {each: self._known[each] for each in ids if each in self._known}
        self.held &= set(ids)  # an earlier attempt's hold does not count
        wait = float("inf") if not ids else self._seconds if soon else _SELDOM
        lines = self._lines.read_lines(lambda told: self._ask(ids, told), wait) or ()
        pairs = [(each, life) for each, _, life in (line.rpartition(" ") for line in lines)]
        self._known |= {
            each: JobState(life) for each, life in pairs if each in ids and life != _HELD
        }
        if pairs:
            self.held = {each for each, life in pairs if each in ids and life == _HELD}
        return self._known

    def _ask(self, ids: Sequence[str], told: int) -> None:
        site, batch = service.batch_system(self._config)
        node = batch.node(site)
        if isinstance(node, HoldAdapter):
            lives, held = node.alive_and_held(ids)
        else:
            lives, held = node.job_states(ids), ()
        said = [(each, life.value) for each, life in lives.items() if life is not JobState.UNKNOWN]
        for each, word in (*said, *((each, _HELD) for each in held)):
            with contextlib.suppress(BlockingIOError):  # at 2,000 jobs; the rest is unknown
                os.write(told, f"{each} {word}\n".encode())


@dataclass
class WatchedJob:
    """A job with guests on this node, and the FIFO for its owner's requests.

    Attributes:
        change: The process that pauses, resumes or saves the guests.
        to: The job's phase after ``change``.
        token: The token of the owner's request that is not answered yet.
        made: The id of the checkpoint that ``change`` creates.
        asker: The pid of the process that sent the request.
        again: The time of the next attempt after a failure.
        pause: The delay in seconds after the next failure.
        clocks: The process that sets the guests' clocks.
        late: Whether ``clocks`` must still be started.
        passed: The process that forwards the owner's request to nodes outside the allocation, to
            which guests of the job have migrated.
        wrong: The error message of the process ``passed``, kept after its end; empty if it worked.
        answer: The answer to the owner, kept until the process ``passed`` has ended.
        stopped: Whether the job shell is stopped; None if it is not on this node.
    """

    job: RunningJob
    fifo: int
    change: Child | None = None
    to: str = ""
    token: str = ""
    made: str = ""
    asker: int = 0
    again: float = 0.0
    pause: float = field(default_factory=lambda: _PAUSE)
    clocks: Child | None = None
    late: bool = False
    passed: Child | None = None
    wrong: str = ""
    answer: str | None = None
    stopped: bool | None = None
    said: str = ""

    def close(self) -> None:
        """Close the FIFO."""
        os.close(self.fifo)


@dataclass
class WatcherLoop:
    """The watcher's loop over the node's jobs. An error of one job does not delay other jobs."""

    paths: Paths
    batch: BatchView
    checkpoints: CheckpointWatcher = field(default_factory=CheckpointWatcher)
    wishes: RemovalWatcher | None = None
    health: HealthWatcher | None = None
    moves: MigrationWatcher | None = None
    holds: HoldWatcher | None = None
    jobs: dict[str, WatchedJob] = field(default_factory=dict)
    _running: RunningJobs | None = None

    def poll(self) -> None:
        """Reap processes, answer requests and start due actions of each job."""
        for watched in self.jobs.values():
            self._collect(watched)
        self._find()
        for watched in self.jobs.values():
            watched.stopped = suspend.is_shell_stopped(self.paths, watched.job)
        lives = self._is_running()
        for watched in self.jobs.values():
            try:
                self._change_phase(watched, lives.get(watched.job.job.id))
            except Exception as error:  # e.g. a full disk, or a bug
                self._note_failure(watched, f"{type(error).__name__}: {error}")
        if self.wishes is not None:
            self.wishes.poll()
        if self.health is not None:
            self.health.poll()
        if self.moves is not None and self._running is not None:
            self.moves.poll(self.paths, self._running.jobs())
        if self.holds is not None:
            here = [watched.job for watched in self.jobs.values() if watched.stopped is not None]
            self.holds.poll(here, self.batch.held)

    def pause(self, interval: float) -> float:
        """Return the seconds until the next call of :meth:`poll`.

        Polling is needed because no event reports the start of a job's script.
        """
        return interval if self._running is None or self._running.jobs() else _IDLE

    def wait_descriptors(self) -> list[int]:
        """Return descriptors that become readable when a process for a job ends."""
        both = (child for w in self.jobs.values() for child in (w.change, w.passed))
        return [child.fileno() for child in both if child is not None]

    def _find(self) -> None:
        self._running = self._running or RunningJobs(self.paths)
        found = {job.job.key: job for job in self._running.jobs() if suspend.phase(job)}
        for key in [key for key, watched in self.jobs.items() if key not in found]:
            watched = self.jobs[key]
            if not (watched.change or watched.clocks or watched.passed):
                self.jobs.pop(key).close()
        for key, job in found.items():
            if key in self.jobs:
                self.jobs[key].job = job
                continue
            with contextlib.suppress(OSError):  # its teardown has begun
                fifo = request.listen(request.path_of(self.paths, key))
                self.jobs[key] = WatchedJob(job, fifo)

    def _is_running(self) -> Mapping[str, JobState]:
        ids = [watched.job.job.id for watched in self.jobs.values()]
        try:
            return self.batch.known_states(ids, soon=any(map(_may_change, self.jobs.values())))
        except OSError as error:
            log.warning("cannot query the batch system: %s", error)
            return {}

    def _collect(self, watched: WatchedJob) -> None:
        if watched.clocks is not None and watched.clocks.check():
            watched.clocks = None
        if watched.passed is not None and watched.passed.check():
            watched.wrong, watched.passed = watched.passed.error or "", None
            if watched.answer is not None:
                self._answer(watched, watched.answer)
        if watched.change is None or not watched.change.check():
            return
        error, watched.change = watched.change.error or "", None
        if error and watched.to not in (HOLDS, SAVES, ENDS):
            self.checkpoints.withdraw(self.paths, watched.job)
        asked = self.checkpoints.find_request(self.paths, watched.job)
        more = asked is not None  # a killed process is restarted, a saved job must end
        watched.made = asked.id if asked is not None else watched.made
        if error:
            watched.late = watched.late or watched.to == SAVES  # it may have resumed the guests
            watched.to = ""
            self._note_failure(watched, error)
        else:
            watched.late = watched.late or watched.to == suspend.RUNS
            watched.said, watched.again, watched.pause = "", 0.0, _PAUSE
        if not more:
            self._answer(watched, error)

    def _note_failure(self, watched: WatchedJob, error: str) -> None:
        if error != watched.said:
            log.warning("%s: %s", watched.job.job.id, error)
        watched.said = error
        watched.again = time.monotonic() + watched.pause
        watched.pause = min(2 * watched.pause, _LONGEST_PAUSE)

    def _answer(self, watched: WatchedJob, text: str) -> None:
        if watched.token and watched.passed is not None:
            watched.answer = text
        elif watched.token:
            request.answer(watched.job.kept, watched.token, text or watched.wrong, watched.made)
            watched.token = watched.made = watched.wrong = ""
            watched.answer = None

    def _change_phase(self, watched: WatchedJob, life: JobState | None) -> None:
        """Pause, resume or save the guests, as the job's state or a request requires."""
        if self._is_saving(watched) and (found := request.take_request(watched.fifo)):
            request.answer(watched.job.kept, found[1], f"{SAVED}: wait until this is finished")
        if watched.change is not None or watched.passed is not None or watched.to == ENDS:
            return
        asked = self._read_request(watched)
        self.checkpoints.request_due(self.paths, watched.job)
        to, why = self._wanted_phase(watched, life)
        if asked == request.RESUME and to != suspend.RUNS:
            self._answer(watched, f"the job cannot be resumed now: {why}")
        elif asked == request.SUSPEND and to == suspend.RUNS:
            self._answer(watched, _NO_MORE)
        done = to == suspend.phase(watched.job) and asked != request.RESUME
        if done and not suspend.is_incomplete(self.paths, watched.job):
            if self._begin_checkpoint(watched) or self._is_saving(watched):
                return
            self._answer(watched, "")
            if to == suspend.RUNS:
                self._set_clocks(watched)
        elif asked or time.monotonic() >= watched.again:
            watched.change = suspend.begin(self.paths, watched.job, to, why)
            watched.to = to

    def _set_clocks(self, watched: WatchedJob) -> None:
        if watched.late and watched.clocks is None:
            watched.late = False
            watched.clocks = set_clocks(self.paths, watched.job)

    def _read_request(self, watched: WatchedJob) -> str:
        """Record and return the owner's request, such as SUSPEND; empty if none or refused."""
        word, token, asker = request.take_request(watched.fifo) or ("", "", 0)
        if token:
            watched.token, watched.asker = token, asker
        if word in (request.SUSPEND, request.RESUME) and self.moves is not None:
            watched.passed = self.moves.forward_request(watched.job, word)
        if word == request.SUSPEND:
            self._file(watched).touch(mode=0o600)
        elif word == request.RESUME:
            self._file(watched).unlink(missing_ok=True)
        elif word in (request.CHECKPOINT, request.SAVE):
            ends = word == request.CHECKPOINT
            why = self.checkpoints.refusal(watched.job, ends=ends)
            if _ignores_owner(watched):
                why = _NO_MORE
            if why:
                self._answer(watched, why)
                return ""
            self.checkpoints.request(self.paths, watched.job, ends=ends)
        return word

    def _begin_checkpoint(self, watched: WatchedJob) -> bool:
        """Start the next step of a requested checkpoint; return False if nothing is to be done."""
        if time.monotonic() < watched.again:
            return False
        begun = self.checkpoints.begin(self.paths, watched.job, watched.asker)
        if begun is None:
            return False
        watched.to, watched.change = begun
        if watched.to == ENDS:
            self._answer(watched, "")
        return True

    def _is_saving(self, watched: WatchedJob) -> bool:
        return self.checkpoints.find_request(self.paths, watched.job) is not None

    def _wanted_phase(self, watched: WatchedJob, life: JobState | None) -> tuple[str, str]:
        """Return the phase that the job should have, and why."""
        if self.checkpoints.must_stay_paused(self.paths, watched.job):
            return suspend.PAUSED, SAVED  # its guests are saved, so they cannot be suspended
        unknown = life is None and suspend.phase(watched.job) == suspend.SUSPENDED
        if life is JobState.SUSPENDED or unknown:
            return suspend.SUSPENDED, "suspended by the batch system"
        if watched.stopped and not _ignores_owner(watched):
            return suspend.PAUSED, "the job's processes are stopped"
        if self._file(watched).exists() and not _ignores_owner(watched):
            return suspend.PAUSED, _OWNER
        return suspend.RUNS, "no reason to be suspended is left"

    def _file(self, watched: WatchedJob) -> Path:
        return self.paths.job_state(watched.job.job.key) / ASKED


def _ignores_owner(watched: WatchedJob) -> bool:
    """Return whether the watcher ignores further requests of the job's owner.

    Each request adds phases to the job's journal, which must not grow without limit.
    """
    return len(watched.job.phases) >= _MOST_PHASES


def _may_change(watched: WatchedJob) -> bool:
    """Return whether the job may be suspended or resumed soon, and needs frequent queries."""
    if watched.stopped is None:
        return len(watched.job.kept.facts().get("nodes", ())) > 1
    return watched.stopped or suspend.phase(watched.job) == suspend.SUSPENDED


def serve(loop: WatcherLoop, events: int, interval: float, needed: Callable[[], bool]) -> None:
    """Run the loop until the watcher is no longer needed."""
    while needed():
        try:
            loop.poll()
        except Exception:  # a bug must not leave jobs suspended forever
            log.exception("poll")
        wait_readable([events, *loop.wait_descriptors()], loop.pause(interval))
        with contextlib.suppress(BlockingIOError):
            os.read(events, 1 << 16)


def main() -> None:
    """Run the watcher; the argument is a site config."""
    paths, (config,) = initialize(NAME, nice=10)
    site, _ = service.batch_system(Path(config))
    settings = site[Settings]
    events = changes.events()
    changes.watch(events, paths.journal, content=False)
    with helper_process():
        made = CheckpointWatcher(Path(config), settings)
        wishes = RemovalWatcher(paths, settings.checkpoints, shared=settings.checkpoints_shared)
        health = HealthWatcher(paths, Path(config), settings)
        loop = WatcherLoop(
            paths, BatchView(Path(config), settings.query_interval), made, wishes, health
        )
        if settings.checkpoints:
            loop.holds = HoldWatcher(Path(config))
        if settings.remote_command:
            loop.moves = MigrationWatcher(Path(config))
        serve(loop, events, settings.poll_interval, (paths.run / f"{NAME}.lock").exists)


if __name__ == "__main__":
    main()
