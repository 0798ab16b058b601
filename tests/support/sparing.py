"""Select the tests that only ``scripts/test --full`` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def each(step: int, rows: Iterable[Any]) -> list[Any]:
    """Return rows for ``parametrize``: every ``step``-th row is always run, the others are full.

    A row that is a tuple has a value for each name.
    """
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)), marks=[pytest.mark.full] * bool(n % step)
        )
        for n, row in enumerate(rows)
    ]
