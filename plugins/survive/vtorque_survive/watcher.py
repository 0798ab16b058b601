"""The node's watcher: has guests stand still while their job does, and go on with it. Root.

A job stands still when its owner says so (``request``), when its batch system has stopped its job
shell on this node, or, where it has none as on a job's other nodes, when the batch system says
that it is suspended. No hook of any batch system runs then, and SIGSTOP cannot be caught.

Nothing that matters is only in its memory: what the owner asked is a file, what was done is in the
job's journal. So it may be killed at any time: the next one goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vtorque_core.api import HostFault, Paths
from vtorque_core.api.batch_system import Life
from vtorque_core.api.children import Child
from vtorque_core.api.read_apart import reader
from vtorque_core.live import changes, service, suspend
from vtorque_core.live.jobs import Running, RunningJob
from vtorque_core.live.node_process import begin
from vtorque_survive import request
from vtorque_survive.process import NAME
from vtorque_survive.settings import Settings
from vtorque_survive.stopped import is_stopped

_IDLE = 60.0  # seconds between two looks while no script runs here
_AGAIN = 2.0  # seconds until a change that failed is tried again
_BATCH_TIME = 30.0  # seconds for an answer of the batch system
_MOST_SAID = 32 << 10  # bytes of such an answer: less than a pipe holds (pipe(7))
_OWNER = "its owner asked for it"
ASKED = "paused-by-owner"  # a file in the job's directory of state
log = logging.getLogger(NAME)


@dataclass
class Watched:
    """A job whose script runs here, and the socket by which its owner asks.

    ``change``: the process that has its guests stand still or go on, if one is at work; ``whose``:
    who is told when it has ended. ``again``: not before, after a change that failed.
    """

    job: RunningJob
    socket: socket.socket
    change: Child | None = None
    whose: bytes = b""
    again: float = 0.0
    said: str = ""


class Batch:
    """What the batch system says of jobs that have no process here: which it has suspended.

    It is asked by a process of its own, for which nobody waits: what it said last counts.
    """

    def __init__(self, config: Path, seconds: float) -> None:
        self._config, self._seconds = config, seconds
        self._at, self._known = float("-inf"), frozenset[str]()
        self._asking: tuple[Child, int] | None = None

    def suspended(self, ids: Sequence[str]) -> frozenset[str]:
        """Return which of these it has suspended, as far as it is known."""
        if self._asking is None and time.monotonic() - self._at >= self._seconds:
            answer, told = os.pipe()
            self._asking = Child(lambda: self._ask(ids, told), _BATCH_TIME), answer
            os.close(told)
        if self._asking is not None and self._asking[0].check():
            child, answer = self._asking
            with os.fdopen(answer, encoding="utf-8") as file:
                if not child.error:
                    self._known = frozenset(file.read().split())
            self._at, self._asking = time.monotonic(), None
        return self._known

    def _ask(self, ids: Sequence[str], told: int) -> None:
        site, batch = service.batch_system(self._config)
        found = batch.node(site).alive(ids)
        if Life.UNKNOWN in found.values():
            raise HostFault("it does not answer")
        words = (each for each, life in found.items() if life is Life.SUSPENDED)
        os.write(told, " ".join(words).encode()[:_MOST_SAID])


@dataclass
class Loop:
    """All jobs of the node. Nothing that is wrong with one of them holds up another."""

    paths: Paths
    suspended: Callable[[Sequence[str]], Collection[str]]
    jobs: dict[str, Watched] = field(default_factory=dict)
    _running: Running | None = None

    def look(self) -> None:
        """Do what is to be done now, for each job."""
        for watched in self.jobs.values():
            self._collect(watched)
        self._find()
        stopped = dict(self._stopped())
        for key, watched in self.jobs.items():
            if watched.change is None:
                self._bring(watched, stopped[key], request.taken(watched.socket))

    def waits_for(self) -> list[int]:
        """Return what is readable when there is something to do."""
        return [
            watched.socket.fileno() if watched.change is None else watched.change.fileno()
            for watched in self.jobs.values()
        ]

    def _find(self) -> None:
        """Look which jobs there are."""
        self._running = self._running or Running(self.paths)
        found = {job.job.key: job for job in self._running.jobs()}
        found = {key: job for key, job in found.items() if suspend.phase(job)}
        for key in [key for key in self.jobs if key not in found]:
            if self.jobs[key].change is None:
                self.jobs.pop(key).socket.close()
        for key, job in found.items():
            if key in self.jobs:
                self.jobs[key].job = job
                continue
            with contextlib.suppress(OSError):  # it is being torn down
                path = request.path_of(self.paths, key)
                self.jobs[key] = Watched(job, request.listen(path, job.job.uid))

    def _stopped(self) -> Iterator[tuple[str, str]]:
        """Yield for each job who has stopped it, and is not its owner; empty: nobody."""
        elsewhere = {}
        for key, watched in self.jobs.items():
            shell = suspend.job_shell(self.paths, watched.job)
            if shell is not None:
                yield key, "its processes were stopped" if is_stopped(shell) else ""
            elif len(watched.job.kept.facts().get("nodes", ())) > 1:
                elsewhere[key] = watched.job.job.id
            else:
                yield key, ""
        told = self.suspended(list(elsewhere.values())) if elsewhere else ()
        for key, job_id in elsewhere.items():
            yield key, "the batch system has suspended it" if job_id in told else ""

    def _collect(self, watched: Watched) -> None:
        """See whether a change has ended, and tell who has asked for it."""
        if watched.change is None or not watched.change.check():
            return
        error = watched.change.error or ""
        request.answer(watched.socket, watched.whose, error)
        watched.change, watched.whose = None, b""
        if error and error != watched.said:
            log.warning("%s: %s", watched.job.job.id, error)
        watched.said, watched.again = error, time.monotonic() + _AGAIN if error else 0.0

    def _bring(self, watched: Watched, stopped: str, asked: tuple[str, bytes] | None) -> None:
        """Have the guests do as the job does, or as its owner asks, if they do not yet."""
        file = self.paths.job_state(watched.job.job.key) / ASKED
        word, whose = asked or ("", b"")
        if word == request.SUSPEND:
            file.touch(mode=0o600)
        elif word == request.RESUME:
            file.unlink(missing_ok=True)
            if stopped:
                request.answer(watched.socket, whose, f"{stopped}: have the batch system resume it")
                return
        if stopped:
            to, why = suspend.SUSPENDED, stopped
        elif file.exists():
            to, why = suspend.PAUSED, _OWNER
        else:
            to, why = suspend.RUNS, _OWNER if asked else "its processes go on"
        if to == suspend.phase(watched.job):
            request.answer(watched.socket, whose, "")
        elif asked is not None or time.monotonic() >= watched.again:
            watched.whose = whose
            watched.change = suspend.begin(self.paths, watched.job, to, why)


def serve(loop: Loop, events: int, look: float, needed: Callable[[], bool]) -> None:
    """Look, and wait for what happens, until it is not needed any more."""
    while needed():
        try:
            loop.look()
        except Exception:  # a defect must not leave jobs suspended for ever
            log.exception("look")
        select.select([events, *loop.waits_for()], [], [], look if loop.jobs else _IDLE)
        with contextlib.suppress(BlockingIOError):
            os.read(events, 1 << 16)


def main() -> None:
    """Run with the arguments of ``Watcher.of``: a site config."""
    paths, (config,) = begin(NAME)
    site, _ = service.batch_system(Path(config))
    settings = site[Settings]
    events = changes.events()
    changes.watch(events, paths.journal)
    with reader():
        loop = Loop(paths, Batch(Path(config), settings.ask).suspended)
        serve(loop, events, settings.look, (paths.run / f"{NAME}.lock").exists)


if __name__ == "__main__":
    main()
