"""The jobs of ``local`` and how they survive: one file for each job, replaced atomically.

``<spool>/jobs`` (0700) has the jobs' files and the counter; ``<spool>/files`` (0711) what the
users' processes read: scripts (theirs) and node files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Job:
    """One job. ``state``: Q queued, P prologue, R running, E epilogue, C completed.

    The first block is what the user asked for; ``token`` is the request (``vt1:...``), None on
    bare metal. ``pid`` and ``pid_start`` name the process of the present state.
    """

    name: str
    workdir: str
    initdir: str | None = None
    out: str = ""
    err: str = ""
    join: str = "n"
    shell: str | None = None
    args: str = ""
    token: str | None = None
    environ: dict[str, str] = field(default_factory=dict)
    umask: int = 0o077
    walltime: int = 0
    ppn: int = 0
    mem: str = ""
    interactive: bool = False

    id: str = ""
    number: int = 0
    uid: int = -1
    user: str = ""
    group: str = ""
    state: str = "Q"
    pid: int = 0
    pid_start: int = 0
    boot: str = ""
    session: int = 0
    status: int | None = None
    reason: str = ""
    submitted: float = 0.0
    started: float = 0.0
    used: str = ""


class Spool:
    """The directory ``root``; every method may raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._jobs = root / "jobs"
        self._files = root / "files"

    def create(self) -> None:
        """Make the directories."""
        for path, mode in ((self.root, 0o711), (self._jobs, 0o700), (self._files, 0o711)):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(mode)

    def jobs(self) -> Iterator[Job]:
        """Yield all jobs, oldest first. A file that is not a job's is left alone."""
        paths = list(self._jobs.iterdir())
        for path in sorted((p for p in paths if p.name.isdigit()), key=lambda p: int(p.name)):
            try:
                yield Job(**json.loads(path.read_bytes()))
            except (ValueError, TypeError, FileNotFoundError):
                continue

    def save(self, job: Job) -> None:
        """Write the job; it is on disk when this returns."""
        self._replace(str(job.number), asdict(job))

    def forget(self, job: Job) -> None:
        """Remove the job's record."""
        (self._jobs / str(job.number)).unlink(missing_ok=True)

    def next_number(self) -> int:
        """Return the next job number; none is given out twice."""
        counter = self._jobs / "counter"
        number = int(counter.read_text()) + 1 if counter.exists() else 1
        self._replace("counter", number)
        return number

    def script(self, job: Job) -> Path:
        """Return the path of the job's script."""
        return self._files / f"{job.id}.SC"

    def nodefile(self, job: Job) -> Path:
        """Return the path of ``PBS_NODEFILE``."""
        return self._files / f"{job.id}.nodes"

    def write_files(self, job: Job, script: bytes, nodes: str) -> None:
        """Write script (the user's, as in Torque) and node file."""
        for path, content, uid, mode in (
            (self.script(job), script, job.uid, 0o500),
            (self.nodefile(job), nodes.encode(), -1, 0o444),
        ):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                os.fchmod(descriptor, mode)
                os.fchown(descriptor, uid, -1)
                file.flush()
                os.fsync(descriptor)

    def remove_files(self, job: Job) -> None:
        """Remove what :meth:`write_files` wrote."""
        self.script(job).unlink(missing_ok=True)
        self.nodefile(job).unlink(missing_ok=True)

    def _replace(self, name: str, document: Any) -> None:
        new = self._jobs / f".{name}.new"
        with new.open("w") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._jobs / name)
        directory = os.open(self._jobs, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)
