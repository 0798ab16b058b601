"""The node's one sampler: every interval it measures all guests of all jobs. Root.

The node-wide resource :class:`Sampler` starts this process after the first job's boot, and ends it
with the last. It keeps nothing that matters, so it may be killed at any time: the next job starts
it again, and it goes on with the files that it finds.

It waits for three things: the time of the next sample, a change of a journal while no guest runs,
and a job that ends and wants a last sample (:func:`last_sample`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, ClassVar

from vtorque_core import api_running
from vtorque_core.api_node import HostFault, unjournalled
from vtorque_core.api_resources import Process
from vtorque_core.api_running import Paths, Running, RunningJob
from vtorque_core.api_telemetry import Sample
from vtorque_telemetry.app import AppMeter
from vtorque_telemetry.measure import GuestMeter, Labels, Values
from vtorque_telemetry.outlets import Opened, Outlet, close_all
from vtorque_telemetry.series import SeriesFile
from vtorque_telemetry.settings import Settings

LOG_BYTES = 256 * 1024  # of each of two files
CHANNEL = "metrics.sock"
"""In a guest's run directory: the host's end of the port that the job's own lines come by."""

_LAST = 0.5  # seconds that the end of a job waits for its last sample
_IDLE = 60.0  # seconds between two looks whether it is needed, while no guest runs
log = logging.getLogger("telemetry")
StatsOf = Callable[[str], Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Sampler(Process):
    """One for all jobs of the node, known by its lock alone: settings change with the next one."""

    kind = "telemetry-sampler"
    scope: ClassVar = "node"
    quick = True
    argv: tuple[str, ...] = unjournalled(("telemetry-sampler",))
    lock: str = ""

    @classmethod
    def of(cls, paths: Paths, config: Path) -> Sampler:
        """Return the sampler of a node."""
        argv = (sys.executable, "-I", "-m", __name__, str(paths.state), str(paths.run), str(config))
        return cls(argv, lock=str(paths.run / "telemetry.lock"))

    def create(self) -> None:
        """Start it. Its socket is there at once, so that what is there does not change later.

        Raises HostFault.
        """
        try:
            _listen(Path(self.lock).with_suffix(".sock")).close()
        except OSError as error:
            raise HostFault(f"{self.lock}: {error.strerror}") from None
        super().create()

    def release(self) -> None:
        """End it, and remove what one that was killed has left."""
        super().release()
        for suffix in (".sock", ".sock.new"):
            Path(self.lock).with_suffix(suffix).unlink(missing_ok=True)


class JobMeter:
    """All that is measured of one job on this node."""

    def __init__(self, job: RunningJob, settings: Settings) -> None:
        self.job = job
        self.broken = False  # that was said
        self._settings = settings
        self._labels = Labels(job, None)
        self._guests: dict[int, tuple[GuestMeter, AppMeter, Labels]] = {}
        self._series: SeriesFile | None = None
        self._phases: dict[str, float] = {}
        self._untold: dict[int, Values] = {}  # the job's own, not yet in its file
        self._said = ""

    def close(self) -> None:
        """Close all files; they stay."""
        for meter, app, _ in self._guests.values():
            meter.close()
            app.close()
        if self._series is not None:
            self._series.close()

    def look(self, job: RunningJob) -> None:
        """Take over what the journal says now."""
        self.job = job
        for guest in job.guests:
            if guest.index in self._guests:
                self._guests[guest.index][0].guest = guest
            else:
                app = AppMeter(guest.run_dir / CHANNEL)
                self._guests[guest.index] = GuestMeter(guest), app, Labels(job, guest)

    def measure(self, stats_of: StatsOf, at: float, *, last: bool = False) -> list[Sample]:
        """Return all samples of now, and write them into the job's file."""
        samples: list[Sample] = []
        rejected = 0
        for index, (meter, app, labels) in self._guests.items():
            values = meter.measure(stats_of(meter.guest.uri).get(meter.guest.uuid))
            fresh: Values = {}
            if self._settings.app_series:
                known = sum(len(a.values) for _, a, _ in self._guests.values())
                fresh = app.read(self._settings.app_series - known)
                rejected += app.rejected
            samples += labels.samples({**values, **app.values}, at)
            untold = self._untold.setdefault(index, {})
            untold.update(fresh)  # with the next line: a job that talks does not shorten its series
            if self._write(index, at, labels.texts({**values, **untold}), must=last):
                untold.clear()
        spans = self.job.spans(at)
        whole: Values = {
            ("vtorque_job_phase_seconds", (("phase", n),)): v for n, v in spans.items()
        }
        if rejected:
            whole["vtorque_job_app_lines_rejected_total", ()] = rejected
        samples += self._labels.samples(whole, at)
        done = dict(list(spans.items())[: None if last else -1])
        if done.keys() - self._phases.keys() or (last and done):
            self._phases = done
            self._write(None, at, self._labels.texts(whole), must=True)
        return samples

    def _write(self, guest: int | None, at: float, values: dict[str, float], *, must: bool) -> bool:
        """Write a line if it is time for one, or it must be; return whether it was."""
        try:
            if self._series is None:
                job, interval = self.job, self._settings.interval
                self._series = SeriesFile(job.kept, job.id, job.node, interval)
            if not must and guest is not None and not self._series.due(guest, at):
                return False
            self._series.add(guest, at, values)
        except (OSError, HostFault) as error:  # a full disk: other jobs, and sinks, go on
            if str(error) != self._said:  # once, until it can be written again
                log.warning("%s: %s", self.job.id, error)
            self._said = str(error)
            return False
        self._said = ""
        return True


class Loop:
    """All jobs of the node. Nothing that is wrong with one of them ends it."""

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        outlets: list[Outlet],
        stats: Callable[[str], Mapping[str, Mapping[str, Any]]] = api_running.domain_stats,
    ) -> None:
        self.settings = settings
        self.outlets = outlets
        self.jobs: dict[str, JobMeter] = {}
        self._running = Running(paths)
        self._stats = stats
        self._said = ""

    def tick(self, last: str = "") -> None:
        """Measure all jobs once; ``last`` is the key of one that ends."""
        ended = self._look()
        at = time.time()
        answers: dict[str, Mapping[str, Mapping[str, Any]]] = {}

        def stats_of(uri: str) -> Mapping[str, Mapping[str, Any]]:
            if uri not in answers:
                answers[uri] = self._ask(uri)
            return answers[uri]

        samples: list[Sample] = []
        for key, meter in self.jobs.items():
            try:
                samples += meter.measure(stats_of, at, last=key == last)
            except Exception:  # a defect in what one job has brought about
                if not meter.broken:
                    log.exception("%s", key)
                meter.broken = True
        for outlet in self.outlets:
            outlet.give(samples, ended)

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

    def _look(self) -> set[str]:
        """Read from the journals what runs; return the ids of jobs that have ended."""
        found = {job.key: job for job in self._running.jobs() if job.guests}
        ended = {key: self.jobs.pop(key) for key in self.jobs.keys() - found.keys()}
        for meter in ended.values():
            meter.close()
        for key, job in found.items():
            if key not in self.jobs:
                self.jobs[key] = JobMeter(job, self.settings)
            self.jobs[key].look(job)
        left = {job.id for job in found.values()}
        return {meter.job.id for meter in ended.values()} - left


def serve(loop: Loop, events: int, control: socket.socket, needed: Callable[[], bool]) -> None:
    """Sample until killed, or not needed: the node's directories are gone."""
    interval, due = loop.settings.interval, 0.0
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
    """Take the last sample of a job that ends, and say so."""
    with contextlib.suppress(OSError):
        connection, _ = control.accept()
        with connection:
            connection.settimeout(_LAST)
            key = connection.recv(256).decode("utf-8", "replace")
            if key in loop.jobs:
                loop.tick(last=key)
            connection.sendall(b"1")


def last_sample(paths: Paths, key: str) -> None:
    """Have the sampler take a job's last sample, while its guests are still there. As root.

    Waits at most half a second; nothing is lost but that sample if there is no answer.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_LAST)
        connection.connect(os.fspath(paths.run / "telemetry.sock"))
        connection.sendall(key.encode())
        connection.recv(1)


def _listen(path: Path) -> socket.socket:
    fresh = path.with_suffix(".sock.new")
    fresh.unlink(missing_ok=True)
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(os.fspath(fresh))
        fresh.chmod(0o600)
        listener.listen(16)
        fresh.rename(path)
        undo.pop_all()
    return listener


def _open(config: Path) -> tuple[Settings, list[Outlet]]:
    """Return an outlet for each wanted exporter; it opens it in its own thread."""
    known = api_running.exporters(config)
    settings = known.site[Settings]
    for wrong in known.wrong:
        log.warning("%s", wrong)
    outlets = []
    for name in dict.fromkeys(settings.exporters):
        if name not in known.found:
            log.warning(
                "no plugin brings the exporter %r (there are: %s)", name, ", ".join(known.found)
            )
            continue
        opening = partial(known.found[name].open, known.site)
        outlets.append(Outlet(name, Opened(opening), settings.deadline))
    return settings, outlets


def main() -> None:
    """Run with the arguments of :meth:`Sampler.of`."""
    state, run, config = (Path(word) for word in sys.argv[1:])
    os.umask(0o077)
    handler = RotatingFileHandler(state / "telemetry.log", maxBytes=LOG_BYTES, backupCount=1)
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s", handlers=[handler])
    paths = Paths(state, run)
    control = _listen(run / "telemetry.sock")
    try:
        settings, outlets = _open(config)
    except Exception:
        log.exception("%s", config)
        settings, outlets = Settings(), []

    def end(_number: int, _frame: object) -> None:
        close_all(outlets)
        (run / "telemetry.sock").unlink(missing_ok=True)
        os._exit(0)  # a sink may hang

    signal.signal(signal.SIGTERM, end)
    events = api_running.journal_events(paths)
    serve(Loop(paths, settings, outlets), events, control, (run / "telemetry.lock").exists)


if __name__ == "__main__":
    main()
