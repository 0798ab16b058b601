"""Run an experiment from a command, with lock, signals and progress display."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, printable
from vtorque_experiment import (
    batch,
    book,
    check,
    definition,
    end_collector,
    figures,
    files,
    matrix,
    plan,
    tables,
    versions,
)
from vtorque_experiment.book import Book
from vtorque_experiment.place import ResultsDirectory
from vtorque_experiment.results import Results, read
from vtorque_experiment.runner import Runner
from vtorque_report import units

EVERY = 30.0  # seconds between two progress lines without a terminal


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        finished: true if every point is done or failed.
        why: the reason if the run stopped early, or empty.
        status: the result of :func:`status`.
    """

    finished: bool
    why: str
    directory: Path
    status: dict[str, Any]


def run(
    config: Path, place: ResultsDirectory, hours: float | None, told: Callable[[str], None],
    *, failed: bool = False, new_plan: plan.ExperimentPlan | None = None, accept: str = "",
) -> RunResult:  # fmt: skip
    """Run an experiment until it is complete, or until a signal or limit stops it.

    Args:
        config: the site config.
        place: the experiment's directory.
        hours: time limit; None: no limit.
        told: called with progress messages.
        failed: run failed points again.
        new_plan: the plan of a new experiment; None to resume one.
        accept: a plan's seal (its hash). The plan with this seal is submitted even if this host
            did not store the seal.

    Raises:
        HostFault: another vmgr runs the experiment, or the disk fails.
        Refused, ConfigError: the plan or the config is invalid.
    """
    found = definition.read_copy(place.definition) if new_plan is None else new_plan.definition
    if new_plan is not None:
        try:
            plan.keep_seal(new_plan)
        except HostFault as error:
            told(f"{error}; vmgr experiment resume will require --accept")
    with batch.hold_lock(place.top / "run.lock", wait=False), _stop_event() as stop:
        there = Book(place.database)
        try:
            with _progress(sum(there.counts().values())) as seen:
                runner = Runner(
                    place, found, there, batch.site_batch(config, found.limits.poll),
                    end_collector.Collector(found, end_collector.reporter(config)), told=told,
                    stop=stop, hours=hours or found.limits.hours, seen=seen, plan=new_plan,
                    is_accepted=functools.partial(_is_accepted, accept=accept),
                )  # fmt: skip
                runner.retake_numbers()
                if failed:
                    _forget(there, place)
                end = runner.run()
                if runner.plan and end.finished and not there.counts()[book.FAILED]:
                    plan.delete_seal_and_copy(runner.plan)
        finally:
            there.close()
        with contextlib.suppress(OSError, ValueError):
            versions.note_end(config, place.versions)
    return RunResult(end.finished, end.why, place.top, status(place.top))


def _is_accepted(found: plan.ExperimentPlan, accept: str) -> bool:
    """Return whether the plan may be submitted: whether this host has the plan's seal (hash).

    This host stores the seal when the user creates or accepts the plan. If ``accept`` equals the
    seal, the user accepts the plan now, and this function stores the seal.
    """
    if accept == found.seal:
        plan.keep_seal(found)
    return plan.has_seal(found)


def status(directory: Path) -> dict[str, Any]:
    """Return the progress of an experiment and its failed points. Raises Refused."""
    results = read(directory)
    counts = {s: sum(row.state == s for row in results.rows) for s in book.STATES}
    failed = [
        {
            "point": row.number, "job": printable(row.job, 200),
            "combination": results.label(row.cell), "reason": printable(row.reason, 500),
        }
        for row in results.rows if row.state == book.FAILED
    ]  # fmt: skip
    return {
        "title": results.title, "directory": str(results.place.top),
        "state": tables.state(results), "points": counts, "seed": results.about.get("seed", ""),
        "failed": failed,
    }  # fmt: skip


def data(results: Results, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the statistics of each combination for JSON."""
    table, emulated = results.table(), results.count_emulated()
    return [
        {
            "combination": dict(cell), "failed": results.count_failed(number),
            "emulated": emulated.get(number, 0),
            "numbers": {
                name: asdict(figures.compute_statistics(table[number, name]))
                | {"unit": results.unit(name)}
                for name in names if (number, name) in table
            },
        }
        for number, cell in enumerate(results.cells)
    ]  # fmt: skip


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        cells: the combinations.
        refused: vsub's message for each refused combination, by the index in ``cells``.
    """

    definition: definition.Definition
    cells: Sequence[matrix.Cell]
    refused: Mapping[int, str]

    @property
    def is_hopeless(self) -> bool:
        """True if vsub refuses so much of the experiment that it must not start.

        - If some combinations have guests: vsub refuses all combinations with guests.
        - If all combinations are on bare metal: vsub refuses at least one combination.
        """
        guests = [n for n, cell in enumerate(self.cells) if cell.get("bare") is not True]
        return bool(self.refused) and all(n in self.refused for n in guests)

    def reasons(self) -> list[str]:
        """Return each reason for a refusal once, with the combinations that it concerns."""
        labels: dict[str, list[str]] = {}
        for number, reason in self.refused.items():
            labels.setdefault(reason, []).append(matrix.label(self.cells[number]))
        return [
            f"{printable(those[0], 200)}{f' and {len(those) - 1} more' if those[1:] else ''}: "
            f"{reason}"
            for reason, those in labels.items()
        ]

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        points, times = len(self.cells) * self.definition.repetitions, self.definition.repetitions
        cells = matrix.count_text(len(self.cells), "combination")
        head = f"{matrix.count_text(points, 'point')}: {cells}"
        return [
            f"{head}, {'once' if times == 1 else f'{times} times'}",
            *(f"  {matrix.label(cell)}" for cell in self.cells),
            *(() if self.refused else ("vsub accepts all of them",)),
        ]

    def data(self) -> dict[str, Any]:
        """Return the result for JSON."""
        refused = [
            {"combination": dict(self.cells[number]), "reason": reason}
            for number, reason in self.refused.items()
        ]
        points = len(self.cells) * self.definition.repetitions
        return {"points": points, "combinations": [*map(dict, self.cells)], "refused": refused}


def plan_experiment(
    config: Path, file: Path, told: Callable[[str], None], repetitions: int | None = None
) -> DryRun:
    """Return what an experiment would run, and what vsub would refuse.

    Args:
        config: the site config.
        file: the experiment file.
        told: called with the messages of vsub.
        repetitions: overrides the value in the file.

    Raises:
        Refused, ConfigError, HostFault: as in :func:`run`.
    """
    found = definition.read(file, repetitions)
    cells = matrix.cells(found, printable(str(file)))
    asked = batch.site_batch(config, found.limits.poll)
    return DryRun(found, cells, check.find_refused(file, found, cells, asked, told))


def _forget(there: Book, place: ResultsDirectory) -> None:
    for row in there.rows(book.FAILED):
        point = place.point(row.number)
        number = 1
        while os.path.lexists(point.with_name(f"{point.name}.old{number}")):
            number += 1
        names = point.parent.relative_to(place.top).parts
        with (
            contextlib.suppress(FileNotFoundError), files.directory(place.top, *names) as parent,
        ):  # fmt: skip
            old = f"{point.name}.old{number}"
            os.rename(point.name, old, src_dir_fd=parent, dst_dir_fd=parent)
        there.forget(row.number)


@contextlib.contextmanager
def _stop_event() -> Iterator[threading.Event]:
    """Yield an event that SIGINT, SIGTERM and SIGHUP set. A second signal of a kind ends vmgr."""
    stop = threading.Event()

    def handle(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, action in before.items():
            signal.signal(number, action)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[dict[str, int]], None]]:
    """Yield a function that shows how many points are in each state, as a bar or in lines."""
    pace = Pace(total)
    if os.isatty(2):
        from rich.console import Console  # noqa: PLC0415 - 60 ms, for a terminal only
        from rich.progress import BarColumn, Progress  # noqa: PLC0415 - as above

        with Progress(BarColumn(), "{task.description}", console=Console(stderr=True)) as bar:
            task = bar.add_task("points", total=total)

            def draw(counts: dict[str, int]) -> None:
                done = _count_finished(counts)
                times = _times(*pace.estimate(done, time.monotonic()))
                bar.update(task, completed=done, description=f"{_format_counts(counts)}; {times}")

            yield draw
        return
    told, before, estimated = time.monotonic(), "", False

    def line(counts: dict[str, int]) -> None:
        nonlocal told, before, estimated
        over, now, said = _count_finished(counts), time.monotonic(), _format_counts(counts)
        took, rest = pace.estimate(over, now)
        first = rest is not None and rest >= EVERY and not estimated
        if said != before and (first or now - told >= EVERY):
            told, before, estimated = now, said, rest is not None
            times = _times(took, rest)
            sys.stderr.write(f"vmgr experiment: {over} of {total} points: {said}; {times}\n")

    yield line


class Pace:
    """Elapsed time of a run of ``total`` points, and an estimate of the remaining time."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._first: tuple[int, float] | None = None

    def estimate(self, over: int, now: float) -> tuple[float, float | None]:
        """Return the elapsed and remaining seconds; the latter is None before two points finish.

        Args:
            over: number of finished points.
            now: current time of a monotonic clock, in seconds.
        """
        if self._first is None:  # earlier runs may have finished points
            self._first = over, now
        ended, took = over - self._first[0], now - self._first[1]
        rest = took / ended * (self._total - over) if ended >= 2 else None
        return took, rest


def _times(took: float, rest: float | None) -> str:
    about = f", the rest takes about {units.duration(rest)}" if rest else ""
    return f"{units.duration(took)}{about}"


def _count_finished(counts: dict[str, int]) -> int:
    return counts[book.DONE] + counts[book.FAILED]


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)
