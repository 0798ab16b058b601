"""Print tables, with colors on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence

_MOST_RICH = 200  # rows; rich needs 0.5 ms of CPU time for each


def show(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    right: Collection[str] = (),
) -> None:
    """Print rows below their column names, then notes about problems.

    ``right`` names the columns of numbers.
    """
    if os.isatty(1) and len(rows) + len(notes) <= _MOST_RICH:
        _show_rich(columns, rows, notes, right)
        return
    text = [*align_rows([columns, *rows] if rows else []), *notes]
    sys.stdout.write("".join(f"{line}\n" for line in text))


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one aligned line per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{width}}}" for width in widths).format
    return [line(*row).rstrip() for row in rows]


def _show_rich(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    right: Collection[str],
) -> None:
    from rich import box  # noqa: PLC0415 - 60 ms, for a terminal only
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    for cells in rows:
        table.add_row(Text(cells[0], style="bold"), *(Text(cell) for cell in cells[1:]))
    if rows:
        console.print(table)
    for note in notes:
        console.print(Text(note, style="red"), soft_wrap=True)
