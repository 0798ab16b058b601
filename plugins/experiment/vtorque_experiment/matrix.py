"""Compute an experiment's combinations, and its points in the order of submission."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vtorque_core.api import Refused
from vtorque_experiment.definition import Definition, Scalar

MAX_POINTS = 1_000_000
Cell = Mapping[str, Scalar]
"""A combination: maps each axis to its value. On bare metal, it has no ``-vm`` axes."""


@dataclass(frozen=True, slots=True)
class MatrixPoint:
    """A run of the combination with the index ``cell``. ``repetition`` counts from 0."""

    number: int
    cell: int
    repetition: int


def cells(definition: Definition, where: str = "the file") -> list[Cell]:
    """Return the distinct combinations of the matrix that ``exclude`` does not omit.

    Raises Refused if ``exclude`` omits all, or if the matrix has more than MAX_POINTS points.
    """
    size = 1
    for values in definition.matrix.values():
        size *= len(values)
    if size * definition.repetitions > MAX_POINTS:
        raise Refused(
            "has too many points",
            key="matrix",
            value=str(size * definition.repetitions),
            limit=str(MAX_POINTS),
            where=where,
            fix="use fewer values, or fewer repetitions",
        )
    found: dict[tuple[tuple[str, Scalar], ...], Cell] = {}
    for values in itertools.product(*definition.matrix.values()):
        cell = dict(zip(definition.matrix, values, strict=True))
        bare = cell.get("bare") is True
        unasked = {a for a, value in cell.items() if a.startswith("vm.") and (bare or value == "")}
        cell = {axis: value for axis, value in cell.items() if axis not in unasked}
        if not any(_matches(cell, each) for each in definition.exclude):
            found.setdefault(tuple(cell.items()), cell)
    if not found:
        raise Refused(
            "excludes all combinations of the matrix",
            key="exclude",
            value=str(len(definition.exclude)),
            where=where,
            fix="remove an entry of exclude",
        )
    return list(found.values())


def _matches(cell: Cell, pattern: Cell) -> bool:
    return all(axis in cell and cell[axis] == value for axis, value in pattern.items())


def order_points(cells: int, repetitions: int, seed: int) -> Iterator[MatrixPoint]:
    """Yield the points in the order of submission, numbered from 1.

    This is a randomized block design: each repetition has every combination once, in a new random
    order. If the machine becomes slower, for example, this affects all combinations equally.
    """
    draw = random.Random(seed)  # noqa: S311 - reproducible order
    numbers = itertools.count(1)
    for repetition in range(repetitions):
        block = list(range(cells))
        draw.shuffle(block)
        for cell in block:
            yield MatrixPoint(next(numbers), cell, repetition)


def label(cell: Cell, axes: Sequence[str] = ()) -> str:
    """Return a combination as text, such as ``bare`` or ``vcpus=2 SIZE=10``.

    ``axes`` limits the text to these axes.
    """
    words = []
    for axis, value in cell.items():
        if axes and axis not in axes:
            continue
        if axis == "bare":
            words.append("bare" if value else "guest")
        else:
            words.append(f"{axis.partition('.')[2] or axis}={value}")
    return " ".join(words) or "all"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 point`` or ``2 points``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
