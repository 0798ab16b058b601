"""``vtorque reap``: release what belongs to jobs that the batch system no longer knows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtorque_core.errors import EXIT_FAILED, UsageError, VtorqueError

if TYPE_CHECKING:
    from vtorque_core.config import Site


@click.command()
@click.argument("job_id", metavar="[JOB]", default="")
@click.option("--config", type=click.Path(path_type=Path), default=None, help="Other config file.")
@click.option("--dry-run", is_flag=True, help="Say what would be released.")
@click.option(
    "--abandon",
    multiple=True,
    metavar="JOB:RECORD",
    help="Give up one record that cannot be released, and what it holds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reap(
    job_id: str, config: Path | None, dry_run: bool, abandon: tuple[str, ...], as_json: bool
) -> None:
    """Release what ended jobs have left on this node; only of JOB if given. Root only.

    A job that the batch system still knows, or cannot be asked about, is left alone. Versions of
    images go that no name has any more and no job uses, and packet filters of networks that are
    not up any more. Exit code 1 if something could not be
    released.
    """
    if os.geteuid() != 0:
        raise UsageError("vtorque reap releases what root has acquired: run it as root")
    from vtorque_core.cli.site import load_for_root  # noqa: PLC0415
    from vtorque_core.config import CONFIG_PATH  # noqa: PLC0415
    from vtorque_core.reap import reap as release  # noqa: PLC0415

    site, plugins = load_for_root(config or CONFIG_PATH)
    results = release(
        site.paths,
        plugins.batch_system(site.batch.system).node(site).alive,
        batch=site.batch.system,
        dry_run=dry_run,
        only=job_id or None,
        abandon=abandon,
        release_timeout=site.node.release_timeout,
        deadline=site.node.teardown_timeout,
    )
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    else:
        for result in results:
            click.echo(
                f"{result.job}: {result.action}" + (f": {result.message}" if result.message else "")
            )
            for line in result.report.lines() if result.report else ():
                click.echo(f"  {line}")
    if not dry_run and not job_id:
        for version in _collect_images(site):
            click.echo(f"image {version}: no name has it any more: removed", err=True)
        for table in _sweep_tables(site):
            click.echo(f"nftables inet {table}: its network is not up: removed", err=True)
    sys.exit(0 if all(result.ok for result in results) else EXIT_FAILED)


def _sweep_tables(site: Site) -> list[str]:
    """Remove the guards of networks that are gone, where that is possible from here."""
    from vtorque_core.resources import netfilter  # noqa: PLC0415

    try:
        return netfilter.sweep(site.node.libvirt_uri)
    except VtorqueError:  # no nft, no libvirtd: jobs will say so
        return []


def _collect_images(site: Site) -> list[str]:
    """Remove versions of images that nobody needs any more, where that is possible from here."""
    from vtorque_core.image_store import sweep  # noqa: PLC0415

    gone = []
    for place in (site.images.pool, Path(site.images.cache or site.images.pool)):
        with contextlib.suppress(VtorqueError, OSError):
            gone += sweep(place, site.paths, over_only=True)
    return gone
