"""Generate few rows that contain every pair of values of any two factors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

_TRIES = 40  # candidates for each row


def rows(factors: Mapping[str, Sequence[Any]], seed: int = 1) -> list[dict[str, Any]]:
    """Return rows of a value for each factor, the same ones for the same arguments.

    Greedy: each row begins with a pair that is not covered yet and is the best of several that are
    completed at random (Cohen and others, The AETG System, IEEE TSE 23/7, 1997).
    """
    dice = random.Random(seed)  # noqa: S311 - not a secret
    names = list(factors)
    open_ = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    found = []
    while open_:
        first = min(open_)
        best, most = {}, -1
        for _ in range(_TRIES):
            row = {name: dice.randrange(len(factors[name])) for name in names} | dict(first)
            met = len(open_ & _pairs(row))
            if met > most:
                best, most = row, met
        open_ -= _pairs(best)
        found.append({name: factors[name][value] for name, value in best.items()})
    return found


def _pairs(row: Mapping[str, int]) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))
