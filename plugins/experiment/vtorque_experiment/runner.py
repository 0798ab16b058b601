"""Run the points of an experiment: submit, collect, and go on where a killed runner stopped.

A point is noted as *submitting* before vsub is called. After a kill such a point is found again by
what vsub has printed, by its claim (:mod:`vtorque_experiment.wrapper`), or by its job's name in
the batch system's list; only if none of these knows it, and no vsub is left that could still
submit it, it is submitted anew.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import printable
from vtorque_experiment import batch as b
from vtorque_experiment import book as k
from vtorque_experiment import wrapper
from vtorque_experiment.batch import Batch, Questions
from vtorque_experiment.book import Book, Row
from vtorque_experiment.create import disk, script_of
from vtorque_experiment.definition import Definition
from vtorque_experiment.ended import Collector
from vtorque_experiment.matrix import counted
from vtorque_experiment.place import Place

TRIES = 3  # of a submission that failed otherwise
REASONS = 20  # that are told while it runs
IN_A_ROW = 5  # failed submissions, after which nothing is submitted until the next question
LEAST_PAUSE, MOST_PAUSE = 0.1, 2.0  # seconds between two looks at the files of open points
MISSES = 2  # questions in which a job must be missing before it counts as lost
_ID = re.compile(r"[0-9]+[A-Za-z0-9_.\[\]-]*", re.ASCII)


@dataclass(frozen=True)
class End:
    """Why a run has ended: ``finished``, or what it says in words."""

    finished: bool
    why: str = ""


class Runner:
    """One run or resume of an experiment, which holds its lock.

    Args:
        told: called with a line when there is something to say.
        stop: set by whoever wants it to end; what is submitted goes on.
        hours: None is no limit.
        seen: called with the counts after each round.
    """

    def __init__(
        self, place: Place, definition: Definition, book: Book, batch: Batch,
        collect: Collector, *, told: Callable[[str], None], stop: threading.Event,
        hours: float | None = None, seen: Callable[[dict[str, int]], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._place, self._definition, self._book, self._batch = place, definition, book, batch
        self._collector, self._told, self._stop, self._seen = collect, told, stop, seen
        about = book.about()
        self._id, self._root = about["id"], about["root"]
        self._cells = book.cells()
        self._questions = Questions(
            batch, float(about.get("asked", 0)), lambda when: book.note("asked", str(when))
        )
        self._end = None if hours is None else time.monotonic() + hours * 3600
        self._refused = self._failures = 0
        self._reasons: set[str] = set()
        self._directives: dict[Path, bytes] = {}

    def run(self) -> End:
        """Run until all points are over, or it must stop. Raises HostFault: disk, vsub."""
        with b.locked(self._place.top / "submit.lock", wait=True):
            pass  # no vsub of a killed runner is left
        self._adopt()
        before: dict[str, int] = {}
        pause = LEAST_PAUSE
        while not self._stop.is_set():
            self._collect()
            if self._questions.due and self._book.rows(k.SUBMITTED, k.SUBMITTING, limit=1):
                self._ask()
            why = self._why_not_more()
            if not why:
                self._submit()
            counts = self._book.counts()
            self._seen(counts)
            open_ = counts[k.SUBMITTED] + counts[k.SUBMITTING]
            if not open_ and (why or not counts[k.WAITING]):
                return End(not counts[k.WAITING], why)
            pause = LEAST_PAUSE if counts != before else min(2 * pause, MOST_PAUSE)
            before = counts
            self._stop.wait(max(pause, open_ / 1000))
        return End(False, "stopped; jobs that are submitted go on")

    def take_again(self) -> None:
        """Take the numbers of failed points again whose jobs have ended.

        A result may have come late, or the experiment's file be another one than it was.
        """
        taken, before = 0, self._book.counts()[k.DONE]
        for row in self._book.rows(k.FAILED):
            if self._stop.is_set():
                break
            if row.job and (self._place.point(row.number) / wrapper.ENDED).exists():
                self._take(row)
                taken += 1
        if taken:
            done = self._book.counts()[k.DONE] - before
            self._told(
                f"the numbers of {counted(taken, 'failed point')} were taken again: "
                f"{done or 'none'} {'is' if done == 1 else 'are'} done now"
            )

    def token(self, number: int) -> str:
        """Return the name of a point's job: at most 15 characters, PBS's least limit."""
        return f"x{self._id}-{number}"

    def _why_not_more(self) -> str:
        limits = self._definition.limits
        if self._end is not None and time.monotonic() >= self._end:
            return "its hours are over (limits.hours, --hours)"
        if self._failures >= limits.failures:
            return (
                f"{counted(self._failures, 'failed point')} in a row (limits.failures): see "
                "vmgr experiment status"
            )
        return ""

    def _adopt(self) -> None:
        """Find the jobs of points whose submission was not noted to its end."""
        for row in self._book.rows(k.SUBMITTING):
            point = self._place.point(row.number)
            job = b.job_id(point)
            if not _ID.fullmatch(job):
                job = _claimed(point)
            if job:
                self._book.submitted(row.number, job, time.time())

    def _collect(self) -> None:
        for row in self._book.rows(k.SUBMITTED):
            if (self._place.point(row.number) / wrapper.ENDED).exists():
                reported = self._definition.report and not self._cells[row.cell].get("bare")
                if row.missed or not reported:  # a report is whole when its job is gone
                    self._over(row)

    def _over(self, row: Row) -> None:
        self._count(row, self._take(row))

    def _take(self, row: Row) -> str:
        """Take the numbers of a job that has ended; return why its point has failed, if it has."""
        point = self._place.point(row.number)
        ended = self._collector.ended(row, point, bool(self._cells[row.cell].get("bare")))
        if row.begun is None or ended.reason != row.reason:
            self._book.over(row.number, ended.values, ended.begun, ended.machine, ended.reason)
        return ended.reason

    def _count(self, row: Row, reason: str) -> None:
        """Count failures in a row, and tell of each reason once."""
        self._failures = self._failures + 1 if reason else 0
        like = re.sub("[0-9]+", "0", reason)  # of another job, another time
        if reason and like not in self._reasons and len(self._reasons) < REASONS:
            self._reasons.add(like)
            point = self._place.point(row.number)
            self._told(f"point {row.number} has failed: {printable(reason, 400)} ({point})")

    def _ask(self) -> None:
        """Ask which jobs there are; settle what is unsure, and give up what is lost."""
        before = self._questions.problem
        names = self._questions.ask()
        if names is None:
            if self._questions.problem != before:
                self._told(f"the batch system does not answer: {self._questions.problem}")
            return
        self._refused = 0
        for row in self._book.rows(k.SUBMITTING):
            self._settle(row, names.get(self.token(row.number), ""))
        gone = [r for r in self._book.rows(k.SUBMITTED) if self.token(r.number) not in names]
        for row in gone:
            there = (self._place.point(row.number) / wrapper.ENDED).exists()
            if row.missed + 1 >= MISSES and not there:
                self._fail(row, self._lost(row))
        self._book.missed([row.number for row in gone])

    def _settle(self, row: Row, job: str) -> None:
        job = job or _claimed(self._place.point(row.number))
        if job:
            self._book.submitted(row.number, job, time.time())
        elif row.tries >= TRIES:
            self._fail(row, f"not submitted, {row.tries} times: {row.reason or 'nothing was said'}")
        else:
            self._book.again(row.number, row.reason)

    def _lost(self, row: Row) -> str:
        point = self._place.point(row.number)
        begun = (point / wrapper.BEGUN).exists()
        said = b.tail(point / b.JOB_ERR) or b.tail(point / b.JOB_OUT)
        how = "began and did not end" if begun else "did not begin"
        why = said or "the node was lost, the job was cancelled, or a disk was full"
        return f"job {row.job} is gone, its script {how}: {why}"

    def _fail(self, row: Row, reason: str) -> None:
        self._book.failed(row.number, reason)
        self._count(row, reason)

    def _submit(self) -> None:
        """Submit as many points as there may be jobs."""
        room = self._definition.limits.jobs - self._book.counts()[k.SUBMITTED]
        for row in self._book.rows(k.WAITING, limit=max(0, room)):
            if self._stop.is_set() or self._refused >= IN_A_ROW or self._why_not_more():
                return
            self._submit_one(row)

    def _submit_one(self, row: Row) -> None:
        point = self._place.point(row.number)
        try:
            job = self._prepare(row, point)
        except OSError as error:
            raise disk(error) from None
        naming = (self._batch.naming, self.token(row.number))
        argv = b.arguments(naming, self._definition, self._cells[row.cell], point, job)
        self._book.begin(row.number)
        with b.locked(self._place.top / "submit.lock", wait=True) as lock:
            try:
                code = b.submit(self._batch, argv, point, lock)
            except OSError as error:
                raise disk(error) from None
        found = b.job_id(point)
        if code == 0 and found:
            self._refused = 0
            self._book.submitted(row.number, found, time.time())
            return
        said = b.tail(point / b.VSUB_ERR) or f"vsub ended with {code}"
        if code == b.REFUSED:
            self._fail(row, f"refused: {said}")
        else:  # it may be there all the same: the next list of jobs tells
            self._refused += 1
            self._book.note_reason(row.number, said)

    def _prepare(self, row: Row, point: Path) -> Path:
        """Write a point's job script; return it."""
        point.mkdir(parents=True, exist_ok=True)
        (point / b.VSUB_OUT).unlink(missing_ok=True)  # an earlier try's
        cell = self._cells[row.cell]
        runs = script_of(self._place, self._definition, cell)
        if runs not in self._directives:
            self._directives[runs] = wrapper.directives(runs.read_bytes())
        of_cell = {a[4:]: v for a, v in cell.items() if a.startswith("env.")}
        environment = {
            "EXPERIMENT_ROOT": self._root,
            "EXPERIMENT_POINT": str(row.number),
            "EXPERIMENT_REPETITION": str(row.repetition),
            **self._definition.env,
            **of_cell,
        }
        path = point / "job.sh"
        path.write_bytes(wrapper.script(self._directives[runs], runs, point, environment))
        path.chmod(0o755)
        return path


def _claimed(point: Path) -> str:
    """Return which job has begun to run a point; empty: none."""
    try:
        return printable(str((point / wrapper.CLAIM).readlink()), 100)
    except OSError:
        return ""
