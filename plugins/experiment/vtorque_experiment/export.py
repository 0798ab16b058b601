"""Export all points of an experiment as CSV, JSON or Parquet, one row per point."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vtorque_core.api import UsageError
from vtorque_experiment.results import Results

FORMATS = ("csv", "json", "parquet")


def rows(results: Results) -> list[dict[str, Any]]:
    """Return a row for each point, with its state, axes and numbers; None for missing values."""
    axes = list(dict.fromkeys(axis for cell in results.cells for axis in cell))
    found = []
    for row in results.rows:
        flat = asdict(row)
        del flat["missed"]
        cell, values = results.cell(row.cell), results.numbers.get(row.number, {})
        flat |= {axis: cell.get(axis) for axis in axes}
        found.append(flat | {name: values.get(name) for name in results.names})
    return found


def export_content(results: Results, kind: str) -> bytes:
    """Return the exported file's content. Raises UsageError for Parquet without pyarrow."""
    found = rows(results)
    if kind == "json":
        return (json.dumps(found, indent=1) + "\n").encode()
    if kind == "parquet":
        return _parquet(found)
    out = io.StringIO(newline="")
    heads = list(found[0])
    writer = csv.DictWriter(out, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in found)
    return out.getvalue().encode("utf-8", "surrogateescape")


def _cell(value: Any) -> Any:
    """Return a value for spreadsheets. Text that a spreadsheet would run as a formula is quoted."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return str(value).lower() if isinstance(value, bool) else value


def _parquet(found: Sequence[dict[str, Any]]) -> bytes:
    try:
        import pyarrow.parquet  # noqa: PLC0415 - large, and optional
    except ImportError:
        raise UsageError(
            "--format parquet needs pyarrow, which is not installed: install it beside vTorque, "
            "or use --format csv"
        ) from None
    columns = {}
    for name in found[0]:
        values = [row[name] for row in found]
        if len({type(value) for value in values if value is not None} - {int, float}) > 0:
            values = [None if value is None else str(value) for value in values]
        columns[name] = values
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content
