"""Root's part of the node's sampler: measures all guests of all jobs at each interval.

The resource ``process.Sampler`` starts this process while the first job's guests boot, and ends it
with the last job. The process reads job journals and counters of libvirt and the kernel. It opens
series.jsonl and the ports on which guests' programs write metrics. Only the unprivileged process
``unprivileged_sampler`` reads data of guests and users from them. Both processes may be killed at
any time: the next job restarts them, and they append to series.jsonl.

The sampler waits for the next interval or, while no guest runs, for journal changes. An epilogue
can request a job's last sample (``process.last_sample``).

Privileges: root.
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
from vtorque_core.api.children import wait_readable
from vtorque_core.live import changes, extensions, suspend
from vtorque_core.live.jobs import RunningJob, RunningJobs
from vtorque_core.live.node_process import initialize
from vtorque_telemetry.api import GROUP
from vtorque_telemetry.domain_stats import domain_stats
from vtorque_telemetry.figures import GuestMeter
from vtorque_telemetry.process import CHANNEL, LAST, listen
from vtorque_telemetry.series import NAME
from vtorque_telemetry.settings import Settings
from vtorque_telemetry.tick import GuestFigures, JobFigures, Name, Tick
from vtorque_telemetry.unprivileged_sampler import UnprivilegedExporters

_IDLE = 60.0  # seconds between two checks whether the node still needs the sampler
log = logging.getLogger("telemetry")
StatsOf = Callable[[str], Mapping[str, Mapping[str, Any]]]


class TickReceiver(Protocol):
    """A receiver of ticks (:mod:`vtorque_telemetry.tick`)."""

    def send(self, tick: Tick, files: Mapping[Name, int], answer: int = -1) -> None:
        """Send a tick. Never blocks.

        The receiver closes the pipe ``answer`` once the tick is processed.
        """
        ...


class Port:
    """A connection to the port on which a guest's programs write metrics. Root does not read it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Close root's end of the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def descriptor(self) -> int | None:
        """Return the connection's descriptor; connect first if necessary. None if that fails."""
        before, self._socket = self._socket, self._socket or _connect_agent(self._path)
        if before is not None and _is_closed(before):
            self._socket = _connect_agent(self._path)  # before close(): a new number
            before.close()
        return None if self._socket is None else self._socket.fileno()


def _is_closed(connection: socket.socket) -> bool:
    waiting = select.poll()
    waiting.register(connection, 0)  # POLLHUP and POLLERR are always reported
    return bool(waiting.poll(0))


def _connect_agent(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(os.fspath(path))
    except OSError:
        connection.close()
        return None
    return connection


class JobMeter:
    """A meter of one job. It keeps series.jsonl and a :class:`Port` of each guest open."""

    def __init__(self, job: RunningJob) -> None:
        self.job = job
        self.broken = False  # whether an error was logged
        self._guests: dict[int, tuple[GuestMeter, Port]] = {}
        self._series = -1
        self._said = ""

    def close(self) -> None:
        """Close all files."""
        for meter, port in self._guests.values():
            meter.close()
            port.close()
        if self._series >= 0:
            os.close(self._series)
            self._series = -1

    def update(self, job: RunningJob) -> None:
        """Update the guests from the journal."""
        self.job = job
        for guest in job.guests:
            if guest.index in self._guests:
                self._guests[guest.index][0].guest = guest
            else:
                self._guests[guest.index] = GuestMeter(guest), Port(guest.run_dir / CHANNEL)

    def measure(self, stats_of: StatsOf) -> JobFigures:
        """Return the current values. Guests are omitted while the job is suspended."""
        guests = {}
        still = suspend.is_suspended(self.job)
        for index, (meter, _) in () if still else self._guests.items():
            values = meter.measure(stats_of(meter.guest.uri).get(meter.guest.uuid))
            guests[index] = GuestFigures(meter.guest.rank, values)
        whose = self.job.job
        labels = {"job": whose.id, "user": whose.owner, "node": whose.node}
        return JobFigures(labels, self.job.phases, guests)

    def files(self, key: str) -> Iterator[tuple[Name, int]]:
        """Yield name and descriptor of series.jsonl and of each guest's :class:`Port`.

        The name of a guest's port is ``key`` and the guest's index, that of series.jsonl ``key``
        and None. Opens series.jsonl and connects to the ports if necessary.
        """
        if self._series < 0:
            self._open_series()
        if self._series >= 0:
            yield (key, None), self._series
        for index, (_, port) in self._guests.items():
            descriptor = port.descriptor()
            if descriptor is not None:
                yield (key, index), descriptor

    def _open_series(self) -> None:
        kept = self.job.kept
        try:
            os.close(kept.append(NAME))  # creates it, readable by the owner
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            self._series = os.open(kept.directory / NAME, flags)
            self._said = ""
        except (OSError, HostFault) as error:  # a full disk must not affect other jobs and sinks
            if str(error) != self._said:
                log.warning("%s: %s", self.job.job.id, error)
            self._said = str(error)


class SamplerLoop:
    """The sampler's loop over all jobs of the node. An error of one job does not stop the loop."""

    def __init__(
        self,
        paths: Paths,
        interval: float,
        to: TickReceiver,
        stats: Callable[[str], Mapping[str, Mapping[str, Any]]] = domain_stats,
    ) -> None:
        self.interval = interval
        self.jobs: dict[str, JobMeter] = {}
        self._to = to
        self._running = RunningJobs(paths)
        self._stats = stats
        self._said = ""

    def tick(self, last: str = "", answer: int = -1) -> None:
        """Measure all jobs once, and send the values.

        ``last`` is the key of an ending job, and ``answer`` the pipe on which its epilogue waits.
        """
        self._update_jobs()
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
            except Exception:  # a defect that one job triggers
                if not meter.broken:
                    log.exception("%s", key)
                meter.broken = True
        self._to.send(Tick(at, figures, last=last), files, answer)

    def _ask(self, uri: str) -> Mapping[str, Mapping[str, Any]]:
        try:
            found = self._stats(uri)
            self._said = ""
        except HostFault as error:
            if str(error) != self._said:  # log once, until libvirt answers
                log.warning("%s", error)
            self._said = str(error)
            return {}
        return found

    def _update_jobs(self) -> None:
        found = {each.job.key: each for each in self._running.jobs() if each.guests}
        for key in self.jobs.keys() - found.keys():
            self.jobs.pop(key).close()
        for key, job in found.items():
            if key not in self.jobs:
                self.jobs[key] = JobMeter(job)
            self.jobs[key].update(job)


def serve(
    loop: SamplerLoop, events: int, control: socket.socket, needed: Callable[[], bool]
) -> None:
    """Measure at each interval, while there are jobs or ``needed`` returns True."""
    interval, due = loop.interval, 0.0
    while loop.jobs or needed():
        now = time.monotonic()
        if now >= due:
            loop.tick()
            # At fixed times, so that a slow sample does not delay all later ones.
            due = max(due + interval, time.monotonic() + interval / 4) if due else now + interval
        wait = max(0.0, due - time.monotonic()) if loop.jobs else _IDLE
        awaited = [control.fileno()] if loop.jobs else [control.fileno(), events]
        ready = wait_readable(awaited, wait)
        if events in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(events, 1 << 16)
            due = 0.0
        if control.fileno() in ready:
            _answer(loop, control)


def _answer(loop: SamplerLoop, control: socket.socket) -> None:
    """Measure an ending job for the last time.

    The epilogue then waits until the unprivileged process has written the sample.
    """
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
    """Run the sampler. Argument: the path of the site config."""
    paths, (config,) = initialize("telemetry", nice=10)
    control = listen(paths.run / "telemetry.sock")
    try:
        site, _ = extensions.load(Path(config), GROUP)
        settings = site[Settings]
    except Exception:
        log.exception("%s", config)
        settings = Settings()
    outside = UnprivilegedExporters(Path(config))

    def end(_number: int, _frame: object) -> None:
        outside.close()
        (paths.run / "telemetry.sock").unlink(missing_ok=True)
        os._exit(0)  # a call to libvirt may hang

    signal.signal(signal.SIGTERM, end)
    events = changes.events()
    changes.watch(events, paths.journal)
    loop = SamplerLoop(paths, settings.interval, outside)
    serve(loop, events, control, (paths.run / "telemetry.lock").exists)


if __name__ == "__main__":
    main()
