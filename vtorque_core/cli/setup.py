"""``vtorque setup``: make this node ready for VM jobs, or undo that. Root only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from vtorque_core.base.errors import UsageError
from vtorque_core.cli.lazy import config_option


@click.group()
def setup() -> None:
    """Prepare this node, or undo that."""
    if os.geteuid() != 0:
        raise UsageError("vtorque setup changes the node: run it as root")


@setup.command()
@config_option
@click.option("--batch", default="local", show_default=True, help="Batch system of the site.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, without doing it.")
@click.option("--secret-from-stdin", is_flag=True, hidden=True)
def install(config: Path, batch: str, dry_run: bool, secret_from_stdin: bool) -> None:
    """Create directories, site secret, network, commands and the batch system's hooks.

    Also sets the batch system in the config.

    Idempotent: completed steps are skipped. If a step fails, fix the problem that it reports and
    run the command again. Exit code 0 when the node is ready.
    """
    from vtorque_core.node.admin import setup as steps  # noqa: PLC0415
    from vtorque_core.node.admin import setup_batch as batch_setup  # noqa: PLC0415
    from vtorque_core.site.load import load  # noqa: PLC0415

    site, plugins = load(config, node=True, new=True)
    plugins.batch_system(batch)
    given = sys.stdin.buffer.read(1 << 16) if secret_from_stdin else None
    steps.install(site, click.echo, secret=given, dry_run=dry_run)
    batch_setup.install(site, plugins, config, batch, click.echo, dry_run=dry_run)


@setup.command()
@config_option
@click.option("--purge", is_flag=True, help="Also remove images, the site secret and the config.")
def uninstall(config: Path, purge: bool) -> None:
    """Remove hooks, the guests' network, links to the commands and runtime directories.

    Restores earlier files byte for byte. Files that were edited since are kept and reported.
    Fails while jobs run.
    """
    from vtorque_core.node.admin import setup as steps  # noqa: PLC0415
    from vtorque_core.node.admin import setup_batch as batch_setup  # noqa: PLC0415
    from vtorque_core.site.load import load  # noqa: PLC0415

    site, plugins = load(config, node=True, new=True)
    steps.require_idle(site, spares=False)
    batch_setup.uninstall(site, plugins, config, click.echo)
    steps.require_idle(site)
    steps.uninstall(site, config, click.echo, purge=purge)
