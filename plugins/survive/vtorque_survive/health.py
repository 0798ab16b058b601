"""Check a node's health while it runs jobs with guests, and drain an unhealthy node. Runs as root.

The watcher runs the site's ``health_command`` and the drain as processes and never waits for them.
The last result is stored in a file, because the watcher ends with the node's last job.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vtorque_core.api import (
    HostFault,
    Paths,
    VtorqueError,
    closing,
    guard_command,
    printable,
    replace_file,
    require_root_owned,
    take_lock,
)
from vtorque_core.api.children import Child
from vtorque_core.api.health import HealthCheck, HealthResult, failure, ok, warning
from vtorque_core.api.node_job import Site
from vtorque_core.live import service, suspend
from vtorque_core.live.jobs import RunningJobs
from vtorque_survive import abilities, migration_record, turn
from vtorque_survive.drain import LOCK, LastDrain, read_record
from vtorque_survive.migration_watch import UNHELD, WHY_UNHELD
from vtorque_survive.process import NAME, WatcherProcess
from vtorque_survive.settings import DOCTOR, Settings

TIME = 120.0  # seconds for the command; a timeout is a failure, too
IN_A_ROW = 2  # failures until the node is drained
AGAIN = 3600.0  # seconds between two drains, at least
_MOST = 300  # characters of the health command's message
_LINE = 1000  # characters of a line of a drain
_READ = 1 << 20  # bytes of the health command's output
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/root"}
log = logging.getLogger(NAME)


@dataclass(frozen=True)
class HealthRecord:
    """The last result of the health command.

    Attributes:
        asked: Unix time of the run.
        failed: Number of failures in a row.
        said: The command's message.
    """

    asked: float = 0.0
    failed: int = 0
    said: str = ""

    @classmethod
    def read(cls, paths: Paths) -> HealthRecord:
        """Return the last result. Needs root."""
        found = read_record(_file(paths))
        try:
            return cls(float(found["asked"]), int(found["failed"]), str(found["said"]))
        except (KeyError, TypeError, ValueError):
            return cls()

    def write(self, paths: Paths) -> None:
        """Write the result."""
        replace_file(str(_file(paths)), json.dumps(asdict(self)).encode(), mode=0o600)


class HealthWatcher:
    """The watcher's health checks."""

    def __init__(self, paths: Paths, config: Path, settings: Settings) -> None:
        self._paths, self._config, self._settings = paths, config, settings
        self._said = HealthRecord.read(paths)
        self._child: Child | None = None
        self._drain: tuple[subprocess.Popen[bytes], int] | None = None
        self._back: Child | None = None
        self._ended = True  # a drain of an earlier watcher may have been killed

    def poll(self) -> None:
        """Run the health command when due, and drain an unhealthy node."""
        if not self._settings.health_command:
            return
        try:
            self._collect()
            self._withdraw_drain()
            if self._child is not None:
                if self._child.check():
                    error, self._child = self._child.error or "", None
                    self._record(error)
            elif self._back is None and self._is_due():  # needed by _begin_drain
                self._said = replace(self._said, asked=time.time())
                argv = _command(self._config, self._settings)
                self._child = Child(lambda: _ask(argv), TIME)
        except (OSError, VtorqueError) as error:
            log.warning("cannot check the node's health: %s", error)

    def _is_due(self) -> bool:
        return not 0 <= time.time() - self._said.asked < self._settings.health_interval

    def _record(self, error: str) -> None:
        count = self._said.failed + 1 if error else 0
        if error or self._said.failed:
            log.warning(
                "health: %s", f"{error} ({count} times in a row)" if error else "healthy again"
            )
        self._said = HealthRecord(self._said.asked, count, printable(error, _MOST))
        if count >= IN_A_ROW and abs(time.time() - LastDrain.read(self._paths).at) >= AGAIN:
            self._begin_drain()
        self._said.write(self._paths)

    def _begin_drain(self) -> None:
        """Start a process that drains the node. The process may outlive the watcher."""
        if self._drain is not None or self._back is not None:
            return
        log.warning("draining the node")
        place = service.installation_of(self._config)
        says = os.memfd_create("drain")  # works with a full disk and without a reader
        try:
            process = subprocess.Popen(
                place.call(
                    "drain", "--in-turn", "--reason", self._said.said, "--", socket.gethostname()
                ),
                env=_ENVIRON, cwd="/", start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=says, stderr=says,
            )  # fmt: skip
        except OSError:
            os.close(says)
            raise
        self._drain = process, says

    def _collect(self) -> None:
        if self._drain is None or self._drain[0].poll() is None:
            return
        says, self._drain, self._ended = self._drain[1], None, True
        for line in os.pread(says, _READ, 0).decode("utf-8", "replace").splitlines():
            log.warning("drain: %s", printable(line, _LINE))
        os.close(says)

    def _withdraw_drain(self) -> None:
        """Withdraw this node's drain request when the process that drains has ended."""
        if self._back is not None:
            self._back = None if self._back.check() else self._back
        elif self._ended and self._drain is None:
            self._ended = False
            self._back = Child(lambda: _withdraw_drain(self._paths, self._config), TIME)


def check(site: Site) -> Iterator[HealthResult]:
    """Report the last health result and the last drain to ``vtorque doctor``.

    A failed health command is only a warning. If the command is doctor itself, an error for its
    last failure would make the next run fail, too.
    """
    settings, last, said = site[Settings], LastDrain.read(site.paths), HealthRecord.read(site.paths)
    try:
        if settings.health_command not in ("", DOCTOR):
            require_root_owned(Path(settings.health_command), uid=os.geteuid())
    except (OSError, VtorqueError) as error:
        yield failure(
            f"[plugin.survive] health_command: {error}",
            "fix this: until then the node's health is not checked",
        )
        return
    if settings.health_command and said.failed:
        yield warning(
            f"health: {said.said} ({said.failed} times in a row)",
            "fix the cause: an unhealthy node is drained",
        )
    else:
        yield ok(
            "health: not checked"
            if settings.health_command
            else "health: healthy, or not checked yet"
        )
    if last.at:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.at))
        left = f"; left running: {', '.join(last.left)}" if last.left else ""
        yield ok(f"last drained at {when}: {last.reason}{left}")


def _withdraw_drain(paths: Paths, config: Path) -> None:
    with closing(take_lock(paths.run / LOCK, 0.0)):
        site, batch = service.batch_system(config)
        turn.withdraw(batch.node(site))


def _command(config: Path, settings: Settings) -> tuple[str, ...]:
    if settings.health_command == DOCTOR:
        return service.installation_of(config).call("doctor", "--json")
    require_root_owned(Path(settings.health_command), uid=os.geteuid())
    return (settings.health_command,)


def _ask(argv: tuple[str, ...]) -> None:
    with subprocess.Popen(
        guard_command(*argv), env=_ENVIRON, cwd="/", stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        said = process.stdout.read(_READ).decode("utf-8", "replace") if process.stdout else ""
    if process.returncode:
        raise HostFault(_words(said) or f"exit code {process.returncode}")


def _words(said: str) -> str:
    """Return the failed checks in doctor's output, or the last line of any other output."""
    with suppress(ValueError, TypeError, KeyError):
        wrong = [each for each in json.loads(said) if each["status"] == "failed"]
        return "; ".join(f"{each['check']}: {each['message']}" for each in wrong)
    return (said.strip().splitlines() or [""])[-1]


def _file(paths: Paths) -> Path:
    return paths.state / "survive-health.json"


def check_suspended(site: Site) -> Iterator[HealthResult]:
    """Report whether suspended jobs can be resumed, and which migrations are unfinished."""
    jobs = [job for job in RunningJobs(site.paths).jobs() if suspend.phase(job)]
    still = [job.job.id for job in jobs if suspend.is_suspended(job)]
    if jobs and WatcherProcess.for_node(site.paths).is_lost():
        fix = (
            f"run vmgr resume {jobs[0].job.id} as root, or start another job: both start the "
            "watcher"
        )
        yield warning(
            f"no watcher process serves the {len(jobs)} jobs on this node ({len(still)} suspended)",
            fix,
        )
    else:
        yield ok(f"{len(still)} jobs are suspended: {', '.join(still) or 'none'}")
    for job in jobs:
        if job.kept.facts().get(UNHELD):
            yield warning(
                f"a guest of job {job.job.id} runs on this node, but {WHY_UNHELD}", "cancel the job"
            )
    for move in migration_record.all_moves(site.paths):
        if move.phase != migration_record.AWAY:
            fix = f"run vmgr migrate {move.job} --to {move.to} as root to complete the migration"
            yield warning(f"the migration of job {move.job} to {move.to} is unfinished", fix)


def checks() -> list[HealthCheck]:
    """Return the checks for doctor."""
    return [
        HealthCheck("survive: suspended jobs", check_suspended),
        HealthCheck("survive: supported actions", abilities.check),
        HealthCheck("survive: the node's health", check),
    ]
