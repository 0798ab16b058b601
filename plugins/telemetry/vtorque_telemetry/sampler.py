"""The node's one sampler: every interval it measures all guests of all jobs. Root.

The resource ``process.Sampler`` starts this process after the first job's boot, and ends it with
the last. It keeps nothing that matters, so it may be killed at any time: the next job starts
it again, and it goes on with the files that it finds.

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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Paths, printable
from vtorque_core.live import changes, extensions, jobs
from vtorque_core.live.jobs import Running, RunningJob
from vtorque_core.live.node_process import begin
from vtorque_telemetry.api import GROUP, Sample
from vtorque_telemetry.app import AppMeter
from vtorque_telemetry.measure import GuestMeter, Labels, Values
from vtorque_telemetry.outlets import Opened, Outlet, close_all
from vtorque_telemetry.process import CHANNEL, LAST, listen
from vtorque_telemetry.series import SeriesFile
from vtorque_telemetry.settings import Settings

_IDLE = 60.0  # seconds between two looks whether it is needed, while no guest runs
log = logging.getLogger("telemetry")
StatsOf = Callable[[str], Mapping[str, Mapping[str, Any]]]


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
        spans = _spans(self.job.phases, at)
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
                whose, interval = self.job.job, self._settings.interval
                self._series = SeriesFile(self.job.kept, whose.id, whose.node, interval)
            if not must and guest is not None and not self._series.due(guest, at):
                return False
            self._series.add(guest, at, values)
        except (OSError, HostFault) as error:  # a full disk: other jobs, and sinks, go on
            if str(error) != self._said:  # once, until it can be written again
                log.warning("%s: %s", self.job.job.id, error)
            self._said = str(error)
            return False
        self._said = ""
        return True


def _spans(phases: Sequence[tuple[str, float]], now: float) -> dict[str, float]:
    """Return the seconds of each phase, the last one until ``now`` (Unix time)."""
    ends = [*(at for _, at in phases[1:]), now]
    found: dict[str, float] = {}
    for (name, at), end in zip(phases, ends, strict=True):
        found[name] = found.get(name, 0.0) + max(0.0, end - at)
    return found


class Loop:
    """All jobs of the node. Nothing that is wrong with one of them ends it."""

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        outlets: list[Outlet],
        stats: Callable[[str], Mapping[str, Mapping[str, Any]]] = jobs.domain_stats,
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
        found = {each.job.key: each for each in self._running.jobs() if each.guests}
        ended = {key: self.jobs.pop(key) for key in self.jobs.keys() - found.keys()}
        for meter in ended.values():
            meter.close()
        for key, job in found.items():
            if key not in self.jobs:
                self.jobs[key] = JobMeter(job, self.settings)
            self.jobs[key].look(job)
        left = {each.job.id for each in found.values()}
        return {meter.job.job.id for meter in ended.values()} - left


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
            connection.settimeout(LAST)
            key = connection.recv(256).decode("utf-8", "replace")
            if key in loop.jobs:
                loop.tick(last=key)
            connection.sendall(b"1")


def _open(config: Path) -> tuple[Settings, list[Outlet]]:
    """Return an outlet for each exporter that is root's, and one for all others."""
    site, found = extensions.load(config, GROUP)
    settings = site[Settings]
    outlets, others = [], []
    for name in dict.fromkeys(settings.exporters):
        try:
            opening = found.function(name)
        except Exception as error:  # anybody's module
            log.warning("exporter %s: %s", name, printable(str(error)))
            continue
        if getattr(opening, "as_root", False):
            outlets.append(Outlet(name, Opened(partial(opening, site)), settings.deadline))
        else:
            others.append(name)
    if others:
        from vtorque_telemetry.outside import Outside  # noqa: PLC0415 - subprocess, pickle

        outlets.append(Outlet("process", Outside(config, others), settings.deadline))
    return settings, outlets


def main() -> None:
    """Run with the arguments of ``Sampler.of``: a site config."""
    paths, (config,) = begin("telemetry")
    control = listen(paths.run / "telemetry.sock")
    try:
        settings, outlets = _open(Path(config))
    except Exception:
        log.exception("%s", config)
        settings, outlets = Settings(), []

    def end(_number: int, _frame: object) -> None:
        close_all(outlets)
        (paths.run / "telemetry.sock").unlink(missing_ok=True)
        os._exit(0)  # a sink may hang

    signal.signal(signal.SIGTERM, end)
    events = changes.events()
    changes.watch(events, paths.journal)
    serve(Loop(paths, settings, outlets), events, control, (paths.run / "telemetry.lock").exists)


if __name__ == "__main__":
    main()
