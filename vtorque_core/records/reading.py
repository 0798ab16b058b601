"""Read journals. For the format see :mod:`vtorque_core.records.journal`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vtorque_core import __version__
from vtorque_core.api.acquired import Resource
from vtorque_core.api.kept_records import Usage
from vtorque_core.base.errors import VtorqueError, printable
from vtorque_core.base.names import JobAttempt, Paths, boot_id, safe_name

SCHEMA = 1

CORE = "core"
DOMAIN, LEASE, SPARE, TREE = "domain", "lease", "spare", "tree"
CORES = "core"  # the pool of leases of host CPUs
SPARE_PREFIX = "spare-"
"""Prefix of the job ids of warm guests."""
SPARE_XML = "base.xml"
"""File in a warm guest's state directory: XML to compare a job's domain with."""
SUSPENDED = "suspended"  # a phase: see live.suspend
PASSIVE = frozenset({TREE, "file", "overlay", "disk-copy"})
# Kinds that use no leased item: if one cannot be removed, cores and addresses are still released.


class JournalError(VtorqueError):
    """An unreadable journal. The message names file and line."""


class EmptyJournal(JournalError):
    """A journal without a first line: the process that created it died at once."""


class OrphanError(VtorqueError):
    """A record whose kind no loaded plugin knows. The message says what is missing."""


ARRIVES = "arrives"
"""Phase of a start. From this phase on, a migrating guest may run on this node."""


@dataclass(frozen=True)
class JobHeader:
    """First line of a journal.

    Attributes:
        plugins: distribution and version of each participating plugin (``"vtorque-warm 2.0"``).
        ending: plugins with ``vtorque_teardown``; None in older journals.
        off: plugins that ``[[limits]]`` disable for the job.
        spare: name of the process that keeps this warm guest; empty for a job.
    """

    job: JobAttempt
    batch: str
    plugins: Mapping[str, str] = field(default_factory=dict)
    boot: str = field(default_factory=boot_id)
    core: str = __version__
    whole_node: bool = False
    ending: tuple[str, ...] | None = None
    off: tuple[str, ...] = ()
    spare: str = ""

    def line(self) -> dict[str, Any]:
        rest = dataclasses.asdict(self)
        line = {"op": "job", "schema": SCHEMA, **rest.pop("job"), **rest}
        del line["node"]
        return line


@dataclass(frozen=True)
class Record:
    """One acquired resource.

    Attributes:
        guest: index on this node; None: the whole job.
        tries: number of failed releases.
        error: message of the last failed release.
        clock: time of the record in seconds of CLOCK_MONOTONIC.
    """

    seq: int
    plugin: str
    kind: str
    scope: Literal["job", "node"]
    guest: int | None
    needs: tuple[int, ...]
    phase: str
    args: Mapping[str, Any]
    time: float
    tries: int = 0
    error: str = ""
    created: bool = False
    clock: float | None = None

    def line(self) -> dict[str, Any]:
        line = {"op": "acquire", **dataclasses.asdict(self), "t": round(self.time, 3)}
        for later in ("time", "tries", "error", "created"):  # later lines record these
            del line[later]
        return line


@dataclass(frozen=True)
class PhaseMark:
    name: str
    guest: int | None
    time: float
    usage: Usage | None = None


@dataclass(frozen=True)
class JournalState:
    """Contents of a journal. ``size`` excludes an incomplete last line."""

    path: Path
    header: JobHeader
    records: Mapping[int, Record]
    released: frozenset[int]
    phases: tuple[PhaseMark, ...]
    size: int

    @property
    def key(self) -> str:
        return self.path.name.removesuffix(".jsonl")

    @property
    def open(self) -> tuple[Record, ...]:
        return tuple(r for seq, r in sorted(self.records.items()) if seq not in self.released)

    @property
    def leases(self) -> list[Record]:
        return [record for record in self.open if record.kind == LEASE]

    @property
    def phase(self) -> str:
        return next((mark.name for mark in reversed(self.phases) if mark.guest is None), "")

    @property
    def is_suspended(self) -> bool:
        return self.phase == SUSPENDED

    @property
    def guests(self) -> tuple[str, ...]:
        return tuple(str(r.args["name"]) for r in self.records.values() if r.kind == DOMAIN)


def journals(paths: Paths, job_id: str | None = None) -> list[Path]:
    found = sorted(paths.journal.glob("*.jsonl"))
    return [path for path in found if job_id is None or lock_name(path) == safe_name(job_id)]


def walk(
    paths: Paths,
    job_id: str | None = None,
    troubled: Callable[[Path, JournalError], None] | None = None,
) -> Iterator[JournalState]:
    """Yield the state of each journal of this node, or of ``job_id`` only.

    ``troubled`` is called for unreadable and empty journals. Without ``troubled``, an unreadable
    journal raises JournalError, and an empty journal is skipped.
    """
    for path in journals(paths, job_id):
        try:
            yield read(path)
        except FileNotFoundError:
            continue
        except JournalError as error:
            if troubled is not None:
                troubled(path, error)
            elif not isinstance(error, EmptyJournal):
                raise


def claimed_spares(held: Iterable[JournalState]) -> set[str]:
    return {str(r.args["key"]) for state in held for r in state.open if r.kind == SPARE}


def idle_spares(held: Sequence[JournalState]) -> list[JournalState]:
    """Return the unclaimed warm guests among all journals of this node, oldest first."""
    taken = claimed_spares(held)
    found = [s for s in held if s.header.spare and s.key not in taken]

    def start_time(state: JournalState) -> float:
        return min((record.clock or 0.0 for record in state.records.values()), default=0.0)

    return sorted(found, key=start_time)


def find(paths: Paths, job_id: str | None) -> list[JournalState]:
    return sorted(walk(paths, job_id), key=lambda state: state.header.job.attempt)


def lock_name(path: Path) -> str:
    return path.name.removesuffix(".jsonl").rpartition(".")[0]


def try_read(path: Path) -> JournalState | None:
    try:
        return read(path)
    except (FileNotFoundError, EmptyJournal):
        return None


def read(path: Path) -> JournalState:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise
    except OSError as error:  # a disk that fails, a link: other jobs' journals are fine
        raise JournalError(f"{path}: cannot be read ({error.strerror})") from error
    lines, size = _whole_lines(data, path)
    if not lines:
        raise EmptyJournal(f"{path}: empty: the process died before it acquired anything")
    if (schema := lines[0].get("schema")) != SCHEMA:
        raise JournalError(
            f"{path}: has schema {printable(str(schema))} of vtorque-core "
            f"{printable(str(lines[0].get('core')))}, but vtorque-core {__version__} reads schema "
            f"{SCHEMA}: install the version that wrote the journal, then run vtorque reap"
        )
    records: dict[int, Record] = {}
    released: set[int] = set()
    phases: list[PhaseMark] = []
    header = None
    for number, line in enumerate(lines, start=1):
        try:
            if (header is None) != (line["op"] == "job"):
                raise ValueError("the header must be the first line, and only the first")
            if header is None:
                header = _parse_header(line)
            else:
                _add_line(line, records, released, phases)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _corrupt(path, number, error) from None
    assert header is not None  # noqa: S101 - there is a first line
    return JournalState(path, header, records, frozenset(released), tuple(phases), size)


def _corrupt(path: Path, number: int, error: Exception) -> JournalError:
    what = printable(f"{type(error).__name__}: {error}")
    return JournalError(
        f"{path}, line {number}: cannot be read ({what}). The resources of this job are unknown: "
        "release those that the file names by hand, then remove the file"
    )


def _whole_lines(data: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    raw = data.split(b"\n")[:-1]  # what follows the last newline is empty or torn
    parsed: list[dict[str, Any]] = []
    size = 0
    for number, line in enumerate(raw, start=1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(raw) and size + len(line) + 1 == len(data):
                break
            raise _corrupt(path, number, error) from None
        parsed.append(value)
        size += len(line) + 1
    return parsed, size


def _add_line(
    line: dict[str, Any], records: dict[int, Record], released: set[int], phases: list[PhaseMark]
) -> None:
    op = line["op"]
    if op == "acquire":
        record = _parse_record(line)
        if record.seq in records or any(n not in records for n in record.needs):
            raise ValueError("a record's seq is not unique, or its 'needs' has an unknown seq")
        records[record.seq] = record
    elif op == "phase":
        used = Usage(float(line["cpu"]), int(line["mib"])) if "cpu" in line else None
        phases.append(PhaseMark(str(line["name"]), line["guest"], float(line["t"]), used))
    elif op == "released":
        released.add(records[line["seq"]].seq)
    elif op == "created":
        seq = line["seq"]
        records[seq] = dataclasses.replace(records[seq], created=True)
    elif op == "failed":
        seq, tries, error = line["seq"], int(line["try"]), str(line["error"])
        records[seq] = dataclasses.replace(records[seq], tries=tries, error=error)
    else:
        raise ValueError(f"unknown op {op!r}")


def _parse_record(line: dict[str, Any]) -> Record:
    seq, args, guest = line["seq"], line["args"], line["guest"]
    if type(seq) is not int or line["scope"] not in ("job", "node") or not isinstance(args, dict):
        raise ValueError("a record's seq, scope or args is invalid")
    return Record(
        seq=seq,
        plugin=str(line["plugin"]),
        kind=str(line["kind"]),
        scope=line["scope"],
        guest=None if guest is None else int(guest),
        needs=tuple(line["needs"]),
        phase=str(line["phase"]),
        args=args,
        time=float(line["t"]),
        clock=float(line["clock"]) if "clock" in line else None,
    )


def _parse_header(line: dict[str, Any]) -> JobHeader:
    return JobHeader(
        job=JobAttempt(str(line["id"]), int(line["attempt"]), str(line["owner"]), int(line["uid"])),
        batch=str(line["batch"]),
        plugins={str(k): str(v) for k, v in line["plugins"].items()},
        boot=str(line["boot"]),
        core=str(line["core"]),
        whole_node=line.get("whole_node") is True,
        ending=None if line.get("ending") is None else tuple(line["ending"]),
        off=tuple(line.get("off", ())),
        spare=str(line.get("spare", "")),
    )


def reconstruct(record: Record, kind: type[Resource] | None) -> Resource:
    """Return the resource of ``record``, whose class is ``kind``, for its release.

    Raises OrphanError if no loaded plugin knows the record's kind or fields.
    """
    if kind is None:
        raise OrphanError(f"no loaded plugin knows the kind {record.kind}")
    try:
        return kind(**{name: _tuples(value) for name, value in record.args.items()})
    except TypeError as error:
        raise OrphanError(
            f"the record of kind {record.kind} is from another plugin version: {error}"
        ) from None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def arguments(resource: Resource) -> dict[str, Any]:
    if not dataclasses.is_dataclass(resource):
        raise TypeError(f"{type(resource).__name__} is not a dataclass")
    fields = [f for f in dataclasses.fields(resource) if f.metadata.get("journal", True)]
    return {f.name: _plain(getattr(resource, f.name), f.name) for f in fields}


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(v, name) for v in value]
    if value is None or type(value) in (str, bool, int, float):
        return value
    raise TypeError(
        f"field {name} is a {type(value).__name__}, not a JSON value; mark it unjournalled"
    )
