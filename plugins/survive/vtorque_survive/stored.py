"""A user's checkpoints on disk: root's directories in the site's checkpoint directory.

``<checkpoints>/<uid>/<job key>/`` contains each guest's memory in libvirt's format (``g0.memory``
for rank 0) and own disk (``g0.disk``). It also contains the job shell's session state
(``session``), and ``manifest.json``, which is written last. An unfinished directory has another
name and is never used. Only root may read the files, because memory contains users' secrets.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from vtorque_core.api import (
    ConfigError,
    HostFault,
    Refused,
    closing,
    name_errors,
    printable,
    replace_file,
    require_root_owned,
    take_lock,
)
from vtorque_core.api.boot_source import Identity
from vtorque_core.live.jobs import RunningJob
from vtorque_survive.saving import GuestData

SCHEMA = 1


class Unreachable(HostFault):
    """Error if the checkpoint directory cannot be read. The node is not marked as faulty."""

    blames_node = False


MANIFEST, SESSION = "manifest.json", "session"
OVER = "over"  # mark: the saved job has ended, and its id may be another job's
HELD = "held"  # mark: the job was held, and is restored from this checkpoint
RESERVED = "reserved"  # suffix of sparse files with the size that a node may still need
_PART, _LOST = ".part", ".lost"  # suffixes of unfinished and of abandoned checkpoints
GONE = ".gone"  # suffix of checkpoints that are being removed
_LEFT = 2 * 3600.0  # seconds without a write after which a node counts as dead
_LOCK = 60.0  # seconds for other jobs that reserve space
_MOST = 64 << 20  # bytes of a manifest: 450 per guest


@dataclass(frozen=True)
class SavedGuest(Identity):
    """A guest in a checkpoint.

    Attributes:
        state_dir: Its state directory when it was saved.
        run_dir: Its run directory when it was saved.
        memory: The file written by libvirt, readable by root only.
    """

    state_dir: Path
    run_dir: Path
    memory: Path


_OLDER = ("xml", "arrive", "gate")  # always empty, in manifests of the first version


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint, with the versions of programs that a restore requires."""

    id: str
    uid: int
    owner: str
    node: str
    made: float
    image: str
    sha256: str
    tools: Mapping[str, str]
    guests: tuple[SavedGuest, ...]
    job: str = ""  # the batch system's id of the saved job
    disks: Mapping[str, Sequence[int]] = field(default_factory=dict)  # result of tools.disks
    nodes: int = 1  # of the job; guests are in rank order

    def node_part(self, index: int) -> Self:
        """Return a manifest of node ``index`` alone. Only the manifest of node 0 has ``disks``."""
        count = len(self.guests) // self.nodes
        disks = {} if index else self.disks
        return replace(self, guests=self.guests[index * count :][:count], disks=disks)

    def encode(self) -> bytes:
        """Return the manifest as JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, default=str).encode()

    @classmethod
    def decode(cls, data: bytes, place: Path) -> Self:
        """Parse a manifest. ``place`` is the checkpoint's present directory."""
        try:
            found: dict[str, Any] = json.loads(data)
            if found.pop("schema") != SCHEMA:
                raise ValueError("the schema is of another version of vTorque")
            guests = (
                SavedGuest(
                    **{name: value for name, value in guest.items() if name not in _OLDER}
                    | {"leased": tuple(map(tuple, guest["leased"]))}
                    | {name: Path(guest[name]) for name in ("state_dir", "run_dir")}
                    | {"memory": place / Path(guest["memory"]).name}
                )
                for guest in found.pop("guests")
            )
            return cls(guests=tuple(guests), **found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HostFault(f"invalid checkpoint manifest: {error}") from None


def manifest_of(
    place: Path, job: RunningJob, guests: Sequence[GuestData], tools: Mapping[str, str]
) -> Manifest:
    """Return the manifest of a job's guests on this node. The checkpoint will be at ``place``."""
    facts = job.kept.facts()
    return Manifest(
        id=place.name,
        job=job.job.id,
        uid=job.job.uid,
        owner=job.job.owner,
        node=str(facts.get("node", "")),
        made=time.time(),
        image=str(facts.get("image", "")),
        sha256=str(facts.get("image_sha256", "")),
        tools=tools,
        guests=tuple(
            _save_guest(each, place / f"g{each.guest.rank}.memory", *facts["booted_for"])
            for each in guests
        ),
    )


def _save_guest(each: GuestData, memory: Path, job_id: str, attempt: int) -> SavedGuest:
    return SavedGuest(
        name=each.guest.name,
        uuid=each.guest.uuid,
        hostname=each.guest.hostname,
        job_id=job_id,
        attempt=attempt,
        leased=each.leased,
        state_dir=each.state_dir,
        run_dir=each.guest.run_dir,
        memory=memory,
    )


@dataclass(frozen=True)
class Store:
    """All checkpoints of one user, below the site's directory ``top``. Needs root."""

    top: Path
    uid: int

    @property
    def directory(self) -> Path:
        """The directory of the user's checkpoints."""
        return self.top / str(self.uid)

    def part(self, name: str) -> Path:
        """Return the directory of an unfinished checkpoint.

        The directory's name begins with a dot, which no checkpoint's id does.
        """
        return self.directory / f".{name}{_PART}"

    def lost_path(self, name: str) -> Path:
        """Return the path to which a node renames :meth:`part` to abandon a multi-node checkpoint.

        All nodes of the job then abandon the checkpoint.
        """
        return self.directory / f".{name}{_LOST}"

    def make(self, name: str) -> Path:
        """Create the directory of a new checkpoint, or return the existing one.

        Raises:
            HostFault: If there is no space.
            ConfigError: If a user other than root can write to the directory.
        """
        require_root_owned(self.top, uid=os.geteuid())
        with name_errors(f"cannot make {self.part(name)}"):
            for path in (self.directory, self.part(name)):
                path.mkdir(mode=0o700, exist_ok=True)
        return self.begun_path(name)

    def begun_path(self, name: str) -> Path:
        """Return the directory of a checkpoint that another node has begun.

        Raises:
            ConfigError: If another user created the directory, for example in /tmp.
        """
        require_root_owned(self.part(name), uid=os.geteuid())
        return self.part(name)

    @contextlib.contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold the lock under which the jobs of all users reserve space."""
        with closing(take_lock(self.top / ".lock", _LOCK)):
            yield

    def write(self, manifest: Manifest) -> None:
        """Write the manifest: the checkpoint is then complete but not yet synced."""
        part = self.part(manifest.id)
        with name_errors(f"cannot write {part}"):
            replace_file(str(part / MANIFEST), manifest.encode(), mode=0o600)

    def is_written(self, name: str) -> bool:
        """Return whether the manifest of an unfinished checkpoint is written."""
        return (self.part(name) / MANIFEST).exists()

    def finish(self, name: str) -> None:
        """Sync all files of an unfinished checkpoint, and rename its directory to its id."""
        part = self.part(name)
        with name_errors(f"cannot finish {part}"):
            sync(*part.iterdir(), part)
            for reserved in part.glob(f"{RESERVED}*"):
                reserved.unlink()
            part.rename(self.directory / name)
            sync(self.directory)

    def drop(self, name: str) -> None:
        """Remove an unfinished checkpoint."""
        for path in (self.part(name), self.lost_path(name)):
            with name_errors(f"cannot remove {path}"), contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)

    def list_unfinished(self, key: str) -> list[str]:
        """Return the names of a job attempt's unfinished checkpoints."""
        if not self.directory.is_dir():
            return []
        ends = (_PART, _LOST)  # of equal length
        found = [path.name[1:-5] for path in self.directory.iterdir() if path.suffix in ends]
        return [name for name in found if name == key or name.startswith(f"{key}-")]

    def has(self, name: str) -> bool:
        """Return whether a checkpoint of this name exists."""
        return (self.directory / name / MANIFEST).is_file()

    def read(self, name: str) -> Manifest:
        """Return a checkpoint's manifest.

        Raises:
            Refused: If the manifest is missing, or a user other than root could have written it.
            Unreachable: If the manifest cannot be read.
        """
        path = self.directory / name / MANIFEST
        try:
            path.stat()
            require_root_owned(path, uid=os.geteuid())
            found = Manifest.decode(_content(path), path.parent)
        except (FileNotFoundError, NotADirectoryError):
            raise Refused(
                f"you have no checkpoint {printable(name)} on this node; vmgr checkpoints "
                "lists yours"
            ) from None
        except ConfigError as error:
            raise Refused(
                f"checkpoint {printable(name)} could have been written by others than root: {error}"
            ) from None
        except OSError as error:
            raise Unreachable(f"{path}: {error.strerror}") from None
        if (found.uid, found.id) != (self.uid, name):
            raise HostFault(
                f"{self.directory / name} contains checkpoint {found.id} of uid {found.uid}: "
                "rename the directory back, or remove it if it is a copy"
            )
        return found

    def manifests(self) -> Iterator[Manifest]:
        """Yield the readable manifests, oldest first.

        Raises:
            Unreachable: If the directory cannot be read.
        """
        found = []
        for path in self.directory.glob("[!.]*") if self.directory.is_dir() else ():
            try:
                found.append(self.read(path.name))
            except Unreachable:
                raise
            except (Refused, HostFault):
                continue
        yield from sorted(found, key=lambda manifest: manifest.made)

    def list_for_job(self, job_id: str) -> list[Manifest]:
        """Return a job's manifests, sorted by attempt, not by time: nodes' clocks may differ."""
        named = sorted((found for found in self.manifests() if found.job == job_id), key=_age_key)
        return [found for found in named if not (self.directory / found.id / OVER).exists()]

    def disown(self, job_id: str) -> None:
        """Exclude the checkpoints that now have this job id from :meth:`list_for_job`.

        A new job can have the id of an ended job if the batch system was reinstalled.
        """
        for found in self.list_for_job(job_id):
            (self.directory / found.id / OVER).touch(mode=0o600)

    def hold(self, name: str) -> None:
        """Record in a file that the checkpoint's job is held, and will restore the checkpoint."""
        (self.directory / name / HELD).touch(mode=0o600)

    def release_hold(self, name: str) -> None:
        """Remove the file that :meth:`hold` creates."""
        (self.directory / name / HELD).unlink(missing_ok=True)

    def is_held(self, name: str) -> bool:
        """Return whether the file of :meth:`hold` exists."""
        return (self.directory / name / HELD).exists()

    def failure_file(self, name: str) -> Path:
        """Return the file that contains one line for each failed start from a checkpoint."""
        return self.directory / f".{name}.tries"

    def reserved_bytes(self) -> int:
        """Return how many more bytes all unfinished checkpoints may need."""
        parts = (each for each in self.top.glob("[0-9]*/.*.part") if not _is_left(each))
        return sum(max(0, reserved - had) for had, reserved in map(disk_usage, parts))

    def used_bytes(self) -> int:
        """Return how many bytes the user's checkpoints use or have reserved."""
        places = (Path(place) for place, _, _ in os.walk(self.directory))
        return sum(max(disk_usage(place)) for place in places if not _is_left(place))


def _age_key(manifest: Manifest) -> tuple[int, int]:
    """Return a sort key: the attempt, and the number at the end of the checkpoint's id.

    An id without that number sorts last.
    """
    key = re.sub(r"-\d+$", "", manifest.id, flags=re.ASCII)  # of the attempt
    phases = manifest.id.removeprefix(key).removeprefix("-")
    return int(key.rpartition(".")[2]), int(phases) if phases else 1 << 30


def _is_left(place: Path) -> bool:
    """Return whether a dead node left this unfinished or partly removed checkpoint behind.

    Such a directory does not count against the user's quota.
    """
    if place.suffix not in (_PART, _LOST, GONE):
        return False
    with contextlib.suppress(FileNotFoundError):
        changed = max(each.lstat().st_mtime for each in (place, *place.iterdir()))
        return time.time() - changed > _LEFT
    return False


def disk_usage(place: Path) -> tuple[int, int]:
    """Return how many bytes a checkpoint's files use on disk, and how many are reserved."""
    had = reserved = 0
    with contextlib.suppress(FileNotFoundError):  # finished or dropped meanwhile
        for file in place.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed by another node meanwhile
                found = file.stat(follow_symlinks=False)
                had += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
                reserved += found.st_size if file.name.startswith(RESERVED) else 0
    return had, reserved


def sync(*paths: Path) -> None:
    """Sync files or directories to disk."""
    for path in paths:
        with closing(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as descriptor:
            os.fsync(descriptor)


def _content(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read(_MOST)
