"""What a journal says, read from its file; the format is described in :mod:`vtorque_core.journal`.

Pure but for reading files: nothing here writes, creates or releases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vtorque_core import __version__
from vtorque_core.api_batch import Usage
from vtorque_core.api_node import Resource
from vtorque_core.errors import VtorqueError, printable
from vtorque_core.names import Paths, safe_name

SCHEMA = 1
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Schema SCHEMA-1 to a function that lifts one of its lines to SCHEMA; empty: there was none yet.

``released``, ``failed``, ``created`` and ``phase`` never change: a newer core appends them to an
older journal.
"""

CORE = "core"
DOMAIN, LEASE, TREE = "domain", "lease", "tree"
PASSIVE = frozenset({TREE, "file", "overlay", "disk-copy"})
# use no leased item: one that cannot be removed must not keep cores and addresses from the next job


class JournalError(VtorqueError):
    """A journal cannot be read; the message names file and line."""


class EmptyJournal(JournalError):
    """The process died before the first line was written: nothing was acquired."""


class OrphanError(VtorqueError):
    """No loaded plugin knows this record; the message says what is missing."""


def boot_id() -> str:
    """Return what is different after each reboot (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True)
class JobHeader:
    """Whose journal it is. ``plugins``: name to ``"distribution version"`` of all taking part.

    ``whole_node``: as :class:`vtorque_core.api_batch.BatchJob` has it.
    """

    id: str
    attempt: int
    owner: str
    uid: int
    batch: str
    plugins: Mapping[str, str] = field(default_factory=dict)
    boot: str = field(default_factory=boot_id)
    core: str = __version__
    whole_node: bool = False


@dataclass(frozen=True)
class Record:
    """One acquired resource. ``guest`` is its index on this node, None for the whole job.

    ``tries`` counts failed releases and ``error`` is the last one's; ``created``: create() has
    returned. ``clock``: ``time`` by CLOCK_MONOTONIC (clock_gettime(2)), which nobody sets; it is
    known to all processes of one boot. None in journals of before.
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

    def same(self, kind: str, args: Mapping[str, Any]) -> bool:
        """Return whether it is the same thing: equal kind and arguments."""
        return self.kind == kind and self.args == args


@dataclass(frozen=True)
class PhaseMark:
    """A point of the timeline; ``time`` in Unix seconds. ``usage``: of its guest, until then."""

    name: str
    guest: int | None
    time: float
    usage: Usage | None = None


@dataclass(frozen=True)
class JournalState:
    """What a journal says. ``size``: bytes of whole lines; a torn last line lies beyond."""

    path: Path
    header: JobHeader
    records: Mapping[int, Record]
    released: frozenset[int]
    phases: tuple[PhaseMark, ...]
    size: int

    @property
    def key(self) -> str:
        """The job key (:func:`vtorque_core.names.job_key`) that journal and directories carry."""
        return self.path.name.removesuffix(".jsonl")

    @property
    def open(self) -> tuple[Record, ...]:
        """Records that are not released, in the order of their acquisition."""
        return tuple(r for seq, r in sorted(self.records.items()) if seq not in self.released)

    @property
    def leases(self) -> list[Record]:
        """Open lease records."""
        return [record for record in self.open if record.kind == LEASE]

    @property
    def guests(self) -> tuple[str, ...]:
        """Libvirt names of all domains that were acquired, released or not."""
        return tuple(str(r.args["name"]) for r in self.records.values() if r.kind == DOMAIN)

    def holders(self, seq: int) -> tuple[int, ...]:
        """Return the open records that need record ``seq``: it is held while there are any."""
        return tuple(r.seq for r in self.open if seq in r.needs)


def journals(paths: Paths) -> list[Path]:
    """Return the journals of all jobs on this node, oldest name first; empty without directory."""
    return sorted(paths.journal.glob("*.jsonl"))


def find(paths: Paths, job_id: str | None) -> list[JournalState]:
    """Return the states of a job's journals on this node (None: all), oldest attempt first.

    Raises JournalError for one that cannot be read.
    """
    states = []
    for path in journals(paths):
        if job_id is None or lock_name(path) == safe_name(job_id):
            with contextlib.suppress(FileNotFoundError, EmptyJournal):
                states.append(read(path))
    return sorted(states, key=lambda state: state.header.attempt)


def lock_name(path: Path) -> str:
    """Return what to lock for a journal: as good as its job id, and known if it cannot be read."""
    return path.name.removesuffix(".jsonl").rpartition(".")[0]


def read(path: Path) -> JournalState:
    """Return what the journal says. Changes nothing; works while another process appends.

    Raises FileNotFoundError, EmptyJournal, JournalError (corrupt, or of another version).
    """
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
    upgrade = _upgrade_for(lines[0], path)
    reader = _Reader(path)
    for number, line in enumerate(lines, start=1):
        try:
            reader.line(upgrade(line), first=number == 1)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _corrupt(path, number, error) from None
    return reader.state(size)


def _corrupt(path: Path, number: int, error: Exception) -> JournalError:
    what = printable(f"{type(error).__name__}: {error}")
    return JournalError(
        f"{path}, line {number}: cannot be read ({what}). What this job holds is unknown: look at "
        "the file, release what it names by hand, then remove it"
    )


def _whole_lines(data: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines and their length in bytes, without a torn last one."""
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


def _upgrade_for(first: dict[str, Any], path: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    schema = first.get("schema")
    if schema == SCHEMA:
        return dict
    if schema == SCHEMA - 1 and schema in UPGRADES:
        return UPGRADES[schema]
    raise JournalError(
        f"{path}: schema {printable(str(schema))} of vtorque-core "
        f"{printable(str(first.get('core')))}; this is {__version__} and reads schema {SCHEMA} and "
        "one back: install the version that wrote it, then vtorque reap"
    )


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: JobHeader | None = None
        self.records: dict[int, Record] = {}
        self.released: set[int] = set()
        self.phases: list[PhaseMark] = []

    def line(self, line: dict[str, Any], *, first: bool) -> None:
        op = line["op"]
        if first != (op == "job"):
            raise ValueError("the header must be the first line, once")
        if op == "job":
            self.header = _header(line)
        elif op == "acquire":
            self.acquire(line)
        elif op == "phase":
            used = Usage(float(line["cpu"]), int(line["mib"])) if "cpu" in line else None
            mark = PhaseMark(str(line["name"]), line["guest"], float(line["t"]), used)
            self.phases.append(mark)
        elif op in ("released", "created", "failed"):
            record = self.records[line["seq"]]
            if op == "released":
                self.released.add(record.seq)
            elif op == "created":
                self.records[record.seq] = dataclasses.replace(record, created=True)
            else:
                self.records[record.seq] = dataclasses.replace(
                    record, tries=int(line["try"]), error=str(line["error"])
                )
        else:
            raise ValueError(f"unknown op {op!r}")

    def acquire(self, line: dict[str, Any]) -> None:
        seq, needs, args, guest = line["seq"], line["needs"], line["args"], line["guest"]
        if type(seq) is not int or seq in self.records or line["scope"] not in ("job", "node"):
            raise ValueError("bad seq or scope")
        if any(n not in self.records for n in needs) or not isinstance(args, dict):
            raise ValueError("needs an unknown record")
        self.records[seq] = Record(
            seq=seq,
            plugin=str(line["plugin"]),
            kind=str(line["kind"]),
            scope=line["scope"],
            guest=None if guest is None else int(guest),
            needs=tuple(needs),
            phase=str(line["phase"]),
            args=args,
            time=float(line["t"]),
            clock=float(line["clock"]) if "clock" in line else None,
        )

    def state(self, size: int) -> JournalState:
        assert self.header is not None  # noqa: S101 - line() has seen the first line
        return JournalState(
            path=self.path,
            header=self.header,
            records=self.records,
            released=frozenset(self.released),
            phases=tuple(self.phases),
            size=size,
        )


def _header(line: dict[str, Any]) -> JobHeader:
    return JobHeader(
        id=str(line["id"]),
        attempt=int(line["attempt"]),
        owner=str(line["owner"]),
        uid=int(line["uid"]),
        batch=str(line["batch"]),
        plugins={str(k): str(v) for k, v in line["plugins"].items()},
        boot=str(line["boot"]),
        core=str(line["core"]),
        whole_node=line.get("whole_node") is True,
    )


def reconstruct(record: Record, kinds: Mapping[str, type[Resource]]) -> Resource:
    """Return the resource as ``release()`` needs it; unjournalled fields have their defaults.

    Raises OrphanError: no such kind, or its class does not take these fields.
    """
    kind = kinds.get(record.kind)
    if kind is None:
        raise OrphanError(f"no loaded plugin knows the kind {record.kind}")
    try:
        return kind(**{name: _tuples(value) for name, value in record.args.items()})
    except TypeError as error:
        raise OrphanError(f"kind {record.kind} of another version: {error}") from None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def arguments(resource: Resource) -> dict[str, Any]:
    """Return the journalled fields as they come back from JSON. Raises TypeError for others."""
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
