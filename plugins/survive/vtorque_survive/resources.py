"""Files of restored and arriving guests, and marks of checkpoints in use, as resources.

Each start and end of a job on the node imports this module, so it imports little.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vtorque_core.api import Busy, HostFault, closing, name_errors, replace_file, take_lock
from vtorque_core.api.acquired import Resource, unjournalled
from vtorque_survive.placeholder import Placeholder
from vtorque_survive.process import WatcherProcess
from vtorque_survive.request import Fifo
from vtorque_survive.sparse import copy_data

_LOCK = 10.0  # seconds for another job of the user to release the lock


def resources() -> list[type[Resource]]:
    """Return the resource classes of this plugin, which teardown loads."""
    return [WatcherProcess, Fifo, RestoredDisk, Link, UseMark, Placeholder]


@dataclass(frozen=True)
class RestoredDisk(Resource):
    """The root disk of a guest that is restored from a checkpoint or migrates to this node.

    For a restored guest, the disk is a copy of ``source``, a file in the checkpoint. If the guest
    migrates, ``source`` is empty, and :mod:`vtorque_survive.migrate_disk` fills the disk.
    """

    kind = "survive-disk"
    volatile = False
    path: str
    uid: int
    source: str = unjournalled("")

    def create(self) -> None:
        """Copy ``source``, or create an empty file if ``source`` is empty."""
        with name_errors(f"cannot create {self.path}"):
            source = os.open(self.source or os.devnull, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(source, "rb") as reads, _create_file(self.path) as writes:
                os.fchown(writes.fileno(), self.uid, -1)
                copy_data(reads.fileno(), writes.fileno())

    def release(self) -> None:
        """Remove the disk. Idempotent."""
        _unlink(self.path)


@dataclass(frozen=True)
class Link(Resource):
    """A symbolic link in the guest's run directory."""

    kind = "survive-link"
    path: str
    target: str = unjournalled("")

    def create(self) -> None:
        """Create the link."""
        with name_errors(f"cannot create {self.path}"):
            Path(self.path).symlink_to(self.target)

    def release(self) -> None:
        """Remove the link. Idempotent."""
        _unlink(self.path)


def _unlink(path: str) -> None:
    with name_errors(f"cannot remove {path}"):
        Path(path).unlink(missing_ok=True)


def _create_file(path: str) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


@dataclass(frozen=True)
class UseMark(Resource):
    """A file in the shared directory that reserves a checkpoint's guests for one job.

    The file names the job and its node. ``over`` lists ended jobs, whose files are overwritten.
    """

    kind = "survive-held"
    volatile = False
    path: str
    job: str
    key: str
    node: str
    checkpoint: str = ""
    over: tuple[str, ...] = unjournalled(())
    leased: tuple[tuple[str, str], ...] = unjournalled(())

    def create(self) -> None:
        """Reserve the guests for the job: write the file, unless it names another running job.

        Raises:
            HostFault: If another job uses the guests.
        """
        with lock_file(self.path, "write"):
            found = read_mark(Path(self.path))
            if found and found["job"] not in (self.job, *self.over):
                raise in_use_fault(
                    f"the checkpoint is in use by job {found['job']} on node {found['node']}"
                )
            said = json.dumps({**self._content(), "leased": self.leased})
            replace_file(self.path, said.encode(), mode=0o600, ready=os.fsync)

    def release(self) -> None:
        """Remove the file if it names this job. Idempotent."""
        with lock_file(self.path, "remove"):
            found = read_mark(Path(self.path))
            if {key: found.get(key) for key in self._content()} == self._content():
                Path(self.path).unlink(missing_ok=True)

    def _content(self) -> dict[str, str]:
        names = ("job", "key", "node", "checkpoint")
        return {name: str(getattr(self, name)) for name in names}


@contextmanager
def lock_file(path: str, verb: str) -> Iterator[None]:
    """Hold the lock of a :class:`UseMark` file's directory. ``verb``: the action, in errors.

    Raises:
        HostFault: If the lock is held for 10 s, or the directory has an error.
    """
    try:
        with closing(take_lock(Path(path).with_name(".lock"), _LOCK)):
            yield
    except (OSError, Busy) as error:
        raise in_use_fault(f"cannot {verb} {path}: {error}") from None


def read_mark(path: Path) -> dict[str, Any]:
    """Return the content of a :class:`UseMark` file; empty if it is missing or invalid."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    except OSError as error:  # a fault of the directory, not of this node
        raise in_use_fault(f"{path}: {error.strerror}") from None
    fits = isinstance(found, dict) and all(isinstance(found.get(k), str) for k in ("job", "node"))
    return found if fits else {}


def in_use_fault(text: str, stage: str | None = None) -> HostFault:
    """Return a HostFault that does not mark the node as faulty."""
    fault = HostFault(text, stage)
    fault.blames_node = False
    return fault
