"""A job's nodes save it together: their parts become one checkpoint, or none. Root, in the watcher.

Nodes do not talk to each other. What they know of one another are files in what is being made,
which all of them see. The job's first node begins and ends it, the others follow. Who fails, or
waits too long, has the directory have another name; to be a checkpoint it needs one, too. Of the
two only one can be done: so either all nodes have saved it, or all go on.
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

from vtorque_core.api import ConfigError, HostFault, printable, replace_file
from vtorque_core.live.jobs import RunningJob
from vtorque_survive.lines import Lines
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Manifest, Store, sync

ASKS, WHY, ENDS = "asks.json", "why", "ends"
STILL, DONE, _HAS = "still", "done", "json"  # how a node's files are called after its number
_LOOK = 0.1  # seconds; that another node has come so far is no event
_TIME = 60.0  # seconds for one look for what other nodes ask


def leads(job: RunningJob) -> bool:
    """Return whether a job is saved from this node: its first guest is here."""
    return min(guest.rank for guest in job.guests) == 0


def nodes_of(job: RunningJob) -> tuple[str, ...]:
    """Return the names of all nodes of a job."""
    return tuple(map(str, job.kept.facts().get("nodes", ())))


@dataclass(frozen=True)
class Together:
    """What this node has to do with the others. ``number``: which one of the job's it is, from 0.

    Of a job on one node there is nothing to do.
    """

    store: Store
    name: str
    nodes: tuple[str, ...]
    number: int

    @classmethod
    def of(cls, store: Store, name: str, job: RunningJob) -> Self:
        """Return that of a job here."""
        first = min(guest.rank for guest in job.guests)
        return cls(store, name, nodes_of(job), first // len(job.guests))

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return len(self.nodes) > 1

    @property
    def _part(self) -> Path:
        return self.store.part(self.name)

    def _file(self, kind: str, number: int | None = None) -> Path:
        return self._part / f"node{self.number if number is None else number}.{kind}"

    def make(self) -> Path:
        """Return the directory of what is made. Raises HostFault: another has given it up."""
        if self.number == 0 and not self.store.lost(self.name).exists():
            return self.store.make(self.name)
        self._require_there()
        return self.store.begun(self.name)

    def begin(self, tools: Mapping[str, str], *, ends: bool) -> None:
        """Ask the others, or be asked. Raises HostFault: what was begun is of other tools."""
        if not self.several:
            return
        self._require_there()
        asks = self._part / ASKS
        if self.number == 0 and not asks.exists():
            said = {"ends": ends, "tools": dict(tools)}
            replace_file(str(asks), json.dumps(said).encode(), mode=0o600)
        theirs = json.loads(asks.read_bytes())["tools"]
        for name, version in tools.items():
            if theirs.get(name) != version:
                raise HostFault(
                    f"has another {name} than {self.nodes[0]}, so a job of both cannot be saved: "
                    f"{version}, and there it is {printable(str(theirs.get(name)), 200)}"
                )

    def has(self, kind: str) -> bool:
        """Return whether this node has come so far."""
        return self._file(kind).exists()

    def tell(self, kind: str) -> None:
        """Say that this node has come so far. Raises HostFault."""
        if self.several:
            self._touch(self._file(kind))

    def wait(self, kind: str, until: float, why: str) -> None:
        """Wait, until a time.time(), for all to have come so far. Raises HostFault: who has not."""
        if not self.several:
            return
        wanted = {self._file(kind, number).name: node for number, node in enumerate(self.nodes)}
        while True:
            there = self._names()
            missing = [node for name, node in wanted.items() if name not in there]
            if not missing:
                return
            if time.time() >= until:
                raise HostFault(f"{', '.join(missing)}: {why}")
            time.sleep(_LOOK)

    def end(self) -> None:
        """Say that the job's first guest ends: the others have no way back. Raises HostFault.

        Who gives up at this moment finds that said, or this node finds it given up.
        """
        if self.several:
            self._touch(self._part / ENDS)
            self._require_there()

    def wait_whole(self, until: float, longest: float) -> None:
        """Wait for the first node to make it a checkpoint. Raises HostFault.

        Until a time.time(); ``longest``: the same if that node has said that its guest ends. Its
        job shell may be stopped then, or its watcher have been killed.
        """
        while not self.store.has(self.name):
            if not self._part.exists() and not self.store.has(self.name):
                raise self._given_up()
            if time.time() >= (longest if (self._part / ENDS).exists() else until):
                raise HostFault(f"{self.nodes[0]} has not made a checkpoint of it in time")
            time.sleep(_LOOK)

    def is_written(self) -> bool:
        """Return whether this node's part is, if not on disk yet."""
        return self.has(_HAS) if self.several else self.store.is_written(self.name)

    def write(self, manifest: Manifest) -> None:
        """Say that it is. Raises HostFault."""
        if not self.several:
            self.store.write(manifest)
            return
        self._require_there()
        replace_file(str(self._file(_HAS)), manifest.encode(), mode=0o600)

    def sync(self, files: Sequence[Path]) -> None:
        """Have it be on disk, and say so. Raises HostFault."""
        if self.has(DONE):
            return
        try:
            sync(*(file for file in (*files, self._file(_HAS)) if file.exists()))
        except OSError as error:
            raise HostFault(f"{self._part}: {error.strerror}") from None
        self.tell(DONE)

    def whole(self) -> Manifest:
        """Return what it is, of all nodes' parts. Raises HostFault."""
        place = self.store.directory / self.name
        try:
            files = (self._file(_HAS, number) for number in range(len(self.nodes)))
            parts = [Manifest.decode(file.read_bytes(), place) for file in files]
        except OSError as error:
            raise HostFault(f"{error.filename}: {error.strerror}") from None
        guests = tuple(guest for part in parts for guest in part.guests)
        return replace(parts[0], guests=guests, nodes=len(self.nodes))

    def given_up(self, error: Exception) -> Exception:
        """Have there be none, as this node has failed; return why, if another did so before.

        It stays what it was if the first node's guest ends at this moment (:meth:`end`).
        """
        if not self.several:
            return error
        if self._part.exists():
            with suppress(OSError, HostFault):  # a full disk
                said = str(error) if self.number == 0 else f"{self.nodes[self.number]}: {error}"
                replace_file(str(self._part / WHY), said.encode(), mode=0o600)
        try:
            self._part.rename(self.store.lost(self.name))
            if self.number and (self.store.lost(self.name) / ENDS).exists():
                self.store.lost(self.name).rename(self._part)
        except FileNotFoundError:
            why = "" if self.store.has(self.name) else self._why()
            return HostFault(why) if why else error
        except OSError as wrong:
            return HostFault(f"{error}; {wrong.filename}: {wrong.strerror}")
        return error

    def _touch(self, file: Path) -> None:
        self._require_there()
        try:
            file.touch(mode=0o600)
        except OSError as error:
            raise HostFault(f"{error.filename}: {error.strerror}") from None

    def _names(self) -> set[str]:
        self._require_there()
        with suppress(FileNotFoundError):
            return {file.name for file in self._part.iterdir()}
        raise self._given_up()

    def _require_there(self) -> None:
        """Raise HostFault if another node has given it up."""
        if not self._part.exists():
            raise self._given_up()

    def _given_up(self) -> HostFault:
        return HostFault(self._why() or "another node of the job has given it up")

    def _why(self) -> str:
        with suppress(OSError):
            said = (self.store.lost(self.name) / WHY).read_bytes()
            return printable(said.decode("utf-8", "replace"), 500)
        return ""


class Lookout:
    """What the first nodes of jobs ask of this one.

    The place may hang: a process of its own looks, for which nobody waits.
    """

    def __init__(self, settings: Settings) -> None:
        self._top = settings.checkpoints if settings.checkpoints_shared else ""
        self._every, self._lines = settings.query_interval, Lines(_TIME)
        self._jobs: dict[str, tuple[int, float]] = {}  # whose, and when it was here last
        self._asked: dict[str, tuple[str, bool]] = {}

    def asked(self, job: RunningJob) -> tuple[str, bool] | None:
        """Return which checkpoint of a job is asked for, and whether it ends then; None: none.

        Raises OSError.
        """
        if not self._top:
            return None
        now, top = time.monotonic(), Path(self._top)
        self._jobs[job.job.key] = (job.job.uid, now)
        jobs = {key: uid for key, (uid, at) in self._jobs.items() if now - at < _TIME}
        said = self._lines.told(lambda to: _look(top, jobs, to), self._every)
        if said is not None:
            self._jobs = {key: self._jobs[key] for key in jobs}
            found = (line.split(" ") for line in said)
            self._asked = {key: (name, ends == "ends") for key, name, ends in found}
        return self._asked.pop(job.job.key, None)


def _look(top: Path, jobs: Mapping[str, int], to: int) -> None:
    for key, uid in jobs.items():
        store = Store(top, uid)
        for name in store.unfinished(key):
            with suppress(FileNotFoundError, ConfigError):  # it is over, or not root's
                ends = json.loads((store.begun(name) / ASKS).read_bytes())["ends"]
                os.write(to, f"{key} {name} {'ends' if ends else 'stays'}\n".encode())
