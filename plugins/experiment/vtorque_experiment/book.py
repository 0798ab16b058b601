"""The book of an experiment: an SQLite database of its points.

A point is *waiting*, then *submitting*, then *submitted*, then *done* or *failed* with a reason.
:meth:`Book.begin` returns when *submitting* is on disk. Other changes may be saved later, at the
latest when the book is closed. If these changes are lost, the next run of the experiment finds the
jobs by their files and by the batch system's list.

This module reads the database's file into memory, and replaces the file to save the book. SQLite
works only in memory, because guests can write beside the file. A guest could write a rollback
journal there. Such a journal can name any file as its super-journal, and SQLite deletes the
super-journal (https://www.sqlite.org/fileformat2.html, "The Rollback Journal").
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Refused, name_errors, printable
from vtorque_experiment import files
from vtorque_experiment.matrix import Cell, MatrixPoint

SCHEMA = 1
WAITING, SUBMITTING, SUBMITTED, DONE, FAILED = (
    "waiting", "submitting", "submitted", "done", "failed",
)  # fmt: skip
MAX_BOOK = 1 << 30  # bytes; vmgr holds the book in memory
_SHARE = 0.1  # fraction of a run's time for saving the book
STATES = (WAITING, SUBMITTING, SUBMITTED, DONE, FAILED)
_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE cells (cell INTEGER PRIMARY KEY, axes TEXT NOT NULL);
CREATE TABLE points (
    number INTEGER PRIMARY KEY, cell INTEGER NOT NULL, repetition INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting', job TEXT NOT NULL DEFAULT '',
    tries INTEGER NOT NULL DEFAULT 0, missed INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '', submitted REAL, begun REAL, machine TEXT NOT NULL DEFAULT '');
CREATE INDEX by_state ON points (state, number);
CREATE TABLE numbers (
    point INTEGER NOT NULL, name TEXT NOT NULL, value REAL NOT NULL, PRIMARY KEY (point, name)
) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class PointRow:
    """A point and its state.

    ``cell`` is the index of its combination. ``submitted`` and ``begun`` are Unix times.
    ``missed`` counts the batch system's job lists that did not contain the point's job.
    """

    number: int
    cell: int
    repetition: int
    state: str
    job: str
    tries: int
    missed: int
    reason: str
    submitted: float | None
    begun: float | None
    machine: str


class Book:
    """The open database of an experiment. SQLite errors are raised as HostFault with advice."""

    def __init__(self, path: Path) -> None:
        """Open an experiment's database.

        Raises:
            Refused: the file is damaged, too large, or has another schema version.
            HostFault: the file cannot be read.
        """
        self._path = path
        self._is_saved, self._next_save = True, 0.0
        with name_errors(printable(str(path))):
            content = files.read(path.parent, path.name, most=MAX_BOOK + 1)
        if len(content) > MAX_BOOK:
            raise Refused(f"{printable(str(path))}: is larger than {MAX_BOOK >> 20} MiB")
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        try:
            self._db.execute("PRAGMA trusted_schema=OFF")  # a guest may have written it
            self._db.deserialize(content)
            about = dict(self._db.execute("SELECT name, value FROM about"))
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise Refused(
                f"{printable(str(path))}: {error}; it is not a results.sqlite of an experiment"
            ) from None
        if about.get("schema") != str(SCHEMA):
            self._db.close()
            raise Refused(
                f"{printable(str(path))}: has schema {printable(about.get('schema', 'none'))}, "
                f"but this vmgr reads {SCHEMA}: use the version of vTorque that wrote it"
            )

    def close(self) -> None:
        """Save and close the database. Raises HostFault."""
        with contextlib.closing(self._db):
            self.save()

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise self._write_error(str(error)) from None
        except sqlite3.Error as error:
            raise HostFault(f"{printable(str(self._path))}: is damaged: {error}") from None

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        with self._convert_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        self._is_saved = False
        self.save_if_due()

    def save(self) -> None:
        """Write the database to its file if it has changed. Raises HostFault."""
        if self._is_saved:
            return
        began = time.monotonic()
        try:
            content = self._db.serialize()
            files.write(self._path.parent, self._path.name, content=content, sync=True)
        except OSError as error:
            raise self._write_error(error.strerror or str(error)) from None
        ended = time.monotonic()
        self._is_saved, self._next_save = True, ended + (ended - began) / _SHARE

    def save_if_due(self) -> None:
        """Save the database, unless the last save was a short time ago. Raises HostFault."""
        if time.monotonic() >= self._next_save:
            self.save()

    def _write_error(self, why: str) -> HostFault:
        return HostFault(
            f"{printable(str(self._path))}: {why}; no results are lost: free disk space or "
            "correct the permissions, then run vmgr experiment resume"
        )

    def notes(self) -> dict[str, str]:
        """Return the notes on the whole experiment, such as its seed, by name."""
        return dict(self._fetch_all("SELECT CAST(name AS TEXT), CAST(value AS TEXT) FROM about"))

    def note(self, name: str, value: str) -> None:
        """Save a note on the whole experiment."""
        with self._all_or_none():
            self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, value))

    def cells(self) -> list[Cell]:
        """Return the combinations, sorted by index."""
        rows = self._fetch_all("SELECT CAST(axes AS TEXT) FROM cells ORDER BY cell")
        try:
            found = [json.loads(axes) for (axes,) in rows]
        except (ValueError, RecursionError):
            found = [None]
        if not all(isinstance(cell, dict) for cell in found):
            raise Refused(f"{printable(str(self._path))}: is damaged: the table 'cells' is invalid")
        return found

    def counts(self) -> dict[str, int]:
        """Return the number of points in each state."""
        found = dict(self._fetch_all("SELECT state, count(*) FROM points GROUP BY state"))
        return {state: found.get(state, 0) for state in STATES}

    def rows(self, *states: str, limit: int = -1) -> list[PointRow]:
        """Return the points in these states (default: all), in the order of submission."""
        marks = ",".join("?" * len(states))
        where = f"WHERE state IN ({marks})" if states else ""
        kinds = {"int": "INTEGER", "str": "TEXT"}  # a guest may have stored other types
        typed = (f"CAST({f.name} AS {kinds.get(str(f.type), 'REAL')})" for f in fields(PointRow))
        query = f"SELECT {', '.join(typed)} FROM points {where} ORDER BY number LIMIT ?"  # noqa: S608 - ours
        return [PointRow(*row) for row in self._fetch_all(query, *states, limit)]

    def numbers(self) -> dict[int, dict[str, float]]:
        """Map each point to its numbers by name."""
        found: dict[int, dict[str, float]] = {}
        typed = "CAST(point AS INTEGER), CAST(name AS TEXT), CAST(value AS REAL)"
        for point, name, value in self._fetch_all(f"SELECT {typed} FROM numbers"):  # noqa: S608 - ours
            found.setdefault(point, {})[name] = value
        return found

    def begin(self, number: int) -> None:
        """Record that a point is about to be submitted, and save the database."""
        self._set("state='submitting', tries=tries+1, missed=0, reason=''", (), number)
        self.save()

    def record_submission(self, number: int, job: str, when: float) -> None:
        """Record the job id of a submitted point; ``when`` is the Unix time."""
        self._set("state='submitted', job=?, submitted=?, missed=0", (job, when), number)

    def record_retry(self, number: int, reason: str) -> None:
        """Record why a point was not submitted. The point waits for another try."""
        self._set("state='waiting', reason=?", (reason,), number)

    def note_reason(self, number: int, reason: str) -> None:
        """Record vsub's error message. vsub may still have submitted the point's job."""
        self._set("reason=?", (reason,), number)

    def record_missing(self, numbers: Iterable[int]) -> None:
        """Record that the batch system's list lacks the jobs of these points."""
        changed = [(number,) for number in numbers]
        if not changed:
            return
        with self._all_or_none():
            self._db.executemany("UPDATE points SET missed=missed+1 WHERE number=?", changed)

    def record_failure(self, number: int, reason: str) -> None:
        """Record that a point has failed."""
        self._set("state='failed', reason=?", (reason,), number)

    def record_end(
        self, number: int, values: Mapping[str, float], begun: float, machine: str, reason: str
    ) -> None:
        """Record the numbers of an ended point. A non-empty ``reason`` marks it as failed."""
        with self._all_or_none():
            self._db.execute(
                "UPDATE points SET state=?, reason=?, begun=?, machine=? WHERE number=?",
                (FAILED if reason else DONE, reason, begun, machine, number),
            )
            self._db.execute("DELETE FROM numbers WHERE point=?", (number,))
            rows = [(number, name, value) for name, value in values.items()]
            self._db.executemany("INSERT INTO numbers VALUES (?, ?, ?)", rows)

    def forget(self, number: int) -> None:
        """Reset a failed point, so that it is submitted again."""
        with self._all_or_none():
            self._db.execute("DELETE FROM numbers WHERE point=?", (number,))
            self._db.execute(
                "UPDATE points SET state='waiting', job='', tries=0, missed=0, reason='', "
                "submitted=NULL, begun=NULL, machine='' WHERE number=?",
                (number,),
            )

    def _fetch_all(self, query: str, *values: object) -> list[Any]:
        with self._convert_errors():
            return self._db.execute(query, values).fetchall()

    def _set(self, what: str, values: Sequence[object], number: int) -> None:
        with self._all_or_none():
            changed = f"UPDATE points SET {what} WHERE number=?"  # noqa: S608 - our own words
            self._db.execute(changed, (*values, number))


def make(
    path: Path, about: Mapping[str, str], cells: Sequence[Cell], points: Iterable[MatrixPoint]
) -> None:
    """Create an experiment's database with all points, atomically. Raises HostFault, OSError."""
    with tempfile.TemporaryDirectory(prefix="vtorque-experiment-") as scratch:
        fresh = Path(scratch, path.name)
        with name_errors(printable(str(path)), sqlite3.OperationalError):
            db = sqlite3.connect(fresh)
            with contextlib.closing(db), db:
                db.executescript(_TABLES)
                db.executemany(
                    "INSERT INTO about VALUES (?, ?)", [*about.items(), ("schema", str(SCHEMA))]
                )
                db.executemany("INSERT INTO cells VALUES (?, ?)", enumerate(map(json.dumps, cells)))
                db.executemany(
                    "INSERT INTO points (number, cell, repetition) VALUES (?, ?, ?)",
                    ((p.number, p.cell, p.repetition) for p in points),
                )
        files.write(path.parent, path.name, content=fresh.read_bytes(), sync=True)
