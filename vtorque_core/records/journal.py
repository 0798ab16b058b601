"""Journal of one job attempt on this node: every resource is recorded before it is acquired.

The journal is ``<state>/journal/<job key>.jsonl``: JSON lines, owned by root, mode 0600. The field
``op`` is the kind of a line. Kinds and their other fields:

    job       The first line. Fields: schema, core, boot, id, attempt, owner, uid, batch, plugins,
              ending.
    acquire   A resource, written and fsynced before its create() runs. Fields: seq, plugin, kind,
              scope, guest, needs, phase, args, t, clock (CLOCK_MONOTONIC).
    created   The resource's create() has returned. Fields: seq.
    released  The resource is released. Fields: seq.
    failed    A release of the resource failed. Fields: seq, error, try.
    phase     A point of the timeline. Fields: name, guest, t; cpu and mib for a guest's usage
              (api.kept_records.Usage).

A node-wide resource may be incomplete if its line ``created`` is missing, so the next job that
needs the resource creates it again. The lines ``released`` and ``failed`` may be missing, because
teardown must work on a full disk.

An incomplete last line is ignored, because create() runs only after a complete line. Any other
invalid line is an error. Hold the job's lock to start or change a journal.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vtorque_core.api.acquired import Resource
from vtorque_core.api.kept_records import Usage
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import node_lock
from vtorque_core.base.names import Paths, boot_id
from vtorque_core.records import reading
from vtorque_core.records.timeline import keep_phases

on_step: Callable[[str], None] = lambda _step: None  # noqa: E731
"""For tests only: called before and after each step, so that they can kill the process there.

The argument is ``before record file``, ``after create file`` and so on. The steps are record,
create, created, release, released and delete. When a phase begins, it is ``phase NAME``.
"""


def step(name: str) -> None:
    on_step(name)


class Journal:
    """An open journal. All methods are thread-safe, because guests boot in parallel threads."""

    def __init__(
        self, paths: Paths, path: Path, descriptor: int, state: reading.JournalState
    ) -> None:
        self.paths = paths
        self.path = path
        self.header = state.header
        self._descriptor = descriptor
        self._size = state.size
        self._records = dict(state.records)
        self._released = set(state.released)
        self._broken = False
        self._mutex = threading.Lock()

    @classmethod
    def start(cls, paths: Paths, header: reading.JobHeader) -> Journal:
        """Create an attempt's journal and sync it to disk. Raises HostFault if it exists."""
        path = paths.journal / f"{header.job.key}.jsonl"
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with safefs.name_errors(f"cannot create {path}"):
            try:
                paths.journal.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, flags, 0o600)
            except FileExistsError:
                raise HostFault(
                    f"{path} exists: this attempt of {header.job.id} was started before and is not "
                    f"released; run vtorque reap {header.job.id}"
                ) from None
        journal = cls(
            paths, path, descriptor, reading.JournalState(path, header, {}, frozenset(), (), 0)
        )
        try:
            journal._write([header.line()], sync=True)
            safefs.fsync(path.parent, os.O_DIRECTORY)
        except BaseException:
            journal.close()
            path.unlink(missing_ok=True)
            raise
        return journal

    @classmethod
    def open(cls, paths: Paths, path: Path) -> Journal:
        """Open an existing journal for appending, and truncate an incomplete last line."""
        state = reading.read(path)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        if os.fstat(descriptor).st_size > state.size:
            os.ftruncate(descriptor, state.size)
        return cls(paths, path, descriptor, state)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, lines: Sequence[Mapping[str, Any]], *, sync: bool) -> None:
        data = b"".join(json.dumps(x, allow_nan=False).encode() + b"\n" for x in lines)
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                written += os.write(self._descriptor, data[written:])
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            # A half-written line in the middle would make the whole journal unreadable.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise HostFault(
                f"cannot write {self.path}: {error.strerror}", stage="journal"
            ) from error
        self._size += len(data)

    def acquire(
        self,
        resource: Resource,
        *,
        plugin: str,
        phase: str,
        guest: int | None = None,
        needs: Iterable[int] = (),
    ) -> int:
        """Write and sync the record, call ``resource.create()``, and return the record's number.

        If ``create()`` raises, the record stays open, and teardown releases the resource. ``needs``
        are numbers of records that teardown releases only after this record. To ``needs``, this
        method adds the directories and leases of the guest and of the job.
        """
        if resource.scope != "node":
            seq = self._record([(resource, guest)], plugin, phase, needs)[0]
            _create(resource)
            self.created(seq)
            return seq
        with node_lock(self.paths):
            others = shared_records(self.paths, resource.kind, reading.arguments(resource))
            seq = self._record([(resource, guest)], plugin, phase, needs)[0]
            _create_shared(resource, others)
            step(f"before created {resource.kind}")
            with self._mutex:
                self._write([{"op": "created", "seq": seq}], sync=False)
            step(f"after created {resource.kind}")
        return seq

    def acquire_leases(
        self, leases: Sequence[tuple[Resource, int | None]], *, phase: str
    ) -> list[int]:
        """Write all leases at once, each with a guest index. Leases need no ``create()``."""
        return self._record(leases, reading.CORE, phase, ())

    def _record(
        self,
        resources: Sequence[tuple[Resource, int | None]],
        plugin: str,
        phase: str,
        needs: Iterable[int],
    ) -> list[int]:
        wanted = list(needs)
        with self._mutex:
            last = max(self._records, default=0)
            new = [
                reading.Record(
                    seq=seq,
                    plugin=plugin,
                    kind=resource.kind,
                    scope=resource.scope,
                    guest=guest,
                    needs=self._needs(resource.kind, guest, wanted),
                    phase=phase,
                    args=reading.arguments(resource),
                    time=time.time(),
                    clock=time.monotonic(),
                )
                for seq, (resource, guest) in enumerate(resources, start=last + 1)
            ]
            for record in new:
                step(f"before record {record.kind}")
            self._write([record.line() for record in new], sync=True)
            self._records.update((record.seq, record) for record in new)
            for record in new:
                step(f"after record {record.kind}")
        return [record.seq for record in new]

    def _needs(self, kind: str, guest: int | None, wanted: Sequence[int]) -> tuple[int, ...]:
        if kind == reading.LEASE:
            return ()
        unknown = [seq for seq in wanted if seq not in self._records]
        if unknown:
            raise ValueError(f"'needs' contains {unknown[0]}, but no record has this seq")
        ours = [
            r
            for r in self._records.values()
            if r.seq not in self._released and (guest is None or r.guest in (guest, None))
        ]
        held = (
            (reading.TREE,)
            if kind in reading.PASSIVE
            else (reading.TREE, reading.LEASE, reading.SPARE)
        )  # SPARE has leases, too
        always = {r.seq for r in ours if kind == reading.DOMAIN or r.kind in held}
        return tuple(sorted(always | set(wanted)))

    def phase(self, name: str, guest: int | None = None, used: Usage | None = None) -> None:
        line = {"op": "phase", "name": name, "guest": guest, "t": time.time()}
        if used is not None:
            line |= {"cpu": used.cpu_seconds, "mib": used.peak_mib}
        with self._mutex, contextlib.suppress(HostFault):
            self._write([line], sync=False)
        if guest is None:
            step(f"phase {name}")

    def created(self, seq: int) -> None:
        self._append({"op": "created", "seq": seq})

    def released(self, seq: int, **extra: Any) -> None:
        self._released.add(seq)
        self._append({"op": "released", "seq": seq, **extra})

    def failed(self, seq: int, error: str, tries: int) -> None:
        self._append({"op": "failed", "seq": seq, "error": error, "try": tries})

    def _append(self, line: Mapping[str, Any]) -> None:
        """Append a line, unless an earlier write has failed.

        Otherwise, the journal could show a lease as released before the resource that needs it.
        """
        with self._mutex:
            if self._broken:
                return
            try:
                self._write([line], sync=False)
            except HostFault:
                self._broken = True

    def delete(self) -> None:
        step("before delete journal")
        self.close()
        with contextlib.suppress(FileNotFoundError):
            keep_phases(self.paths, reading.read(self.path))
        self.path.unlink(missing_ok=True)
        step("after delete journal")


def shared_records(
    paths: Paths, kind: str, args: Mapping[str, Any], but: tuple[Path, int] | None = None
) -> list[tuple[reading.JobHeader, reading.Record]]:
    """Return the open records of one node-wide resource in all journals, except the record ``but``.

    The caller holds the node's lock.
    """
    return [
        (state.header, record)
        for state in reading.walk(paths)
        for record in state.open
        if record.scope == "node"
        and (record.kind, record.args) == (kind, args)
        and (state.path, record.seq) != but
    ]


def _create(resource: Resource) -> None:
    step(f"before create {resource.kind}")
    resource.create()
    step(f"after create {resource.kind}")


def _create_shared(
    resource: Resource, others: Sequence[tuple[reading.JobHeader, reading.Record]]
) -> None:
    now = boot_id()
    alive = [r for s, r in others if r.created and (s.boot == now or not resource.volatile)]
    if not alive or resource.is_lost():
        if others:  # recorded by a killed process, perhaps incomplete
            resource.release()
        _create(resource)
