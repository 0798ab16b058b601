"""Load a report from kept records, and write a page to a file."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from vtorque_core.api import Refused, name_errors, printable
from vtorque_core.api.kept_records import Place
from vtorque_report.read import MAX_LINES, Attempt, attempt
from vtorque_report.report import Report

FEW_LINES = 200  # samples per guest: enough for sums and for the maximum memory


def report(
    kept: Sequence[Path | Place],
    now: float,
    max_lines: int = MAX_LINES,
    status: int | None = None,
) -> Report:
    """Return the report of one job from the records of one or more nodes.

    ``kept`` are the nodes' records, or directories with copies. ``status`` replaces the script's
    exit status in the first record. Raises Refused if a record is unreadable, if the records
    belong to several job attempts, or if two records belong to the same node.
    """
    found: list[Attempt] = []
    for each in kept:
        where = printable(str(each.directory if isinstance(each, Place) else each))
        with name_errors(where, fault=Refused):
            one = attempt(each, now, max_lines)
        if one is None:
            raise Refused(f"{where}: cannot read its job.json")
        if found and (one.job, one.attempt) != (found[0].job, found[0].attempt):
            raise Refused(
                f"{where} belongs to job {one.job}, attempt {one.attempt}, not to "
                f"{found[0].job}, attempt {found[0].attempt}"
            )
        if one.node in [other.node for other in found]:
            raise Refused(f"{where} belongs to node {one.node}, which is already in the report")
        found.append(one)
    if status is not None:
        found[0] = replace(found[0], status=status)
    return Report(tuple(found), now)


def write(path: Path, content: bytes) -> None:
    """Write a file atomically, with mode 0600. A symbolic link is replaced, not followed.

    ``-`` is standard output. Raises Refused if the file cannot be written.
    """
    if str(path) == "-":
        with os.fdopen(os.dup(1), "wb") as out:
            out.write(content)
        return
    fresh = ""
    try:
        descriptor, fresh = tempfile.mkstemp(prefix=".report-", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(fresh).replace(path)
    except OSError as error:
        if fresh:
            Path(fresh).unlink(missing_ok=True)
        raise Refused(f"{printable(str(path))}: {error.strerror}") from None


def tolerate(stream: TextIO) -> None:
    """Make a stream print ``?`` instead of characters that its encoding lacks."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
