"""``vtorque setup``: make this node ready for VM jobs, or take that back. Root only."""

from __future__ import annotations

import os
from pathlib import Path

import click

from vtorque_core.errors import UsageError


@click.group()
def setup() -> None:
    """Prepare this node, or take it back."""
    if os.geteuid() != 0:
        raise UsageError("vtorque setup changes the node: run it as root")


@setup.command()
@click.option("--config", type=click.Path(path_type=Path), default=None, help="Other config file.")
@click.option("--batch", default="local", show_default=True, help="The site's batch system.")
@click.option("--dry-run", is_flag=True, help="Say what would be done.")
def install(config: Path | None, batch: str, dry_run: bool) -> None:
    """Create directories, the site secret, a first config and the guests' network.

    Idempotent. Exit code 0 when the node is ready.
    """
    from vtorque_core import setup as steps  # noqa: PLC0415
    from vtorque_core.cli.site import load  # noqa: PLC0415
    from vtorque_core.config import CONFIG_PATH  # noqa: PLC0415

    path = config or CONFIG_PATH
    site, plugins = load(path, node=True)
    plugins.batch_system(batch)
    steps.install(site, path, batch, click.echo, dry_run=dry_run)


@setup.command()
@click.option("--config", type=click.Path(path_type=Path), default=None, help="Other config file.")
@click.option("--purge", is_flag=True, help="Also remove images, site secret and config.")
def uninstall(config: Path | None, purge: bool) -> None:
    """Remove the guests' network and the runtime directories. Refused while jobs run."""
    from vtorque_core import setup as steps  # noqa: PLC0415
    from vtorque_core.cli.site import load  # noqa: PLC0415
    from vtorque_core.config import CONFIG_PATH  # noqa: PLC0415

    path = config or CONFIG_PATH
    site, _ = load(path, node=True)
    steps.uninstall(site, path, click.echo, purge=purge)
