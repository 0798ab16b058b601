"""``vtorque cluster``: set up and check many nodes by ssh. Runs as root."""

from __future__ import annotations

import os

import click

from vtorque_core.api import UsageError
from vtorque_core.live.command_groups import LazyGroup


@click.group(
    cls=LazyGroup,
    module="vtorque_cluster.command",
    words="doctor install uninstall",
    short_help="Set up, check or uninstall many nodes by ssh.",
)
def cluster() -> None:
    """Run vtorque setup, or doctor, on many nodes at once, by ssh.

    The exit code is 0 if all nodes succeeded. Otherwise fix the problems and repeat the command.
    """
    if os.geteuid() != 0:
        raise UsageError("vtorque cluster changes the nodes: run it as root")
