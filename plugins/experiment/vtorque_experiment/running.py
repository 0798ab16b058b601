"""A run of an experiment by a command: its lock, its signals, what is told meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import printable
from vtorque_experiment import (
    batch,
    book,
    check,
    definition,
    ended,
    figures,
    matrix,
    tables,
    versions,
)
from vtorque_experiment.book import Book
from vtorque_experiment.place import Place
from vtorque_experiment.results import Results, read
from vtorque_experiment.runner import Runner

EVERY = 30.0  # seconds between two lines where nobody watches


@dataclass(frozen=True)
class Ended:
    """How a run has ended; ``status``: as of :func:`status`."""

    finished: bool
    why: str
    directory: Path
    status: dict[str, Any]


def run(
    config: Path, place: Place, hours: float | None, told: Callable[[str], None],
    *, failed: bool = False,
) -> Ended:  # fmt: skip
    """Run an experiment until it is over, or a signal or a limit stops it.

    Raises HostFault (another runs it, the disk), Refused, ConfigError.
    """
    found = definition.read(place.definition)
    with batch.locked(place.top / "run.lock", wait=False), _stopped() as stop:
        there = Book(place.database)
        try:
            with _progress(sum(there.counts().values())) as seen:
                runner = Runner(
                    place, found, there, batch.of_site(config, found.limits.poll),
                    ended.Collector(found, ended.reporter(config)), told=told, stop=stop,
                    hours=hours or found.limits.hours, seen=seen,
                )  # fmt: skip
                runner.take_again()
                if failed:
                    _forget(there, place)
                end = runner.run()
        finally:
            there.close()
        with contextlib.suppress(OSError, ValueError):
            versions.note_end(config, place.versions)
    return Ended(end.finished, end.why, place.top, status(place.top))


def status(directory: Path) -> dict[str, Any]:
    """Return how far an experiment is, and each failed point. Raises Refused."""
    results = read(directory)
    counts = {s: sum(row.state == s for row in results.rows) for s in book.STATES}
    failed = [
        {
            "point": row.number, "job": row.job, "combination": results.label(row.cell),
            "reason": printable(row.reason, 500),
        }
        for row in results.rows if row.state == book.FAILED
    ]  # fmt: skip
    return {
        "title": results.title, "directory": str(results.place.top),
        "state": tables.state(results), "points": counts, "seed": results.about.get("seed", ""),
        "failed": failed,
    }  # fmt: skip


def data(results: Results, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of each combination for JSON."""
    table, emulated = results.table(), results.emulated()
    return [
        {
            "combination": dict(cell), "failed": results.failed(number),
            "emulated": emulated.get(number, 0),
            "numbers": {
                name: asdict(figures.of(table[number, name])) | {"unit": results.unit(name)}
                for name in names if (number, name) in table
            },
        }
        for number, cell in enumerate(results.cells)
    ]  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """What would be run. ``refused``: what vsub says, by the numbers of ``cells``."""

    definition: definition.Definition
    cells: Sequence[matrix.Cell]
    refused: Mapping[int, str]

    @property
    def hopeless(self) -> bool:
        """Whether vsub refuses all that would run in a guest, or all there is."""
        guests = [n for n, cell in enumerate(self.cells) if cell.get("bare") is not True]
        return bool(self.refused) and all(n in self.refused for n in guests)

    def reasons(self) -> list[str]:
        """Return what is refused in lines: each reason once."""
        labels: dict[str, list[str]] = {}
        for number, reason in self.refused.items():
            labels.setdefault(reason, []).append(matrix.label(self.cells[number]))
        return [
            f"{printable(those[0], 200)}{f' and {len(those) - 1} more' if those[1:] else ''}: "
            f"{reason}"
            for reason, those in labels.items()
        ]

    def lines(self) -> list[str]:
        """Return it in lines."""
        points, times = len(self.cells) * self.definition.repetitions, self.definition.repetitions
        cells = matrix.counted(len(self.cells), "combination")
        head = f"{matrix.counted(points, 'point')}: {cells}"
        return [
            f"{head}, {'once' if times == 1 else f'{times} times'}",
            *(f"  {matrix.label(cell)}" for cell in self.cells),
            *(() if self.refused else ("vsub refuses none of them",)),
        ]

    def data(self) -> dict[str, Any]:
        """Return it for JSON."""
        refused = [
            {"combination": dict(self.cells[number]), "reason": reason}
            for number, reason in self.refused.items()
        ]
        points = len(self.cells) * self.definition.repetitions
        return {"points": points, "combinations": [*map(dict, self.cells)], "refused": refused}


def planned(config: Path, file: Path, told: Callable[[str], None]) -> Planned:
    """Return what an experiment would run, and what of it vsub would refuse.

    ``told`` is called with vsub's warnings. Raises Refused, ConfigError, HostFault.
    """
    found = definition.read(file)
    cells = matrix.cells(found, printable(str(file)))
    asked = batch.of_site(config, found.limits.poll)
    return Planned(found, cells, check.refused(file, found, cells, asked, told))


def _forget(there: Book, place: Place) -> None:
    """Have failed points run again; what is left of the first time stays beside."""
    for row in there.rows(book.FAILED):
        point = place.point(row.number)
        number = 1
        while (old := point.with_name(f"{point.name}.old{number}")).exists():
            number += 1
        with contextlib.suppress(FileNotFoundError):
            point.rename(old)
        there.forget(row.number)


@contextlib.contextmanager
def _stopped() -> Iterator[threading.Event]:
    """Give an event that the signals to end set; a second one ends at once."""
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
    """Give what shows the counts: a bar on a terminal, else a line now and then."""
    if os.isatty(2):
        from rich.console import Console  # noqa: PLC0415 - 60 ms, for a terminal only
        from rich.progress import Progress  # noqa: PLC0415

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("points", total=total)

            def draw(counts: dict[str, int]) -> None:
                bar.update(task, completed=_over(counts), description=_said(counts))

            yield draw
        return
    told, before = time.monotonic(), ""

    def line(counts: dict[str, int]) -> None:
        nonlocal told, before
        said = _said(counts)
        if said != before and time.monotonic() - told >= EVERY:
            told, before = time.monotonic(), said
            sys.stderr.write(f"vmgr experiment: {_over(counts)} of {total} points: {said}\n")

    yield line


def _over(counts: dict[str, int]) -> int:
    return counts[book.DONE] + counts[book.FAILED]


def _said(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)
