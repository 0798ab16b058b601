"""The log of a job at its start and at its end: where levels come from, what is said at the end.

As root. At the end nothing but the journal and what is kept of the job need be there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtorque_core import log_sinks
from vtorque_core.api_batch import BatchJob
from vtorque_core.api_log import LogJob
from vtorque_core.config import Site, build, plugins_config, read_toml
from vtorque_core.domain import console
from vtorque_core.errors import HostFault
from vtorque_core.log import Log
from vtorque_core.log_levels import Levels, parse
from vtorque_core.names import Paths
from vtorque_core.plugins import Plugins
from vtorque_core.records import DOMAIN, JournalState
from vtorque_core.timeline import ENDING, spans

MAX_CONSOLE = 256 << 10  # bytes of a guest's console that are kept after a failure
CONSOLE_LINES = 2000
COLLECTED = {"console.log": "console", "cloud-init.log": "cloud-init"}
"""What a failed guest has left in its state directory, and what it is called where it is kept."""

_SITE = "INFO"
_log = logging.getLogger("vtorque_core.timings")


def at_start(job: BatchJob, uid: int, site: Site, plugins: Plugins) -> Log:
    """Return the log of a job that is about to start, with the sinks of all plugins."""
    log = Log(site.paths, job.id, job.attempt, uid, job.node, parse(site.log.level))
    if log_sinks.wanted(plugins):
        asked = _sink_job(log, job.owner, site)
        log.sinks = lambda: log_sinks.start(lambda: (plugins, asked))
    return log


def facts(log: Log | None, site: Site) -> dict[str, Any]:
    """Return what :func:`at_end` needs to know, to be kept with the job's other facts."""
    levels = [log.site.text, log.asked.text] if log is not None else []
    return {"log": levels, "config": str(site.path)}


def at_end(state: JournalState, paths: Paths, plugins: Plugins) -> Log:
    """Return the log of a job that is torn down: as its start had it, if that is known."""
    header = state.header
    log = Log(paths, header.id, header.attempt, header.uid, "", parse(_SITE))
    known = log.place.facts()
    log.node = str(known.get("node") or socket.gethostname())
    log.site, log.asked = _levels(known)
    config = known.get("config")
    if isinstance(config, str) and log_sinks.wanted(plugins):

        def load() -> tuple[Plugins, LogJob]:
            raw = read_toml(Path(config))
            wanted = plugins_config(raw)
            today = Plugins.load(node=True, enable=wanted.enable, disable=wanted.disable)
            return today, _sink_job(log, header.owner, build(raw, today, node=True))

        log.sinks = lambda: log_sinks.start(load)
    return log


def _sink_job(log: Log, owner: str, site: Site) -> LogJob:
    return LogJob(
        log.job, log.attempt, log.key, log.node, owner, log.uid, site, log.place.directory
    )


def _levels(known: Mapping[str, Any]) -> tuple[Levels, Levels]:
    found = []
    texts = known.get("log")
    for text in texts if isinstance(texts, list) and len(texts) == 2 else ():
        try:
            found.append(parse(str(text)))
        except ValueError:
            found.append(Levels({}))
    return (found[0] or parse(_SITE), found[1]) if found else (parse(_SITE), Levels({}))


def say_timings(state: JournalState, until: float) -> None:
    """Log the time of every phase in one line. ``until`` is Unix time: the end of the last one."""
    parts = []
    for span in spans(state, until):
        if span["guest"] is None:
            parts.append(f"{span['name']} {span['seconds']:.3f} s")
        elif "cpu_seconds" in span:
            used = f"{span['cpu_seconds']:.1f} s CPU, at most {span['peak_mib']} MiB"
            parts.append(f"(guest {span['guest']} used {used})")
        else:
            parts.append(f"(guest {span['guest']} {span['name']} {span['seconds']:.3f} s)")
    if any(mark.name not in ENDING for mark in state.phases if mark.guest is None):
        _log.info("phases: %s", ", ".join(parts), extra={"guest": None})


def collect_consoles(log: Log, state: JournalState, dead: set[int | None]) -> None:
    """Keep the end of the console, and of cloud-init's log, of guests that failed.

    ``dead``: indexes of guests that were not running any more; all guests' if the start has failed.
    """
    failed = not any(mark.name in ("run", "await the script") for mark in state.phases)
    for record in (r for r in state.open if r.kind == DOMAIN and r.guest is not None):
        if not failed and record.guest not in dead:
            continue
        directory = log.paths.job_state(state.key) / f"g{record.guest}"
        for source, name in COLLECTED.items():
            text = _end_of(directory / source)
            if text:
                with contextlib.suppress(OSError, HostFault):
                    log.place.write(f"{name}-g{record.guest}.log", text)
                    _kept(name, record.guest)


def _kept(name: str, guest: int | None) -> None:
    logging.getLogger(__name__).info(
        "the end of its %s log is kept: vmgr logs --%s", name, name, extra={"guest": guest}
    )


def _end_of(path: Path) -> bytes:
    """Return the last lines of a guest's file, harmless; nothing if there is none."""
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                file.seek(max(0, status.st_size - MAX_CONSOLE))
                lines = console.lines_of(file.read(MAX_CONSOLE), CONSOLE_LINES)
                return "".join(f"{line}\n" for line in lines).encode()
    return b""
