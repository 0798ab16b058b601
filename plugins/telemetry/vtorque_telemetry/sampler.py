"""The node's one sampler, root's half: every interval it measures all guests of all jobs. Root.

The resource ``process.Sampler`` starts this process after the first job's boot, and ends it with
the last. It reads journals, libvirt's and the kernel's counters, connects to guests' ports and
opens files; nothing that a guest or a user said comes here. All that goes to a process of its
own, :mod:`vtorque_telemetry.outside`. Neither keeps anything that matters: they may be killed at
any time, the next job starts them again, and they go on with the files that they find.

It waits for three things: the time of the next sample, a change of a journal while no guest runs,
and a job that ends and wants a last sample (``process.last_sample``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from vtorque_core.api import HostFault, Paths
from vtorque_core.live import changes, extensions, jobs, suspend
from vtorque_core.live.jobs import Running, RunningJob
from vtorque_core.live.node_process import begin
from vtorque_telemetry.api import GROUP
from vtorque_telemetry.figures import GuestMeter
from vtorque_telemetry.outside import Outside
from vtorque_telemetry.process import CHANNEL, LAST, listen
from vtorque_telemetry.series import NAME
from vtorque_telemetry.settings import Settings
from vtorque_telemetry.tick import GuestFigures, JobFigures, Name, Tick

_IDLE = 60.0  # seconds between two looks whether it is needed, while no guest runs
log = logging.getLogger("telemetry")
StatsOf = Callable[[str], Mapping[str, Mapping[str, Any]]]


class Takes(Protocol):
    """Who takes what was measured; the files stay open here."""

    def send(self, tick: Tick, files: Mapping[Name, int], answer: int = -1) -> None:
        """Take it, and close ``answer``, a pipe's, when that is done. Never waits."""
        ...


class Port:
    """The connection to the port that a guest's own lines come by: nobody here reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Close our end."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def descriptor(self) -> int | None:
        """Return the connection, a new one if QEMU has closed it; None if there is none."""
        before, self._socket = self._socket, self._socket or _connected(self._path)
        if before is not None and _is_closed(before):
            self._socket = _connected(self._path)  # before the other's number is free
            before.close()
        return None if self._socket is None else self._socket.fileno()


def _is_closed(connection: socket.socket) -> bool:
    waiting = select.poll()
    waiting.register(connection, 0)  # POLLHUP and POLLERR are always told
    return bool(waiting.poll(0))


def _connected(path: Path) -> socket.socket | None:
    """Connect to a root-only socket of QEMU's; None: no such channel, guest gone, not yet there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(os.fspath(path))
    except OSError:
        connection.close()
        return None
    return connection


class JobMeter:
    """What root measures and opens of one job on this node."""

    def __init__(self, job: RunningJob) -> None:
        self.job = job
        self.broken = False  # that was said
        self._guests: dict[int, tuple[GuestMeter, Port]] = {}
        self._series = -1
        self._said = ""

    def close(self) -> None:
        """Close all files; they stay."""
        for meter, port in self._guests.values():
            meter.close()
            port.close()
        if self._series >= 0:
            os.close(self._series)
            self._series = -1

    def look(self, job: RunningJob) -> None:
        """Take over what the journal says now."""
        self.job = job
        for guest in job.guests:
            if guest.index in self._guests:
                self._guests[guest.index][0].guest = guest
            else:
                self._guests[guest.index] = GuestMeter(guest), Port(guest.run_dir / CHANNEL)

    def measure(self, stats_of: StatsOf) -> JobFigures:
        """Return its figures of now; none of guests that stand still: the phases say why."""
        guests = {}
        still = suspend.stands_still(self.job)
        for index, (meter, _) in () if still else self._guests.items():
            values = meter.measure(stats_of(meter.guest.uri).get(meter.guest.uuid))
            guests[index] = GuestFigures(meter.guest.rank, values)
        whose = self.job.job
        labels = {"job": whose.id, "user": whose.owner, "node": whose.node}
        return JobFigures(labels, self.job.phases, guests)

    def files(self, key: str) -> Iterator[tuple[Name, int]]:
        """Yield what is open for it."""
        if self._series < 0:
            self._open()
        if self._series >= 0:
            yield (key, None), self._series
        for index, (_, port) in self._guests.items():
            descriptor = port.descriptor()
            if descriptor is not None:
                yield (key, index), descriptor

    def _open(self) -> None:
        """Open the job's file, to be read, too."""
        kept = self.job.kept
        try:
            os.close(kept.append(NAME))  # which makes it, with the owner's right to read
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            self._series = os.open(kept.directory / NAME, flags)
            self._said = ""
        except (OSError, HostFault) as error:  # a full disk: other jobs, and sinks, go on
            if str(error) != self._said:
                log.warning("%s: %s", self.job.job.id, error)
            self._said = str(error)


class Loop:
    """All jobs of the node. Nothing that is wrong with one of them ends it."""

    def __init__(
        self,
        paths: Paths,
        interval: float,
        to: Takes,
        stats: Callable[[str], Mapping[str, Mapping[str, Any]]] = jobs.domain_stats,
    ) -> None:
        self.interval = interval
        self.jobs: dict[str, JobMeter] = {}
        self._to = to
        self._running = Running(paths)
        self._stats = stats
        self._said = ""

    def tick(self, last: str = "", answer: int = -1) -> None:
        """Measure all jobs once; ``last`` is the key of one that ends, ``answer`` waits for it."""
        self._look()
        at = time.time()
        answers: dict[str, Mapping[str, Mapping[str, Any]]] = {}

        def stats_of(uri: str) -> Mapping[str, Mapping[str, Any]]:
            if uri not in answers:
                answers[uri] = self._ask(uri)
            return answers[uri]

        figures: dict[str, JobFigures] = {}
        files: dict[Name, int] = {}
        for key, meter in self.jobs.items():
            try:
                figures[key] = meter.measure(stats_of)
                files |= dict(meter.files(key))
            except Exception:  # a defect in what one job has brought about
                if not meter.broken:
                    log.exception("%s", key)
                meter.broken = True
        self._to.send(Tick(at, figures, last=last), files, answer)

    def _ask(self, uri: str) -> Mapping[str, Mapping[str, Any]]:
        try:
            found = self._stats(uri)
            self._said = ""
        except HostFault as error:
            if str(error) != self._said:  # once, until it answers again
                log.warning("%s", error)
            self._said = str(error)
            return {}
        return found

    def _look(self) -> None:
        """Read from the journals what runs."""
        found = {each.job.key: each for each in self._running.jobs() if each.guests}
        for key in self.jobs.keys() - found.keys():
            self.jobs.pop(key).close()
        for key, job in found.items():
            if key not in self.jobs:
                self.jobs[key] = JobMeter(job)
            self.jobs[key].look(job)


def serve(loop: Loop, events: int, control: socket.socket, needed: Callable[[], bool]) -> None:
    """Sample until killed, or not needed: the node's directories are gone."""
    interval, due = loop.interval, 0.0
    while loop.jobs or needed():
        now = time.monotonic()
        if now >= due:
            loop.tick()
            # From a fixed beat, so that a slow one does not shift all others.
            due = max(due + interval, time.monotonic() + interval / 4) if due else now + interval
        wait = max(0.0, due - time.monotonic()) if loop.jobs else _IDLE
        waiting = select.poll()
        waiting.register(control, select.POLLIN)
        if not loop.jobs:
            waiting.register(events, select.POLLIN)
        ready = {number for number, _ in waiting.poll(wait * 1000)}
        if events in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(events, 1 << 16)
            due = 0.0
        if control.fileno() in ready:
            _answer(loop, control)


def _answer(loop: Loop, control: socket.socket) -> None:
    """Take the last sample of a job that ends; who writes it says so."""
    with contextlib.suppress(OSError):
        connection, _ = control.accept()
        with connection:
            connection.settimeout(LAST)
            key = connection.recv(256).decode("utf-8", "replace")
            done, told = os.pipe()
            socket.send_fds(connection, [b"p"], [done])
            os.close(done)
            if key in loop.jobs:
                loop.tick(key, told)
            os.close(told)


def main() -> None:
    """Run with the arguments of ``Sampler.of``: a site config."""
    paths, (config,) = begin("telemetry")
    control = listen(paths.run / "telemetry.sock")
    try:
        site, _ = extensions.load(Path(config), GROUP)
        settings = site[Settings]
    except Exception:
        log.exception("%s", config)
        settings = Settings()
    outside = Outside(Path(config))

    def end(_number: int, _frame: object) -> None:
        outside.close()
        (paths.run / "telemetry.sock").unlink(missing_ok=True)
        os._exit(0)  # a call of libvirt's may hang

    signal.signal(signal.SIGTERM, end)
    events = changes.events()
    changes.watch(events, paths.journal)
    loop = Loop(paths, settings.interval, outside)
    serve(loop, events, control, (paths.run / "telemetry.lock").exists)


if __name__ == "__main__":
    main()
