"""The node's log follower: passes new lines of job logs to the sinks.

The resource ``joblog-follower`` starts this process before the first job's boot and ends it with
the last job. Jobs do not wait for the follower. After the resource's release, the process has a few
seconds to finish; a new follower waits for the end of the old process. Each sink's progress is in a
file below ``<state>/joblog``, from which the new follower continues, also after a kill.

The sink ``file`` runs in this process; all others run in an unprivileged process.

Privileges: root.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from vtorque_core.api import Paths
from vtorque_core.api.children import wait_readable
from vtorque_core.api.kept_records import LOG, find
from vtorque_core.api.node_job import Site
from vtorque_core.live import changes, extensions
from vtorque_core.live.node_process import initialize
from vtorque_joblog.api import GROUP
from vtorque_joblog.file import JsonFile
from vtorque_joblog.outlets import JobLog, SinkThread
from vtorque_joblog.plugin import Settings
from vtorque_joblog.saved_offsets import SavedOffsets
from vtorque_joblog.sinks import entry_filter
from vtorque_joblog.unprivileged_sinks import UnprivilegedSinks

DIRECTORY = "joblog"
END = 3.0  # seconds for all sinks together after the last job
_FLUSH = 0.5  # seconds of these for closing the sinks
_QUIET = 60.0  # seconds after which a log without a journal gets no more lines
log = logging.getLogger("joblog")


class FollowerLoop:
    """Follows all growing logs of the node. An error of one log does not stop the loop."""

    def __init__(self, paths: Paths, outlets: Sequence[SinkThread | UnprivilegedSinks]) -> None:
        """Watch the directories of journals and kept records. Raises OSError."""
        self._paths = paths
        self.outlets = outlets
        self._growing: dict[str, tuple[JobLog, int]] = {}
        self._owners: dict[Path, int] = {}
        self.events = changes.events()
        changes.watch(self.events, paths.kept, content=False)
        changes.watch(self.events, paths.journal, content=False)

    def poll(self) -> None:
        """Find new logs, pass new lines to the sinks, and forget logs that are complete."""
        for job in self._find_new():
            with contextlib.suppress(OSError):  # deleted as too old
                self._growing[job.name] = job, changes.watch(self.events, job.path.parent)
        for job, number in list(self._growing.values()):
            over = not self._has_journal(job) and _is_quiet(job.path)
            for outlet in self.outlets:
                outlet.give(job)
            if over:
                changes.unwatch(self.events, number)
                del self._growing[job.name]

    def is_done(self) -> bool:
        """Return whether no job is left and all lines were delivered."""
        if any(self._has_journal(job) for job, _ in self._growing.values()):
            return False
        self.poll()  # a job's last lines are written before its journal is removed
        return not any(outlet.is_busy for outlet in self.outlets)

    def _has_journal(self, job: JobLog) -> bool:
        return (self._paths.journal / f"{job.key}.jsonl").exists()

    def _find_new(self) -> Iterator[JobLog]:
        for owner in _directories(self._paths.kept):
            with contextlib.suppress(OSError):
                if owner not in self._owners:
                    changes.watch(self.events, owner, content=False)
                changed = owner.stat().st_mtime_ns
                if self._owners.get(owner) == changed:
                    continue
                self._owners[owner] = changed
                for place in _directories(owner):
                    job = JobLog(int(owner.name), place.name, place / LOG)
                    if job.name in self._growing:
                        continue
                    if self._has_journal(job) or not _is_quiet(place) or self._is_incomplete(job):
                        yield job

    def _is_incomplete(self, job: JobLog) -> bool:
        return any(outlet.is_behind(job) for outlet in self.outlets)


def _directories(above: Path) -> list[Path]:
    try:
        return [Path(e.path) for e in os.scandir(above) if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _is_quiet(path: Path) -> bool:
    try:
        return path.stat().st_mtime < time.time() - _QUIET
    except OSError:
        return True


def serve(loop: FollowerLoop, wake: int, released: Callable[[], bool]) -> None:
    """Follow logs until ``released`` is True, then deliver the last lines within ``END`` seconds.

    ``wake`` is an eventfd(2) to which a sink's thread writes when no line is left to deliver.
    """
    end: float | None = None
    while True:
        loop.poll()
        if end is None and released():
            end = time.monotonic() + END
        if end is not None and (time.monotonic() >= end or loop.is_done()):
            return
        wait_readable([loop.events, wake], math.inf if end is None else end - time.monotonic())
        for descriptor in (loop.events, wake):
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 1 << 16)


def _open(
    site: Site, logged: str, paths: Paths, idle: Callable[[], None]
) -> list[SinkThread | UnprivilegedSinks]:
    settings = site[Settings]
    outlets: list[SinkThread | UnprivilegedSinks] = []
    if names := settings.unprivileged_sinks:
        outlets.append(
            UnprivilegedSinks(
                site.path, {name: _read_progress(paths, name) for name in names}, idle
            )
        )
    if settings.file:
        opening, wants = partial(JsonFile, settings.file), entry_filter(settings, logged)
        outlets.append(SinkThread("file", opening, _read_progress(paths, "file"), idle, wants))
    return outlets


def _read_progress(paths: Paths, name: str) -> SavedOffsets:
    """Return the progress of a sink; a new sink skips the logs of jobs that ended long ago."""
    told = SavedOffsets(paths.state / DIRECTORY / name)
    logs = [JobLog(each.uid, each.key, each.directory / LOG) for each in find(paths, None)]
    if told.is_new:
        for job in logs:
            if not (paths.journal / f"{job.key}.jsonl").exists() and _is_quiet(job.path):
                told.start_at(job.name, job.size)
    told.keep({job.name for job in logs})
    return told


def _lock_follower(state: Path) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fcntl.flock(os.open(state / DIRECTORY / "lock", flags, 0o600), fcntl.LOCK_EX)


def main() -> None:
    """Run the follower. The argument is the path of the site config."""
    paths, (config,) = initialize("joblog", nice=10)
    (paths.state / DIRECTORY).mkdir(mode=0o700, exist_ok=True)
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    idle = partial(os.eventfd_write, wake, 1)
    try:
        _lock_follower(paths.state)
        site, _ = extensions.load(Path(config), GROUP)
        loop = FollowerLoop(paths, _open(site, site.log.level, paths, idle))
        changes.watch(loop.events, paths.run, content=False)
        serve(loop, wake, lambda: os.fstat(0).st_nlink == 0)  # standard input is our lock file
        until = time.monotonic() + _FLUSH
        for outlet in loop.outlets:
            outlet.close(until)
    except Exception:
        log.exception("%s", config)
    os._exit(0)  # a sink may hang


if __name__ == "__main__":
    main()
