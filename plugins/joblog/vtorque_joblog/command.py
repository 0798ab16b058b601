"""``vmgr logs``: show the log of a job and the consoles of its guests."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from vtorque_core.api import Paths, Refused, UsageError, job_log, kept_records, printable
from vtorque_core.api.kept_records import Place
from vtorque_core.api.log_levels import LEVELS, TRACE
from vtorque_core.live import jobs, kept_jobs, service
from vtorque_core.live.kept_jobs import KeptJob

_MAX_LINE = 4096  # characters of a line that are shown
_DROPPED = 1 << 20  # bytes that the core removes from the beginning of a console log of 2 MiB
_MAX_KEPT = 1 << 20  # bytes of a console that is kept; the core keeps less


@click.command(short_help="Show the log of a job, or the console of a guest.")
@click.argument("job_id", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the job has ended.")
@click.option("--phase", default="", metavar="P", help="Show only this phase: plan, boot, run, ...")
@click.option(
    "--guest",
    type=int,
    default=None,
    metavar="N",
    help="Show only the guest with this index on its node.",
)
@click.option(
    "--level", default="trace", metavar="L", help="Show only this level and above: info, warn, ..."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option(
    "--console",
    is_flag=True,
    help="Show the serial console of a running guest, or its last lines if the guest failed.",
)
@click.option("--cloud-init", is_flag=True, help="Show the end of a failed guest's cloud-init log.")
@click.pass_obj
def logs(  # noqa: PLR0913 - one for each option
    config: Path,
    job_id: str,
    follow: bool,
    phase: str,
    guest: int | None,
    level: str,
    as_json: bool,
    console: bool,
    cloud_init: bool,
) -> None:
    """Show the log of your running or ended job on this node. Root can name any user's job.

    With the plugin archive, the logs of your ended jobs are also shown on other hosts, from all
    nodes of the job. Control characters are shown as text.
    """
    if level.upper() not in LEVELS:
        known = ", ".join(name.lower() for name in LEVELS)
        raise UsageError(f"--level {printable(level)}: unknown; known: {known}")
    if console:
        if not _show_kept(_places(config, job_id), f"console-g{guest or 0}.log"):
            _show_console(service.paths(config), job_id, guest or 0, follow)
        return
    if cloud_init:
        if not _show_kept(_places(config, job_id), f"cloud-init-g{guest or 0}.log"):
            raise Refused(
                f"no cloud-init log of guest {guest or 0}: it is only kept if the guest failed"
            )
        return
    places = _find_job(config, job_id).places
    least = LEVELS[level.upper()]
    for entry in _entries(places, follow):
        wanted = not phase or entry["phase"] == phase
        wanted = wanted and (guest is None or entry["guest"] == guest)
        if wanted and LEVELS.get(entry["level"], TRACE) >= least:
            where = f"{entry['node']} " if len(places) > 1 else ""
            click.echo(json.dumps(entry) if as_json else f"{where}{job_log.text(entry)}")


def _find_job(config: Path, job_id: str) -> KeptJob:
    """Return the job with this id. Raises Refused if several jobs match: each has its own log."""
    found = kept_jobs.jobs(config, job_id)
    if len(found) > 1:
        some = ", ".join(printable(job.id) for job in found[:8]) + " ..." * (len(found) > 8)
        raise Refused(
            f"{printable(job_id)} matches {len(found)} jobs with separate logs: name one of {some}"
        )
    return found[0]


def _entries(places: Sequence[Place], follow: bool) -> Iterator[job_log.Entry]:
    if follow:
        yield from job_log.entries(places[0], lambda: _has_ended(places[0]))
    else:
        logs = (job_log.entries(place) for place in places)
        yield from heapq.merge(*logs, key=lambda entry: entry["t"])


def _has_ended(place: Place) -> bool:
    return isinstance(place.facts().get("ended"), int | float)


def _places(config: Path, job_id: str) -> Sequence[Place]:
    """Return the kept records of the job; empty if the job has just started."""
    try:
        found = kept_jobs.jobs(config, job_id)
    except Refused:
        return ()
    return found[-1].places


def _show_kept(places: Sequence[Place], name: str) -> bool:
    for place in places:
        with contextlib.suppress(OSError):
            content = place.read(name, _MAX_KEPT)
            for line in content.decode("utf-8", "replace").splitlines():
                click.echo(printable(line, 4096))
            if content:
                return True
    return False


def _consoles(paths: Paths, job_id: str, guest: int) -> list[Path]:
    """Return the console logs of a running guest, which may be readable by root only."""
    if os.geteuid() != 0:
        mine = kept_records.find(paths, job_id, os.getuid())
        running = [place.key for place in mine if not _has_ended(place)]
    else:
        running = [
            job.kept.key
            for job in jobs.RunningJobs(paths).jobs()
            if job.job.id == job_id and any(each.index == guest for each in job.guests)
        ]
    return [paths.job_state(key) / f"g{guest}" / "console.log" for key in running]


def _show_console(paths: Paths, job_id: str, guest: int, follow: bool) -> None:
    found = [path for path in _consoles(paths, job_id, guest) if path.exists()]
    if not found:
        raise Refused(f"job {printable(job_id)} has no running guest {guest} on this node")
    if not os.access(found[-1], os.R_OK):
        raise Refused(
            f"you cannot read the console of guest {guest}: a job's owner can only read consoles "
            "of linux guests that have reached the phase ready"
        )
    for line in _lines(_console(found[-1], follow)):
        text = line.decode("utf-8", "replace").rstrip("\r")
        sys.stdout.write(f"{printable(text, _MAX_LINE)}\n")
        sys.stdout.flush()


def _console(path: Path, follow: bool) -> Iterator[bytes]:
    """Yield a console log's content; with ``follow``, also new content until the log is removed.

    ``tail -F`` would warn a user who cannot list the log's directory, and would never end.
    """
    with path.open("rb") as file:
        while path.parent.is_dir():
            if data := file.read(_MAX_LINE):
                yield data
            elif not follow:
                return
            elif os.fstat(file.fileno()).st_size < (place := file.tell()):
                file.seek(max(0, place - _DROPPED))
            else:
                time.sleep(job_log.POLL)


def _lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    left = b""
    for part in parts:
        *lines, left = (left + part).split(b"\n")
        yield from lines
        left = left[: _MAX_LINE + 1]
    if left:
        yield left
