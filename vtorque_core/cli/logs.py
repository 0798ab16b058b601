"""``vmgr logs``: what is logged of a job, for its owner too, and the consoles of its guests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from vtorque_core.api import kept_records
from vtorque_core.api.log_levels import LEVELS, TRACE
from vtorque_core.base.errors import Refused, UsageError, printable
from vtorque_core.cli.guests import guest_name, need_root
from vtorque_core.records import log
from vtorque_core.site.load import load

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
    paths = load(config, node=False)[0].paths
    if console or cloud_init:
        uid = None if os.geteuid() == 0 else os.getuid()
        places = kept_records.find(paths, job_id, uid)
        _guests_own(config, job_id, places, guest or 0, follow, console)
        return
    wanted = log.Filter(phase, guest, LEVELS.get(level.upper(), TRACE))
    place = kept_records.attempts(paths, job_id)[-1]
    over = (lambda: log.ended(place)) if follow else (lambda: True)
    for entry in log.entries(place, over):
        if wanted.matches(entry):
            click.echo(json.dumps(entry) if as_json else log.text(entry))


def _guests_own(
    config: Path,
    job_id: str,
    places: list[kept_records.Place],
    guest: int,
    follow: bool,
    console: bool,
) -> None:
    name = f"{'console' if console else 'cloud-init'}-g{guest}.log"
    try:
        content = places[-1].read(name, _MAX_KEPT) if places else b""
    except OSError:
        content = b""
    for line in content.decode("utf-8", "replace").splitlines():
        click.echo(printable(line, 4096))
    if content:
        return
    if not console:
        raise Refused(f"no cloud-init log of guest {guest} is kept: of failed guests only")
    need_root("the console of a running guest")
    _, _, directory = guest_name(config, job_id, guest)
    _show(directory / "console.log", follow)


def _show(path: Path, follow: bool) -> None:
    argv = ["tail", "-n", "+1", *(["-F"] if follow else []), str(path)]
    read, write = os.pipe()
    pid = os.posix_spawnp("tail", argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
    os.close(write)
    with os.fdopen(read, "r", encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            sys.stdout.write(f"{printable(line.rstrip(chr(13) + chr(10)), 4096)}\n")
            sys.stdout.flush()
    os.waitpid(pid, 0)
