"""Save a multi-node job: all of its nodes write to one checkpoint.

Runs as root, in the watcher. Nodes communicate only through files in the unfinished checkpoint,
which all nodes can see. The job's first node begins and completes the checkpoint. To abandon the
checkpoint, a node that fails or times out renames the checkpoint's directory. To complete it, the
first node renames the directory as well. Only one of these renames can succeed, so either all nodes
have saved the job, or the job continues on all nodes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from vtorque_core.api import ConfigError, HostFault, name_errors, printable, replace_file
from vtorque_core.live.jobs import RunningJob
from vtorque_survive.lines import LineReader
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Manifest, Store, sync

ASKS, WHY, ENDS = "asks.json", "why", "ends"
STILL, DONE, _HAS = "still", "done", "json"  # suffixes of a node's files
_POLL = 0.1  # seconds; other nodes send no events
_TIME = 60.0  # seconds for one read of other nodes' requests


def is_leader(job: RunningJob) -> bool:
    """Return whether this node has the job's first guest, and therefore leads a checkpoint."""
    return min(guest.rank for guest in job.guests) == 0


def nodes_of(job: RunningJob) -> tuple[str, ...]:
    """Return the names of all nodes of a job."""
    return tuple(map(str, job.kept.facts().get("nodes", ())))


@dataclass(frozen=True)
class NodePart:
    """This node's manifest and state files in a job's checkpoint. Other nodes wait for them.

    Attributes:
        number: This node's index among the job's nodes. The job's first node has the index 0.
    """

    store: Store
    name: str
    nodes: tuple[str, ...]
    number: int

    @classmethod
    def for_job(cls, store: Store, name: str, job: RunningJob) -> Self:
        """Return this node's part in a checkpoint of a job."""
        first = min(guest.rank for guest in job.guests)
        return cls(store, name, nodes_of(job), first // len(job.guests))

    @property
    def has_other_nodes(self) -> bool:
        """Whether the job has other nodes."""
        return len(self.nodes) > 1

    @property
    def _part(self) -> Path:
        return self.store.part(self.name)

    def _file(self, kind: str, number: int | None = None) -> Path:
        return self._part / f"node{self.number if number is None else number}.{kind}"

    def make(self) -> Path:
        """Return the directory of the unfinished checkpoint. The first node creates it.

        Raises:
            HostFault: If another node has abandoned the checkpoint.
        """
        if self.number == 0 and not self.store.lost_path(self.name).exists():
            return self.store.make(self.name)
        self._require_directory()
        return self.store.begun_path(self.name)

    def begin(self, tools: Mapping[str, str], *, ends: bool) -> None:
        """Begin the checkpoint; compare the program versions ``tools`` with the first node's.

        ``ends``: the job ends after the checkpoint.

        Raises:
            HostFault: If this node's versions differ from the first node's.
        """
        if not self.has_other_nodes:
            return
        self._require_directory()
        asks = self._part / ASKS
        if self.number == 0 and not asks.exists():
            said = {"ends": ends, "tools": dict(tools)}
            replace_file(str(asks), json.dumps(said).encode(), mode=0o600)
        theirs = json.loads(asks.read_bytes())["tools"]
        for name, version in tools.items():
            if theirs.get(name) != version:
                raise HostFault(
                    f"a job on both this node and {self.nodes[0]} cannot be saved, because their "
                    f"versions of {name} differ: {version} on this node, "
                    f"{printable(str(theirs.get(name)), 200)} on the other"
                )

    def has(self, kind: str) -> bool:
        """Return whether this node's state file ``kind`` exists."""
        return self._file(kind).exists()

    def publish(self, kind: str) -> None:
        """Create this node's state file ``kind``, such as STILL: the guests are paused."""
        if self.has_other_nodes:
            self._touch(self._file(kind))

    def wait(self, kind: str, until: float, why: str) -> None:
        """Wait until the state file ``kind`` of each node exists. ``until``: Unix time.

        Raises:
            HostFault: If nodes are late. The message is their names and ``why``.
        """
        if not self.has_other_nodes:
            return
        wanted = {self._file(kind, number).name: node for number, node in enumerate(self.nodes)}
        while True:
            there = self._names()
            missing = [node for name, node in wanted.items() if name not in there]
            if not missing:
                return
            if time.time() >= until:
                raise HostFault(f"{', '.join(missing)}: {why}")
            time.sleep(_POLL)

    def end(self) -> None:
        """Forbid other nodes to abandon the checkpoint. Called on the job's first node.

        Raises:
            HostFault: If another node has abandoned the checkpoint.
        """
        if self.has_other_nodes:
            self._touch(self._part / ENDS)
            self._require_directory()

    def wait_complete(self, until: float, longest: float) -> None:
        """Wait until the job's first node has completed the checkpoint.

        The other nodes call this method. The deadline is ``until``. If the checkpoint ends the job,
        the first node calls :meth:`end` and then waits for the job shell's state. After that call,
        the deadline is the later time ``longest``. Both are Unix times.

        Raises:
            HostFault: If the first node is late.
        """
        while not self.store.has(self.name):
            if not self._part.exists() and not self.store.has(self.name):
                raise self._abandon_error()
            if time.time() >= (longest if (self._part / ENDS).exists() else until):
                raise HostFault(f"{self.nodes[0]} did not complete the checkpoint in time")
            time.sleep(_POLL)

    def is_written(self) -> bool:
        """Return whether this node's manifest is written. The manifest may not be synced yet."""
        return self.has(_HAS) if self.has_other_nodes else self.store.is_written(self.name)

    def write(self, manifest: Manifest) -> None:
        """Write this node's manifest."""
        if not self.has_other_nodes:
            self.store.write(manifest)
            return
        self._require_directory()
        replace_file(str(self._file(_HAS)), manifest.encode(), mode=0o600)

    def sync(self, files: Sequence[Path]) -> None:
        """Sync this node's files to disk, and record that they are synced."""
        if self.has(DONE):
            return
        with name_errors(self._part):
            sync(*(file for file in (*files, self._file(_HAS)) if file.exists()))
        self.publish(DONE)

    def full_manifest(self) -> Manifest:
        """Return one manifest with the guests of all nodes."""
        place = self.store.directory / self.name
        try:
            files = (self._file(_HAS, number) for number in range(len(self.nodes)))
            parts = [Manifest.decode(file.read_bytes(), place) for file in files]
        except OSError as error:
            raise HostFault(f"{error.filename}: {error.strerror}") from None
        guests = tuple(guest for part in parts for guest in part.guests)
        return replace(parts[0], guests=guests, nodes=len(self.nodes))

    def abandon(self, error: Exception) -> Exception:
        """Abandon the checkpoint after an error. Return the first error on any node.

        Once the job's first node has called :meth:`end`, only that node can abandon the checkpoint.
        """
        if not self.has_other_nodes:
            return error
        if self._part.exists():
            with suppress(OSError, HostFault):  # the disk is full
                said = str(error) if self.number == 0 else f"{self.nodes[self.number]}: {error}"
                replace_file(str(self._part / WHY), said.encode(), mode=0o600)
        try:
            self._part.rename(self.store.lost_path(self.name))
            if self.number and (self.store.lost_path(self.name) / ENDS).exists():
                self.store.lost_path(self.name).rename(self._part)
        except FileNotFoundError:
            why = "" if self.store.has(self.name) else self._failure_reason()
            return HostFault(why) if why else error
        except OSError as wrong:
            return HostFault(f"{error}; {wrong.filename}: {wrong.strerror}")
        return error

    def _touch(self, file: Path) -> None:
        self._require_directory()
        try:
            file.touch(mode=0o600)
        except OSError as error:
            raise HostFault(f"{error.filename}: {error.strerror}") from None

    def _names(self) -> set[str]:
        self._require_directory()
        with suppress(FileNotFoundError):
            return {file.name for file in self._part.iterdir()}
        raise self._abandon_error()

    def _require_directory(self) -> None:
        if not self._part.exists():
            raise self._abandon_error()

    def _abandon_error(self) -> HostFault:
        return HostFault(
            self._failure_reason() or "another node of the job has canceled the checkpoint"
        )

    def _failure_reason(self) -> str:
        with suppress(OSError):
            said = (self.store.lost_path(self.name) / WHY).read_bytes()
            return printable(said.decode("utf-8", "replace"), 500)
        return ""


class RequestReader:
    """A reader of requests by which a job's first node asks the other nodes to save the job.

    The requests are files in unfinished checkpoints. A child process reads these files.
    """

    def __init__(self, settings: Settings) -> None:
        self._top = settings.checkpoints if settings.checkpoints_shared else ""
        self._every, self._lines = settings.query_interval, LineReader(_TIME)
        self._jobs: dict[str, tuple[int, float]] = {}  # uid, and time of the last call
        self._asked: dict[str, tuple[str, bool]] = {}

    def find_request(self, job: RunningJob) -> tuple[str, bool] | None:
        """Return the id of a job's requested checkpoint, and whether the job ends afterwards."""
        if not self._top:
            return None
        now, top = time.monotonic(), Path(self._top)
        self._jobs[job.job.key] = (job.job.uid, now)
        jobs = {key: uid for key, (uid, at) in self._jobs.items() if now - at < _TIME}
        said = self._lines.read_lines(lambda to: _read_requests(top, jobs, to), self._every)
        if said is not None:
            self._jobs = {key: self._jobs[key] for key in jobs}
            found = (line.split(" ") for line in said)
            self._asked = {key: (name, ends == "ends") for key, name, ends in found}
        return self._asked.pop(job.job.key, None)


def _read_requests(top: Path, jobs: Mapping[str, int], to: int) -> None:
    for key, uid in jobs.items():
        store = Store(top, uid)
        for name in store.list_unfinished(key):
            with suppress(FileNotFoundError, ConfigError):  # it has ended, or is not root's
                ends = json.loads((store.begun_path(name) / ASKS).read_bytes())["ends"]
                os.write(to, f"{key} {name} {'ends' if ends else 'stays'}\n".encode())
