"""``vmgr images pull``."""

from __future__ import annotations

from pathlib import Path

import click

from vtorque_core.live.images import site_of
from vtorque_own_images import cache
from vtorque_own_images.pull import resolve


@click.command()
@click.argument("image")
@click.pass_obj
def pull(config: Path, image: str) -> None:
    """Copy your own image into your cache and convert it, as vsub does.

    IMAGE is docker://NAME[:TAG], oci:DIR[:TAG], docker-archive:FILE or the path of a .sif file.
    """
    site = site_of(config)
    path = Path(resolve(image, site, True))
    found = cache.cache_of(site).entry(path.stem)
    click.echo(f"{found.name if found else path}: {path}")
