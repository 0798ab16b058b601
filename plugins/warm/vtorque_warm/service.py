"""The node's service that keeps warm guests: a process of root that runs this module.

Every few seconds, and when a journal changes, the service ends guests that are outdated or no
longer wanted. Then it boots one missing guest, unless a job is starting. The service may be killed
at any time. The next job or the init system restarts the service, and the journals name the guests.
The service exits once the site wants no warm guests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Paths, VtorqueError, kept_records, replace_file
from vtorque_core.api.children import wait_readable
from vtorque_core.live import changes, extensions, images, spares
from vtorque_core.live.jobs import RunningJobs
from vtorque_core.live.node_process import initialize
from vtorque_core.live.spares import WarmGuest
from vtorque_warm import policy
from vtorque_warm.process import NAME, state_file
from vtorque_warm.settings import Settings, WarmShape

GROUP = "vtorque1.warm"
NOTE = "warm.json"
_HOST = ("usr/bin/qemu-system-*", "usr/libexec/qemu-kvm", "etc/libvirt/qemu.conf")  # below /
_STARTS = frozenset({"plan", "render domain", "pre-boot", "boot", "ready", "post-boot"})
_LONGEST_START = 600.0  # seconds; an older start was killed
_LONGEST_PAUSE = 600.0
_HISTORY = 500  # kept jobs that are read
_POLL = 5.0  # seconds between two rounds without events
_HISTORY_AGAIN = 60.0  # seconds between two reads of kept jobs
_IN_USE = "in use by other jobs"  # part of the ledger's message if the node is full
log = logging.getLogger(NAME)


@dataclass
class Failure:
    """The failed attempts to boot a guest of one shape.

    Attributes:
        times: Number of consecutive failures.
        again: Time of the next attempt.
        at: Time of the last attempt.
        version: Result of :func:`version` at the last attempt.
        jobs: Jobs that ran at the last attempt.
    """

    times: int
    again: float
    why: str
    at: float
    version: str
    jobs: frozenset[str]


@dataclass
class Keeper:
    """State of the service. ``failures`` maps shapes to their failed boots."""

    paths: Paths
    config: Path
    boot: Callable[[Path, str, int, Mapping[str, str]], str] = spares.boot
    end: Callable[[Paths, str], bool] = spares.end
    dead: Callable[[WarmGuest], bool] = spares.has_ended
    clock: Callable[[], float] = time.time
    failures: dict[str, Failure] = field(default_factory=dict)
    rests: float = 0.0  # until then, boot no guests: jobs needed the memory
    _dropped: int = 0  # evictions in a row without a claimed guest
    _waited: frozenset[str] = frozenset()
    _history: tuple[float, list[dict[str, Any]]] = (0.0, [])
    _overhead: int = 0  # MiB that QEMU needs besides a guest's RAM

    def poll(self) -> bool:
        """End outdated guests, boot a missing one; return whether the service is still needed."""
        wanted, settings, versions = self._wanted_guests()
        there = spares.warm_guests(self.paths)
        self._yield_memory(there, settings)
        there = self._end_unwanted(there, wanted, versions)
        self._waited = frozenset(each.key for each in there)
        self._write_status(wanted)
        if not wanted:
            return bool(there or self.failures)
        self._shorten_pauses(wanted, settings, versions)
        missing = self._next_shape(there, wanted, settings)
        rests = self.clock() < self.rests
        if missing is not None and not rests and not self._is_job_starting():
            self._boot(missing, settings, versions[missing.img])
            self._write_status(wanted)
        return True

    def _wanted_guests(self) -> tuple[list[tuple[WarmShape, int]], Settings, dict[str, str]]:
        try:
            site, known = extensions.load(self.config, GROUP)
            settings = site[Settings]
        except (KeyError, LookupError):  # the plugin is disabled
            return [], Settings(), {}
        self._overhead = site.node.qemu_overhead
        history = self._kept_guests() if settings.shapes or settings.budget else []
        say = known.function(settings.policy) if settings.policy else policy.wanted_guests
        wanted: list[tuple[WarmShape, int]] = say(settings, history, self.clock())
        wanted = [(shape, number) for shape, number in wanted if number]
        names = {str(shape) for shape, _ in wanted}
        self.failures = {s: f for s, f in self.failures.items() if s in names}
        versions = {}
        for shape, _ in wanted:
            try:
                versions[shape.img] = version(self.config, shape.img)
            except OSError as error:
                if not self._is_paused(shape):
                    self._note_failure(shape, f"image {shape.img}: {error.strerror}", settings)
        return [(s, n) for s, n in wanted if s.img in versions], settings, versions

    def _kept_guests(self) -> list[dict[str, Any]]:
        at, known = self._history
        if time.monotonic() - at > _HISTORY_AGAIN or not at:
            places = kept_records.find(self.paths, None)[-_HISTORY:]
            self._history = at, known = time.monotonic(), [place.facts() for place in places]
        return known

    def _yield_memory(self, there: Sequence[WarmGuest], settings: Settings) -> None:
        """Boot no guests for a time after a job evicts warm guests. Each eviction doubles the time.

        Otherwise each job on a full node would have to evict new guests, and booting guests would
        take CPU time from the job.
        """
        taken = {each.key for each in there if each.job}
        if taken & self._waited:
            self._dropped = 0
        now = self.clock()
        wait = {each.key for each in there if each.waits and not self.dead(each)}
        if self._waited - taken - wait and self._is_job_starting():
            if now >= self.rests:
                self._dropped += 1
            pause = settings.eviction_backoff * 2 ** min(self._dropped - 1, 10)
            self.rests = now + min(_LONGEST_PAUSE, pause)
            log.info(
                "a job needed the memory of warm guests: no warm guest boots for %.0f s",
                self.rests - now,
            )

    def _end_unwanted(
        self,
        there: Sequence[WarmGuest],
        wanted: Sequence[tuple[WarmShape, int]],
        versions: dict[str, str],
    ) -> list[WarmGuest]:
        room = Counter({str(shape): number for shape, number in wanted})
        ages = {str(shape): shape.age for shape, _ in wanted}
        left = []
        for each in sorted(there, key=lambda spare: -spare.since):
            if each.job:
                continue
            noted = note(each)
            shape = str(noted.get("shape"))
            same = noted.get("version") == versions.get(str(noted.get("img")))
            right = each.waits and same and not self.dead(each)
            if right and room[shape] > 0 and self.clock() - each.since < ages[shape]:
                room[shape] -= 1
                left.append(each)
                continue
            with contextlib.suppress(HostFault):  # retried by the next round or the reaper
                if self.end(self.paths, each.key):
                    log.info("ended warm guest %s of shape %s: no longer needed", each.key, shape)
        return left

    def _next_shape(
        self,
        there: Sequence[WarmGuest],
        wanted: Sequence[tuple[WarmShape, int]],
        settings: Settings,
    ) -> WarmShape | None:
        have = Counter(str(note(each).get("shape")) for each in there)
        held = sum(each.mib for each in there)
        budget = settings.budget
        for shape, number in wanted:
            if have[str(shape)] >= number or self._is_paused(shape):
                continue
            if budget is None or held + shape.ram + self._overhead <= budget:
                return shape
        return None

    def _shorten_pauses(
        self, wanted: Sequence[tuple[WarmShape, int]], settings: Settings, versions: dict[str, str]
    ) -> None:
        """Shorten the retry delay of shapes whose guests failed to boot, if a retry may succeed.

        A retry may succeed after the result of :func:`version` has changed, or after a job has
        released memory.
        """
        for shape, _ in wanted:
            failure = self.failures.get(str(shape))
            if failure is None:
                continue
            ended = failure.jobs - self._jobs() if _IN_USE in failure.why else ()
            if ended or failure.version != versions[shape.img]:
                failure.again = min(failure.again, failure.at + settings.failure_backoff)

    def _jobs(self) -> frozenset[str]:
        return frozenset(each.job.key for each in RunningJobs(self.paths).jobs())

    def _is_job_starting(self) -> bool:
        now = time.time()
        phases = [job.phases[-1] for job in RunningJobs(self.paths).jobs() if job.phases]
        return any(name in _STARTS and now - since < _LONGEST_START for name, since in phases)

    def _boot(self, shape: WarmShape, settings: Settings, version: str) -> None:
        begun = time.monotonic()
        try:
            key = self.boot(self.config, NAME, settings.hotplug_ports, shape.options)
            (spare,) = (each for each in spares.warm_guests(self.paths) if each.key == key)
            noted = {"shape": str(shape), "img": shape.img, "version": version}
            replace_file(str(spare.directory / NOTE), json.dumps(noted).encode(), mode=0o600)
        except (HostFault, ValueError, OSError) as error:
            self._note_failure(shape, str(error), settings, version)
            return
        self.failures.pop(str(shape), None)
        log.info(
            "warm guest %s of shape %s is ready after %.1f s", key, shape, time.monotonic() - begun
        )

    def _is_paused(self, shape: WarmShape) -> bool:
        failure = self.failures.get(str(shape))
        return failure is not None and self.clock() < failure.again

    def _note_failure(
        self, shape: WarmShape, why: str, settings: Settings, version: str = ""
    ) -> None:
        before = self.failures.get(str(shape))
        times = before.times + 1 if before else 1
        pause = min(_LONGEST_PAUSE, settings.failure_backoff * 2 ** min(times - 1, 10))
        now = self.clock()
        self.failures[str(shape)] = Failure(times, now + pause, why, now, version, self._jobs())
        log.warning("%s: %s; retrying in %.0f s", shape, why, pause)

    def _write_status(self, wanted: Sequence[tuple[WarmShape, int]]) -> None:
        found = {
            "wanted": {str(shape): number for shape, number in wanted},
            "rests": self.rests,
            "failures": {s: [f.times, f.again, f.why] for s, f in self.failures.items()},
        }
        with contextlib.suppress(OSError, HostFault):  # /run is full
            replace_file(str(state_file(self.paths)), json.dumps(found).encode(), mode=0o600)


def version(config: Path, image: str) -> str:
    """Return a string that changes when this image, the site config or the software changes.

    The software is vTorque's distributions, QEMU's programs and libvirt's qemu.conf.
    """
    site, plugins = images.root_site(config)
    files = [config, site.images.pool / image / images.SIDECAR]
    files += sorted(file for pattern in _HOST for file in Path("/").glob(pattern))
    marks = [f"{file.stat().st_mtime_ns}.{file.stat().st_ino}" for file in files]
    return " ".join([*marks, *sorted(plugins.distributions.values())])


def note(spare: WarmGuest) -> dict[str, Any]:
    """Return shape, image and version of a warm guest; empty while the guest boots."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((spare.directory / NOTE).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def serve(keeper: Keeper, events: int, needed: Callable[[], bool]) -> None:
    """Run until ``needed`` returns False, or no warm guests are wanted and none exist."""
    while needed():
        try:
            if not keeper.poll():
                return
        except VtorqueError as error:  # e.g. an incomplete config, libvirtd restarting
            log.warning("%s", error)
        wait_readable([events], _POLL)
        time.sleep(0.2)  # events come in bursts
        with contextlib.suppress(BlockingIOError):
            os.read(events, 1 << 16)


def main() -> None:
    """Run the service; the argument is a site config."""
    paths, (config,) = initialize(NAME, nice=19)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    events = changes.events()
    changes.watch(events, paths.journal, content=False)
    serve(Keeper(paths, Path(config)), events, (paths.run / f"{NAME}.lock").exists)


if __name__ == "__main__":
    main()
