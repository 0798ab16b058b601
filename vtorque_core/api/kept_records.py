"""Kept records of a job on this node: facts and phases, log, samples.

They are root-owned files in ``<state>/kept/<uid>/<job key>/``. Treat the contents as untrusted:
they can include text from a guest.

Privileges: root; the job's owner may read.
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
LOG = "log.jsonl"  # one entry per line: api.job_log
MAX_JOB = 1 << 20  # bytes of a job.json
_PAUSE = 3600.0  # seconds between two sweeps
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True)
class Usage:
    """Resources that a job's guests used on one node.

    Attributes:
        cpu_seconds: CPU time of all QEMU processes (proc_pid_stat(5)).
        peak_mib: sum of the processes' peak resident sizes (VmHWM of proc_pid_status(5)).
    """

    cpu_seconds: float
    peak_mib: int


@dataclass(frozen=True)
class Place:
    """The directory with the kept files of one job attempt.

    Methods that open a file raise OSError or HostFault.
    """

    paths: Paths
    uid: int
    key: str

    @property
    def directory(self) -> Path:
        """The directory, which may not exist yet."""
        return self.paths.kept / str(self.uid) / self.key

    @property
    def changed(self) -> float:
        """Unix time of the last added or replaced file; 0 if the directory is missing."""
        with contextlib.suppress(OSError):
            return self.directory.stat().st_mtime
        return 0.0

    def append(self, name: str) -> int:
        """Open a file for appending, or create it. Return its descriptor."""
        self._make()
        with safefs.parent_of(str(self.directory / name)) as (parent, last):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS
            descriptor = os.open(last, flags, 0o600, dir_fd=parent)
        if os.fstat(descriptor).st_size == 0:
            _grant_read(descriptor, self.uid)
        return descriptor

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        self._make()
        path = str(self.directory / name)
        safefs.replace(path, content, mode=0o600, ready=lambda d: _grant_read(d, self.uid))

    def open(self, name: str) -> int:
        """Open a file for reading, and return its descriptor."""
        return os.open(self.directory / name, os.O_RDONLY | _FLAGS)

    def read(self, name: str, limit: int = 64 << 20) -> bytes:
        """Return at most ``limit`` bytes of a file."""
        with os.fdopen(self.open(name), "rb") as file:
            return file.read(limit)

    def facts(self) -> dict[str, Any]:
        """Return the contents of job.json; empty if missing or unreadable."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(self.read(JOB, MAX_JOB))
            if isinstance(found, dict):
                return found
        return {}

    def add_facts(self, **facts: Any) -> None:
        """Add facts to job.json. Ignores a full disk."""
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
                    _grant_read(descriptor, uid, enter=True)


def place(paths: Paths, job: JobAttempt) -> Place:
    """Return the directory of a job attempt's kept records."""
    return Place(paths, job.uid, job.key)


def keep_facts(paths: Paths, job: JobAttempt, **facts: Any) -> None:
    """Add facts (JSON values) and the job's identity to its job.json. Ignores errors."""
    whose = dataclasses.asdict(job)
    whose["job"] = whose.pop("id")
    if not job.node:
        del whose["node"]  # keep the node that the start recorded
    place(paths, job).add_facts(**whose, **facts)


def find(paths: Paths, job_id: str | None, uid: int | None = None) -> list[Place]:
    """Return the records of a job's attempts, or of all jobs (None), sorted by time of change.

    ``uid`` selects one user's jobs.
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
    """Remove kept records older than ``days``, then reduce the rest to ``mib`` MiB in total.

    To reduce the total, removes the oldest attempt of the user with the most data. Keeps attempts
    that have a journal. Does nothing within an hour of the last sweep. ``now`` is Unix time.
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
    """Remove all kept files of an attempt. Never raises OSError."""
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
    try:
        os.getxattr(directory, safefs.ACL, follow_symlinks=False)
    except OSError as error:
        return error.errno != errno.ENODATA
    return True


def _grant_read(descriptor: int, uid: int, *, enter: bool = False) -> None:
    with contextlib.suppress(OSError):  # EOPNOTSUPP: then only root reads it
        safefs.set_acl(descriptor, [uid], *((7, 5) if enter else (6, 4)))
