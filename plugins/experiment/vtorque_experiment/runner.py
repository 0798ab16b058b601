"""Run the points of an experiment: submit jobs, collect results, recover from a killed runner.

A point is recorded as *submitting* before vsub is called. After a kill, the next runner waits until
no vsub of the killed runner is left. It then looks for the point's job: by the file ``claim``
(:mod:`vtorque_experiment.wrapper`), and by the job's name in the batch system's list. If there is
no job, it submits the point again.

Guests can write in the results directory. Therefore the runner submits only jobs of the
``ExperimentPlan``, and a job counts as ended when the batch system no longer lists it. A guest can
falsify numbers or make points fail, but no more.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import printable
from vtorque_experiment import batch as b
from vtorque_experiment import book as k
from vtorque_experiment import files, wrapper
from vtorque_experiment.batch import BatchCommands, JobQueries
from vtorque_experiment.book import Book, PointRow
from vtorque_experiment.create import disk
from vtorque_experiment.definition import Definition
from vtorque_experiment.end_collector import Collector
from vtorque_experiment.matrix import count_text
from vtorque_experiment.place import ResultsDirectory
from vtorque_experiment.plan import ExperimentPlan, copy_plan_and_refuse, read_plan

TRIES = 3  # submissions of a point if vsub fails without a refusal
REASONS = 20  # distinct reasons for failures that a run prints
IN_A_ROW = 5  # failed submissions, after which the runner waits for the next list of jobs
LEAST_PAUSE, MOST_PAUSE = 0.1, 2.0  # seconds between two reads of the files of open points
MISSES = 2  # lists of jobs in which a job must be missing before it counts as lost


@dataclass(frozen=True)
class End:
    """The end of a run.

    Attributes:
        finished: true if every point is done or failed.
        why: the reason if the run stopped early, or empty.
    """

    finished: bool
    why: str = ""


class Runner:
    """One run or resume of an experiment. The caller holds the experiment's lock.

    Args:
        told: called with each message for the user.
        stop: event that ends the run; submitted jobs continue.
        hours: the time limit, or None.
        seen: called repeatedly with the number of points in each state.
        plan: the plan to submit; None: the plan in the results directory.
        is_accepted: returns whether the plan in the results directory may be submitted.
    """

    def __init__(  # noqa: PLR0913 - all that one run needs, from one caller
        self, place: ResultsDirectory, definition: Definition, book: Book, batch: BatchCommands,
        collect: Collector, *, told: Callable[[str], None], stop: threading.Event,
        hours: float | None = None, seen: Callable[[dict[str, int]], None] = lambda _: None,
        plan: ExperimentPlan | None = None,
        is_accepted: Callable[[ExperimentPlan], bool] = lambda _: True,
    ) -> None:  # fmt: skip
        self._place, self._definition, self._book, self._batch = place, definition, book, batch
        self._collector, self._told, self._stop, self._seen = collect, told, stop, seen
        about = book.notes()
        self._id = about.get("id", "") if plan is None else plan.id
        self._cells = book.cells()
        self._plan, self._is_accepted = plan, is_accepted
        self._questions = JobQueries(
            batch,
            _parse_seconds(about.get("asked", "")),
            lambda when: book.note("asked", str(when)),
        )
        self._end = None if hours is None else time.monotonic() + hours * 3600
        self._refused = self._failures = 0
        self._reasons: set[str] = set()
        self._misses: Counter[int] = Counter()  # lists of jobs in which a point's job was missing
        self._tries: Counter[int] = Counter()  # submissions of a point, counted without the book

    def run(self) -> End:
        """Submit points and collect results until all points are done or failed.

        Return earlier if the caller sets the event ``stop``. If a limit of the experiment is
        reached, submit no more points, and return when all submitted points have ended.

        Raises HostFault if the disk or vsub fails. Raises Refused if the user must accept the plan
        first (``--accept``).
        """
        with b.hold_lock(self._place.top / "submit.lock", wait=True):
            pass  # wait until no vsub of a killed runner is left
        self._adopt()
        before: dict[str, int] = {}
        pause = LEAST_PAUSE
        while not self._stop.is_set():
            if self._collect():
                self._questions.ask_early()
            if self._questions.is_due and self._book.rows(k.SUBMITTED, k.SUBMITTING, limit=1):
                self._ask()
            why = self._why_not_more()
            if not why:
                self._submit()
            counts = self._book.counts()
            self._seen(counts)
            self._book.save_if_due()
            open_ = counts[k.SUBMITTED] + counts[k.SUBMITTING]
            if not open_ and (why or not counts[k.WAITING]):
                return End(not counts[k.WAITING], why)
            pause = LEAST_PAUSE if counts != before else min(2 * pause, MOST_PAUSE)
            before = counts
            self._stop.wait(max(pause, open_ / 1000))
        return End(False, "stopped; submitted jobs continue")

    def retake_numbers(self) -> None:
        """Extract the numbers of failed points again from the output of their ended jobs.

        A result may have arrived late, or the user may have corrected the experiment's file.
        """
        taken, before = 0, self._book.counts()[k.DONE]
        for row in self._book.rows(k.FAILED):
            if self._stop.is_set():
                break
            if row.job and self._has_ended(row):
                self._take(row)
                taken += 1
        if taken:
            done = self._book.counts()[k.DONE] - before
            self._told(
                f"read the numbers of {count_text(taken, 'failed point')} again: {done or 'none'} "
                f"{('is' if done == 1 else 'are')} done now"
            )

    @property
    def plan(self) -> ExperimentPlan | None:
        """The plan that was submitted; None if no point had to be submitted."""
        return self._plan

    def token(self, number: int) -> str:
        """Return a point's job name: at most 15 characters, because PBS may reject longer names."""
        return f"x{self._id}-{number}"

    def _why_not_more(self) -> str:
        limits = self._definition.limits
        if self._end is not None and time.monotonic() >= self._end:
            return "the time limit is reached (limits.hours, --hours)"
        if self._failures >= limits.failures:
            return (
                f"{count_text(self._failures, 'failed point')} in a row (limits.failures): see "
                "vmgr experiment status"
            )
        return ""

    def _adopt(self) -> None:
        """Use the file ``claim`` to find the jobs of points whose submission was interrupted."""
        for row in self._book.rows(k.SUBMITTING):
            job = _claimed_job(self._place.point(row.number))
            if job:
                self._book.record_submission(row.number, job, time.time())

    def _collect(self) -> bool:
        """Read the results of jobs that have ended and that the batch system no longer lists.

        Returns True if a job has written the file ``ended`` but may still be listed.
        """
        ended = [row for row in self._book.rows(k.SUBMITTED) if self._has_ended(row)]
        for row in ended:
            if self._misses[row.number]:
                self._count(row, self._take(row))
        return any(not self._misses[row.number] for row in ended)

    def _has_ended(self, row: PointRow) -> bool:
        """Return True if the file ``ended`` exists, which a guest can also create."""
        return os.path.lexists(self._place.point(row.number) / wrapper.ENDED)

    def _take(self, row: PointRow) -> str:
        """Read the numbers of an ended job; return why its point failed, or an empty string."""
        point = self._place.point(row.number)
        cell = self._cells[row.cell] if 0 <= row.cell < len(self._cells) else {}
        ended = self._collector.collect_end(row, point, bool(cell.get("bare")))
        if row.begun is None or ended.reason != row.reason:
            self._book.record_end(
                row.number, ended.values, ended.begun, ended.machine, ended.reason
            )
        return ended.reason

    def _count(self, row: PointRow, reason: str) -> None:
        """Count consecutive failures. Report each distinct reason once."""
        self._failures = self._failures + 1 if reason else 0
        like = re.sub("[0-9]+", "0", reason)  # reasons that differ only in numbers count as equal
        if reason and like not in self._reasons and len(self._reasons) < REASONS:
            self._reasons.add(like)
            point = self._place.point(row.number)
            self._told(f"point {row.number} failed: {printable(reason, 400)} ({point})")

    def _ask(self) -> None:
        """Query the job list, resolve interrupted submissions, and fail the points of lost jobs."""
        before = self._questions.problem
        names = self._questions.ask()
        if names is None:
            if self._questions.problem != before:
                self._told(f"the batch system does not answer: {self._questions.problem}")
            return
        self._refused = 0
        for row in self._book.rows(k.SUBMITTING):
            self._resolve_submission(row, names.get(self.token(row.number), ""))
        missing = [r for r in self._book.rows(k.SUBMITTED) if self.token(r.number) not in names]
        for row in missing:
            self._misses[row.number] += 1
            if self._misses[row.number] >= MISSES and not self._has_ended(row):
                self._fail(row, self._loss_reason(row))
        self._book.record_missing([row.number for row in missing])

    def _resolve_submission(self, row: PointRow, job: str) -> None:
        job = job or _claimed_job(self._place.point(row.number))
        if job:
            self._book.record_submission(row.number, job, time.time())
        elif row.tries >= TRIES:
            self._fail(
                row, f"not submitted after {row.tries} tries: {row.reason or 'no error message'}"
            )
        else:
            self._book.record_retry(row.number, row.reason)

    def _loss_reason(self, row: PointRow) -> str:
        point = self._place.point(row.number)
        begun = os.path.lexists(point / wrapper.BEGUN)
        said = b.tail(point, b.JOB_ERR) or b.tail(point, b.JOB_OUT)
        how = "started but did not end" if begun else "did not start"
        why = said or "the node was lost, the job was canceled, or a disk was full"
        return f"job {row.job} is gone, its script {how}: {why}"

    def _fail(self, row: PointRow, reason: str) -> None:
        self._book.record_failure(row.number, reason)
        self._count(row, reason)

    def _submit(self) -> None:
        room = self._definition.limits.jobs - self._book.counts()[k.SUBMITTED]
        for row in self._book.rows(k.WAITING, limit=max(0, room)):
            if self._stop.is_set() or self._refused >= IN_A_ROW or self._why_not_more():
                return
            self._submit_one(row)

    def _submit_one(self, row: PointRow) -> None:
        if self._plan is None:
            self._plan = self._read_plan()
        if row.number not in self._plan.points or self._tries[row.number] >= TRIES:
            self._fail(row, "not submitted: results.sqlite was changed while the experiment ran")
            return
        self._tries[row.number] += 1
        self._book.begin(row.number)
        self._misses[row.number] = 0
        try:
            done = self._submit_point(self._plan, row.number)
        except OSError as error:
            raise disk(error) from None
        if done.code == 0 and done.job:
            self._refused = 0
            self._book.record_submission(row.number, done.job, time.time())
            return
        message = done.message or f"vsub ended with exit code {done.code}"
        if done.code == b.REFUSED:
            self._fail(row, f"rejected: {message}")
        else:  # vsub may have submitted the job: wait for the next list of jobs
            self._refused += 1
            self._book.note_reason(row.number, message)

    def _submit_point(self, plan: ExperimentPlan, number: int) -> b.SubmitResult:
        place, point = self._place, self._place.point(number)
        with files.directory(place.top, *point.relative_to(place.top).parts, make=True):
            pass
        naming = (self._batch.naming, self.token(number))
        cell = plan.cells[plan.points[number].cell]
        argv = b.arguments(naming, plan.definition, cell, point)
        script = plan.job_script(place, number)
        with b.hold_lock(place.top / "submit.lock", wait=True) as lock:
            done = b.submit(self._batch, argv, script, place, number, lock)
        for name, content in ((b.JOB, script), (b.VSUB_OUT, done.out), (b.VSUB_ERR, done.err)):
            with contextlib.suppress(OSError):  # these files are only for users
                place.write(point / name, content)
        return done

    def _read_plan(self) -> ExperimentPlan:
        points = sum(self._book.counts().values())
        found = read_plan(self._place, self._definition, self._book.notes(), points)
        if not self._is_accepted(found):
            raise copy_plan_and_refuse(found, self._place)
        self._id = found.id
        return found


def _claimed_job(point: Path) -> str:
    try:
        job = str((point / wrapper.CLAIM).readlink())
    except OSError:
        return ""
    return job if b.is_job_id(job) else ""


def _parse_seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
