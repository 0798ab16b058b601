"""The sampler's unprivileged part: reads jobs' metrics, writes series.jsonl, calls exporters.

Root sends its measurements and open files in ticks (:mod:`vtorque_telemetry.tick`).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence

from vtorque_telemetry.api import Sample
from vtorque_telemetry.app import AppMeter
from vtorque_telemetry.labels import Labels
from vtorque_telemetry.metrics import COUNTED, Values
from vtorque_telemetry.outlets import ExporterThread
from vtorque_telemetry.series import SeriesFile
from vtorque_telemetry.settings import Settings
from vtorque_telemetry.tick import GuestFigures, JobFigures, Name, Tick

log = logging.getLogger("telemetry")


class GuestSamples:
    """The state of one guest's samples.

    ``app`` reads the metrics that the guest's programs write. ``labels`` creates samples with the
    guest's labels.
    """

    def __init__(self, labels: Mapping[str, str], guest: GuestFigures) -> None:
        self.app = AppMeter()
        self.labels = Labels({**labels, "guest": str(guest.rank)})
        self.untold: Values = {}  # metrics of the guest's programs that are not in series.jsonl yet


class JobSamples:
    """All measurements of one job on this node."""

    def __init__(self, labels: Mapping[str, str], settings: Settings) -> None:
        self.id = labels["job"]
        self.broken = False  # whether an error was logged
        self.series: SeriesFile | None = None
        self._settings = settings
        self._labels = Labels(labels)
        self._guests: dict[int, GuestSamples] = {}
        self._phases: dict[str, float] = {}
        self._said = ""

    def close(self) -> None:
        """Close all files."""
        for guest in self._guests.values():
            guest.app.close()
        if self.series is not None:
            self.series.close()

    def take(self, guest: int | None, file: int, job: JobFigures) -> None:
        """Take ownership of an open file: series.jsonl if ``guest`` is None, or a socket.

        The socket is connected to the port on which the guest's programs write metrics.
        """
        if guest is not None:
            self._guest(guest, job).app.connect(socket.socket(fileno=file))
            return
        if self.series is not None:
            self.series.close()
        self.series = SeriesFile(file, self.id, job.labels["node"], self._settings.interval)

    def measure(self, job: JobFigures, at: float, *, last: bool = False) -> list[Sample]:
        """Return all current samples of the job, and append them to series.jsonl if due.

        ``at`` is in Unix seconds. With ``last``, the samples are appended in any case.
        """
        samples: list[Sample] = []
        rejected = 0
        for index, figures in job.guests.items():
            guest = self._guest(index, job)
            fresh: Values = {}
            if self._settings.app_series:
                known = sum(len(g.app.values) for g in self._guests.values())
                fresh = guest.app.read(self._settings.app_series - known)
                rejected += guest.app.rejected
            samples += guest.labels.samples({**figures.values, **guest.app.values}, at)
            guest.untold.update(fresh)  # written with the guest's next line
            told = guest.labels.texts({**figures.values, **guest.untold})
            if self._write(index, at, told, must=last):
                guest.untold.clear()
        spans = _spans(job.phases, at)
        whole: Values = {
            ("vtorque_job_phase_seconds", (("phase", n),)): v for n, v in spans.items()
        }
        names = [name for name, _ in job.phases]
        for name in COUNTED:
            whole["vtorque_job_phases_total", (("phase", name),)] = names.count(name)
        if rejected:
            whole["vtorque_job_app_lines_rejected_total", ()] = rejected
        samples += self._labels.samples(whole, at)
        done = dict(list(spans.items())[: None if last else -1])
        if done.keys() - self._phases.keys() or (last and done):
            self._phases = done
            self._write(None, at, self._labels.texts(whole), must=True)
        return samples

    def _guest(self, index: int, job: JobFigures) -> GuestSamples:
        if index not in self._guests:
            self._guests[index] = GuestSamples(job.labels, job.guests[index])
        return self._guests[index]

    def _write(self, guest: int | None, at: float, values: dict[str, float], *, must: bool) -> bool:
        """Write a line of series.jsonl if it is due or ``must`` is true; return True if written."""
        if self.series is None:  # root could not open the file, and has logged the error
            return False
        try:
            if not must and guest is not None and not self.series.is_due(guest, at):
                return False
            self.series.add(guest, at, values)
        except OSError as error:  # a full disk must not affect other jobs and sinks
            if str(error) != self._said:  # log once, until a write succeeds
                log.warning("%s: %s", self.id, error)
            self._said = str(error)
            return False
        self._said = ""
        return True


def _spans(phases: Sequence[tuple[str, float]], now: float) -> dict[str, float]:
    """Return the seconds of each phase. The last phase lasts until ``now`` (Unix time)."""
    ends = [*(at for _, at in phases[1:]), now]
    found: dict[str, float] = {}
    for (name, at), end in zip(phases, ends, strict=True):
        found[name] = found.get(name, 0.0) + max(0.0, end - at)
    return found


class Samples:
    """The samples of all jobs of the node. An error of one job does not affect other jobs."""

    def __init__(self, settings: Settings, outlets: Sequence[ExporterThread]) -> None:
        self.settings = settings
        self.outlets = outlets
        self.jobs: dict[str, JobSamples] = {}

    def take(self, tick: Tick, files: Sequence[int]) -> None:
        """Process a tick: pass samples to the exporters, and confirm a job's last sample."""
        ended = self._keep(tick)
        for name, file in zip(tick.files, files, strict=False):
            self._take(tick, name, file)
        samples: list[Sample] = []
        for key, job in tick.jobs.items():
            found = self.jobs[key]
            try:
                samples += found.measure(job, tick.at, last=key == tick.last)
            except Exception:  # a defect that one job triggers
                if not found.broken:
                    log.exception("%s", key)
                found.broken = True
        for outlet in self.outlets:
            outlet.give(samples, ended)
        if len(files) > len(tick.files):
            os.close(files[-1])

    def _keep(self, tick: Tick) -> set[str]:
        """Add new jobs and remove ended ones; return the ids of the ended jobs."""
        gone = {key: self.jobs.pop(key) for key in self.jobs.keys() - tick.jobs.keys()}
        for each in gone.values():
            each.close()
        for key, job in tick.jobs.items():
            if key not in self.jobs:
                self.jobs[key] = JobSamples(job.labels, self.settings)
        left = {job.labels["job"] for job in tick.jobs.values()}
        return {each.id for each in gone.values()} - left

    def _take(self, tick: Tick, name: Name, file: int) -> None:
        key, guest = name
        try:
            self.jobs[key].take(guest, file, tick.jobs[key])
        except OSError as error:
            os.close(file)
            log.warning("%s: %s", key, error)
