"""``vmgr images sync``. Runs as root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vtorque_cluster import cache
from vtorque_cluster.sync import receive
from vtorque_core.api import UsageError


def fanout_option(default: int) -> Callable[..., Any]:
    """Return the option ``--fanout``."""
    kind = click.IntRange(min=1)
    said = "Number of nodes at the same time."
    return click.option("--fanout", type=kind, default=default, show_default=True, help=said)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--nodes", metavar="NODESET", help="The nodes, reached by ssh: n[1-3],m7.")
@fanout_option(8)
@click.option("--received", is_flag=True, hidden=True)
@click.option("--only", is_flag=True, hidden=True)
@click.pass_obj
def sync(
    config: Path, names: tuple[str, ...], nodes: str | None, fanout: int, received: bool, only: bool
) -> None:
    """Copy images (default: all) to the nodes' own caches ([images] cache).

    A second call continues an interrupted copy. A copy whose hash differs from the pool's sidecar
    is deleted. If you name no image, unused images that are no longer in the pool are removed.
    """
    places = cache.places(config)
    if nodes is not None:
        from vtorque_cluster.command import send_images  # noqa: PLC0415 - ClusterShell

        send_images(config, places, names, nodes, fanout)
    elif received:
        done = receive(places, names, only=only)
        said = {"copied": done.copied, "already up to date": done.same, "removed": done.removed}
        for word, found in said.items():
            if found:
                click.echo(f"{word}: {', '.join(found)}")
    else:
        raise UsageError("the nodes are missing: add --nodes NODESET")
