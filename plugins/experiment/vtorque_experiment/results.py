"""Results of an experiment: the values of each number (metric), by combination."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import Refused, printable
from vtorque_experiment import definition
from vtorque_experiment.book import DONE, FAILED, Book, PointRow
from vtorque_experiment.definition import BUILT_IN, Definition, Scalar
from vtorque_experiment.end_collector import EMULATED
from vtorque_experiment.matrix import Cell, label
from vtorque_experiment.place import ResultsDirectory, find_existing

UNITS = {"wall": "s", "wait": "s", "code": ""}


@dataclass(frozen=True)
class Results:
    """The current state of an experiment, running or ended."""

    place: ResultsDirectory
    definition: Definition
    about: Mapping[str, str]
    cells: Sequence[Cell]
    rows: Sequence[PointRow]
    numbers: Mapping[int, Mapping[str, float]]

    @property
    def title(self) -> str:
        """The title of the experiment, or the name of its directory."""
        return self.about.get("title") or self.place.top.name

    @property
    def names(self) -> list[str]:
        """Names of all measured numbers; those from the experiment's file come first."""
        own = [take.name for take in self.definition.takes]
        there = {name for values in self.numbers.values() for name in values}
        return [name for name in (*own, *BUILT_IN) if name in there]

    def unit(self, name: str) -> str:
        """Return the unit of a number."""
        units = {take.name: take.unit for take in self.definition.takes}
        return units.get(name, UNITS.get(name, ""))

    def better_direction(self, name: str) -> str:
        """Return the better direction of a number, ``less`` or ``more``; empty if unknown."""
        said = {take.name: take.better for take in self.definition.takes}
        return said.get(name, "less" if name in ("wall", "wait") else "")

    def table(self) -> dict[tuple[int, str], list[float]]:
        """Return the values that done points measured.

        A key is the index of a combination and the name of a measured number.
        """
        found: dict[tuple[int, str], list[float]] = {}
        for row in self.rows:
            if row.state == DONE:
                for name, value in self.numbers.get(row.number, {}).items():
                    found.setdefault((row.cell, name), []).append(value)
        return found

    def label(self, cell: int) -> str:
        """Return a combination as printable text. The database may contain any text of a guest."""
        return printable(label(self.cell(cell)), 200)

    def cell(self, number: int) -> Cell:
        """Return a combination by its index; empty if the database lacks it."""
        return self.cells[number] if 0 <= number < len(self.cells) else {}

    def count_emulated(self) -> Mapping[int, int]:
        """Return the number of done points without KVM, by combination."""
        return Counter(
            row.cell
            for row in self.rows
            if row.state == DONE and row.machine.endswith(f", {EMULATED}")
        )

    def count_failed(self, cell: int) -> int:
        """Return the number of failed points of a combination."""
        return sum(row.cell == cell and row.state == FAILED for row in self.rows)


def read(directory: Path) -> Results:
    """Read the results in an experiment's directory. Raises Refused."""
    place = find_existing(directory)
    book = Book(place.database)
    try:
        return Results(
            place, definition.read_copy(place.definition), book.notes(), book.cells(), book.rows(),
            book.numbers(),
        )  # fmt: skip
    finally:
        book.close()


def select_numbers(cells: Sequence[Cell], wanted: Sequence[str], where: str) -> list[int]:
    """Return the indexes of the combinations that all ``AXIS=VALUE`` pairs select.

    Raises Refused if none match.
    """
    pairs = [pair.partition("=") for pair in wanted]
    known: dict[str, set[str]] = {}
    for cell in cells:
        for axis, value in cell.items():
            known.setdefault(axis, set()).add(_text(value))
    for axis, _, value in pairs:
        if value not in known.get(axis, set()):
            said = ", ".join(sorted(known.get(axis, known)))
            raise Refused(
                "is not an axis and value of the experiment",
                key=axis,
                value=value,
                where=where,
                fix=f"known: {said}",
            )
    found = [
        number for number, cell in enumerate(cells)
        if all(axis in cell and _text(cell[axis]) == value for axis, _, value in pairs)
    ]  # fmt: skip
    if not found:
        raise Refused(f"{where}: no combination has {' and '.join(wanted)}")
    return found


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
