"""``vtorque local``: run and stop the service. Privileges: root, or a personal site's owner."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import click

from vtorque_core.api import Busy, HostFault, UsageError, take_lock
from vtorque_core.api.values import is_personal
from vtorque_core.live.service import paths, site_and_installation
from vtorque_local.mom import JobPrograms
from vtorque_local.service import LocalService, Setup
from vtorque_local.settings import Settings
from vtorque_local.submitter import LocalSubmitter

IDLE_TIME = 60.0  # seconds until an idle personal service exits
STOP_TIME = 1800.0  # seconds to tear down running jobs
CONFIG = click.option(
    "--config",
    type=click.Path(readable=False, path_type=Path),
    default=None,
    help="Site config file.",
)


@click.group(short_help="The batch system of one machine.")
def local() -> None:
    """Run the batch system `local`: one machine, one queue."""


@local.command()
@click.option("--foreground", is_flag=True, help="Stay in the foreground, log to stderr.")
@click.option("--slots", type=click.IntRange(1, 1024), help="Jobs at once; default: site config.")
@CONFIG
def serve(foreground: bool, slots: int | None, config: Path | None) -> None:
    """Start the service. Without --foreground, return when jobs can be submitted."""
    site, vtorque = site_and_installation(config)
    slots = slots or site[Settings].slots
    if slots < 1:
        raise UsageError(f"[plugin.local] slots = {slots}: must be at least 1")
    programs = JobPrograms(
        prologue=vtorque.hook("prologue"),
        epilogue=vtorque.hook("epilogue"),
        wrapper=vtorque.call("jobshell"),
        kill_after=vtorque.grace + 10,
        hook_timeout=vtorque.start_time + 60,
        pids=site[Settings].pids,
    )
    spool, reap = site.paths.state / "local", vtorque.call("reap")
    idle = IDLE_TIME if is_personal(site) else None
    service = LocalService(Setup(site.paths.run, spool, programs, reap, slots, idle=idle))
    try:
        service.open()
    except OSError as error:
        raise HostFault(f"cannot start the batch system: {error}; root must start it") from None
    if not foreground:
        _detach(spool / "service.log")
    service.serve()


@local.command()
@CONFIG
def stop(config: Path | None) -> None:
    """Stop the service and wait for its end. Running jobs are killed; queued jobs stay queued."""
    where = paths(config)
    LocalSubmitter(where).shut_down()
    lock = where.state / "local" / "lock"
    try:
        os.close(take_lock(lock, 1.0))
    except Busy:
        click.echo("vtorque: waiting until the running jobs are torn down", err=True)
        os.close(take_lock(lock, STOP_TIME))


def _detach(log: Path) -> None:
    # Close inheritable descriptors, which all come from the caller (PEP 446). Otherwise the service
    # would keep the caller's flock(2) locks and pipes open.
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208 - numbers
        with contextlib.suppress(OSError):  # the descriptor of the listing
            if number > 2 and os.get_inheritable(number):
                os.close(number)
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    os.chdir("/")
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for target, source in enumerate((null, file, file)):
        os.dup2(source, target)
    os.close(null)
    os.close(file)
