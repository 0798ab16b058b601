"""``vtorque``: the admin's commands."""

from __future__ import annotations

import click

from vtorque_core.cli.reap import reap
from vtorque_core.live.command_groups import HELP, PluginGroup

_COMMANDS = {"vtorque-admin": "config doctor plugins setup"}


@click.group(cls=PluginGroup, elsewhere=_COMMANDS, always=("admin",), context_settings=HELP)
@click.version_option(package_name="vtorque-core", prog_name="vtorque")
def vtorque() -> None:
    """Administer vTorque on this node: batch jobs inside virtual machines.

    Exit codes: 0 done, 1 a check failed, 2 wrong usage or config.
    """


vtorque.add_command(reap)
