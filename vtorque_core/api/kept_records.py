"""What stays of a job on this node after its end: its facts and phases, its log, its samples.

It lies in ``<state>/kept/<uid>/<job key>/``. All of it is root's; an access list (acl(5)) lets
the job's owner read, and nobody else. On a file system without such lists only root can.

Everything here is best effort: no job fails because a disk is full. What is read back may hold
what a guest has said: a reader takes it for a stranger's text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.names import JobAttempt, Paths, safe_name

JOB = "job.json"
LOG = "log.jsonl"  # an entry a line: api.job_log
MAX_JOB = 1 << 20  # bytes of a job.json
_PAUSE = 3600.0  # seconds from one sweep to the next
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True)
class Place:
    """Where the files of one job attempt lie on this node."""

    paths: Paths
    uid: int
    key: str

    @property
    def directory(self) -> Path:
        """The directory; it may not be there yet."""
        return self.paths.kept / str(self.uid) / self.key

    @property
    def changed(self) -> float:
        """When a file was added or replaced there last, in Unix seconds; 0 if it is not there."""
        with contextlib.suppress(OSError):
            return self.directory.stat().st_mtime
        return 0.0

    def append(self, name: str) -> int:
        """Return a descriptor to append to a file, which is created if missing. As root.

        Raises OSError, HostFault (a directory above can be written by others).
        """
        self._make()
        with safefs.parent_of(str(self.directory / name)) as (parent, last):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS
            descriptor = os.open(last, flags, 0o600, dir_fd=parent)
        if os.fstat(descriptor).st_size == 0:
            _let_read(descriptor, self.uid)
        return descriptor

    def write(self, name: str, content: bytes) -> None:
        """Write a file in one step. As root. Raises OSError, HostFault."""
        self._make()
        path = str(self.directory / name)
        safefs.replace(path, content, mode=0o600, ready=lambda d: _let_read(d, self.uid))

    def open(self, name: str) -> int:
        """Return a descriptor of a file. Raises OSError: not there, not yours."""
        return os.open(self.directory / name, os.O_RDONLY | _FLAGS)

    def read(self, name: str, limit: int = 64 << 20) -> bytes:
        """Return at most ``limit`` bytes of a file. Raises OSError as :meth:`open`."""
        with os.fdopen(self.open(name), "rb") as file:
            return file.read(limit)

    def facts(self) -> dict[str, Any]:
        """Return what job.json says; empty if it is not there or cannot be read."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(self.read(JOB, MAX_JOB))
            if isinstance(found, dict):
                return found
        return {}

    def add_facts(self, **facts: Any) -> None:
        """Write them into job.json, beside those of before. Never raises for a full disk."""
        with contextlib.suppress(OSError, HostFault):
            text = json.dumps({"schema": 1, **self.facts(), **facts})
            self.write(JOB, text.encode())

    def _make(self) -> None:
        top, owner = self.paths.kept, self.paths.kept / str(self.uid)
        for path, uid in ((top, None), (owner, self.uid), (self.directory, self.uid)):
            if path.is_dir() and (uid is None or _has_list(path)):
                continue
            with contextlib.suppress(FileExistsError):
                safefs.make_directory(str(path), mode=0o711 if uid is None else 0o700)
            if uid is not None:
                flags = os.O_RDONLY | os.O_DIRECTORY | _FLAGS
                with safefs.closing(os.open(path, flags)) as descriptor:
                    _let_read(descriptor, uid, enter=True)


def place(paths: Paths, job: JobAttempt) -> Place:
    """Return where an attempt's files lie, there or not."""
    return Place(paths, job.uid, job.key)


def keep_facts(paths: Paths, job: JobAttempt, **facts: Any) -> None:
    """Add facts, JSON values, and whose job it is to its job.json. As root; best effort.

    The processes of a job, which exclude each other, write it piece by piece: who and what at the
    start, phases, the outcome.
    """
    whose = dataclasses.asdict(job)
    whose["job"] = whose.pop("id")
    if not job.node:
        del whose["node"]  # what the start has said of it stays
    place(paths, job).add_facts(**whose, **facts)


def find(paths: Paths, job_id: str | None, uid: int | None = None) -> list[Place]:
    """Return the kept attempts of a job (None: of all jobs), the one changed last at the end.

    ``uid``: of one user only; others than root can read only their own.
    """
    owners = [str(uid)] if uid is not None else _names(paths.kept)
    wanted = None if job_id is None else safe_name(job_id)
    found = []
    for owner in owners:
        for key in _names(paths.kept / owner):
            if owner.isdecimal() and wanted in (None, key.rpartition(".")[0]):
                found.append(Place(paths, int(owner), key))
    return sorted(found, key=lambda each: each.changed)


def sweep(paths: Paths, days: float, mib: float, now: float) -> None:
    """Remove what ended jobs left over ``days`` ago, and what is beyond ``mib`` MiB. As root.

    That is the oldest of whoever has most: no user can push out what is kept of others. At most
    once an hour: the rest of the calls do nothing. ``now`` in Unix seconds. Running jobs keep
    theirs. Never raises OSError.
    """
    mark = paths.kept / ".swept"
    with contextlib.suppress(OSError):
        if now - _PAUSE < mark.stat().st_mtime <= now:
            return
    left: dict[int, list[tuple[Place, int]]] = {}
    held: dict[int, int] = {}
    for each in find(paths, None):
        if (paths.journal / f"{each.key}.jsonl").exists():
            continue
        if each.changed < now - days * 86400:
            remove(each)
            continue
        size = _size(each.directory)
        left.setdefault(each.uid, []).insert(0, (each, size))
        held[each.uid] = held.get(each.uid, 0) + size
    while sum(held.values()) > mib * (1 << 20):
        most = max(held, key=lambda uid: held[uid])
        oldest, size = left[most].pop()
        held[most] -= size
        remove(oldest)
    with contextlib.suppress(OSError, HostFault):
        safefs.replace(str(mark), b"", mode=0o600)


def remove(each: Place) -> None:
    """Remove all that is kept there. As root; never raises OSError."""
    with contextlib.suppress(OSError, HostFault):
        safefs.remove_tree(str(each.directory))


def _size(directory: Path) -> int:
    total = 0
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            total += entry.stat(follow_symlinks=False).st_size
    return total


def _names(directory: Path) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries)
    return []


def _has_list(directory: Path) -> bool:
    """Return whether its access list is there: who made it may have been killed before that."""
    try:
        os.getxattr(directory, safefs.ACL, follow_symlinks=False)
    except OSError as error:
        return error.errno != errno.ENODATA
    return True


def _let_read(descriptor: int, uid: int, *, enter: bool = False) -> None:
    with contextlib.suppress(OSError):  # EOPNOTSUPP: then only root reads it
        safefs.let(descriptor, [uid], *((7, 5) if enter else (6, 4)))
