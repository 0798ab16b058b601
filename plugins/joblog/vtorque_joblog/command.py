"""``vmgr logs``: what is logged of a job, for its owner too, and the consoles of its guests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from vtorque_core.api import Paths, Refused, UsageError, job_log, kept_records, printable
from vtorque_core.api.kept_records import Place
from vtorque_core.api.log_levels import LEVELS, TRACE
from vtorque_core.live import service

_MAX_KEPT = 1 << 20  # bytes of a console that is kept; the core keeps less


@click.command(short_help="Show the log of a job, or the console of a guest.")
@click.argument("job_id", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--phase", default="", metavar="P", help="Of this phase only: plan, boot, run, ...")
@click.option(
    "--guest", type=int, default=None, metavar="N", help="Of this guest of the node only."
)
@click.option("--level", default="trace", metavar="L", help="From this level on: info, warn, ...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@click.option(
    "--console",
    is_flag=True,
    help="Instead, a guest's serial console: of a running guest as root, after a failure its end.",
)
@click.option(
    "--cloud-init", is_flag=True, help="Instead, the end of a failed guest's cloud-init log."
)
@click.pass_obj
def logs(
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
    """Show the log of a job on this node, running or ended: yours, or as root anybody's.

    What would do something to a terminal is shown as text.
    """
    if level.upper() not in LEVELS:
        known = ", ".join(name.lower() for name in LEVELS)
        raise UsageError(f"--level {printable(level)}: there are {known}")
    paths = service.paths(config)
    if console:
        if not _show_kept(_places(paths, job_id), f"console-g{guest or 0}.log"):
            _show_console(paths, job_id, guest or 0, follow)
        return
    if cloud_init:
        if not _show_kept(_places(paths, job_id), f"cloud-init-g{guest or 0}.log"):
            raise Refused(f"no cloud-init log of guest {guest or 0} is kept: of failed guests only")
        return
    place = kept_records.attempts(paths, job_id)[-1]
    over = (lambda: _ended(place)) if follow else (lambda: True)
    least = LEVELS[level.upper()]
    for entry in job_log.entries(place, over):
        wanted = not phase or entry["phase"] == phase
        wanted = wanted and (guest is None or entry["guest"] == guest)
        if wanted and LEVELS.get(entry["level"], TRACE) >= least:
            click.echo(json.dumps(entry) if as_json else job_log.text(entry))


def _ended(place: Place) -> bool:
    """Return whether the attempt has ended on this node, by what is kept of it."""
    return isinstance(place.facts().get("ended"), int | float)


def _places(paths: Paths, job_id: str) -> list[Place]:
    return kept_records.find(paths, job_id, None if os.geteuid() == 0 else os.getuid())


def _show_kept(places: list[Place], name: str) -> bool:
    """Show a file of the job's last attempt; return whether there was anything in it."""
    try:
        content = places[-1].read(name, _MAX_KEPT) if places else b""
    except OSError:
        content = b""
    for line in content.decode("utf-8", "replace").splitlines():
        click.echo(printable(line, 4096))
    return bool(content)


def _show_console(paths: Paths, job_id: str, guest: int, follow: bool) -> None:
    if os.geteuid() != 0:
        raise UsageError("the console of a running guest is root's: ask your administrator")
    from vtorque_core.live import jobs  # noqa: PLC0415 - imports libvirt

    found = [
        paths.job_state(job.kept.key) / f"g{guest}" / "console.log"
        for job in jobs.Running(paths).jobs()
        if job.job.id == job_id and any(each.index == guest for each in job.guests)
    ]
    if not found:
        raise Refused(f"job {printable(job_id)} has no running guest {guest} on this node")
    argv = ["tail", "-n", "+1", *(["-F"] if follow else []), str(found[-1])]
    read, write = os.pipe()
    pid = os.posix_spawnp("tail", argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
    os.close(write)
    with os.fdopen(read, "r", encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            sys.stdout.write(f"{printable(line.rstrip(chr(13) + chr(10)), 4096)}\n")
            sys.stdout.flush()
    os.waitpid(pid, 0)
