"""The command group ``vtorque local``. Privileges: root, or a personal site's owner."""

from __future__ import annotations

import click

from vtorque_core.live.command_groups import LazyGroup


@click.group(
    cls=LazyGroup,
    module="vtorque_local.command",
    words="serve stop",
    short_help="The batch system of one machine.",
)
def local() -> None:
    """Run the batch system `local`: one machine, one queue."""
