"""``vtorque reap``: release resources of jobs that the batch system no longer knows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtorque_core.base.errors import EXIT_FAILED, UsageError, VtorqueError
from vtorque_core.config.load import load
from vtorque_core.live.command_groups import config_option, json_option

if TYPE_CHECKING:
    from vtorque_core.config.site_config import Site


@click.command(short_help="Release the resources of jobs that have ended.")
@click.argument("job_id", metavar="[JOB]", default="")
@config_option
@click.option("--dry-run", is_flag=True, help="Print what would be released, without doing it.")
@click.option(
    "--abandon",
    multiple=True,
    metavar="JOB:RECORD",
    help="Mark one record as released without releasing its resource.",
)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing if there was nothing to release.")
def reap(
    job_id: str, config: Path, dry_run: bool, abandon: tuple[str, ...], as_json: bool, quiet: bool
) -> None:
    """Release the resources of ended jobs on this node, or only those of JOB. Root only.

    Prints the state directory and the number of open journals first.

    Keeps the resources of jobs that the batch system still knows or cannot report on. Also removes
    unused image versions, and packet filters of inactive networks. Exit code 1 if something could
    not be released.
    """
    from vtorque_core.node.end import reap as reaper  # noqa: PLC0415 - only this command

    site, plugins = load(config, node=True)
    if os.geteuid() != site.owner:
        raise UsageError("vtorque reap releases resources that root has acquired: run it as root")
    results = reaper.reap(
        site,
        plugins.batch_system(site.batch.system).node(site).job_states,
        dry_run=dry_run,
        only=job_id or None,
        abandon=abandon,
    )
    for fault in reaper.notify(site, plugins, (result.report for result in results)):
        click.echo(f"vtorque: {fault}", err=True)
    if as_json:
        jobs = [dataclasses.asdict(result) for result in results]
        click.echo(json.dumps({"state": str(site.paths.state), "jobs": jobs}, indent=2))
    elif results or not quiet:
        click.echo(_find_job(site, len(results), job_id))
        for result in results:
            click.echo(
                f"{result.job}: {result.action}" + (f": {result.message}" if result.message else "")
            )
            for line in result.report.lines() if result.report else ():
                click.echo(f"  {line}")
    if not dry_run and not job_id:
        _sweep(site)
    sys.exit(0 if all(result.ok for result in results) else EXIT_FAILED)


def _find_job(site: Site, journals: int, job_id: str) -> str:
    what = f"{journals} open journal{'s' * (journals != 1)}" if journals else "nothing to release"
    return f"{site.paths.state} ({site.path}): {what}" + (f" of {job_id}" if job_id else "")


def _sweep(site: Site) -> None:
    from vtorque_core.images import store  # noqa: PLC0415 - only this command
    from vtorque_core.resources import netfilter  # noqa: PLC0415 - only this command

    for place in (site.images.pool, Path(site.images.cache or site.images.pool)):
        with contextlib.suppress(VtorqueError, OSError):
            for version in store.sweep(place, site.paths, expired_only=True):
                click.echo(f"removed image version {version}: no sidecar refers to it", err=True)
    with contextlib.suppress(VtorqueError):
        for table in netfilter.sweep(site.node.libvirt_uri):
            click.echo(f"removed nftables table inet {table}: its network is not active", err=True)
