"""``vtorque``: the admin's commands."""

from __future__ import annotations

import click

from vtorque_core.cli.lazy import HELP, LazyGroup

_COMMANDS = (
    "vtorque_core.cli.plugins:plugins",
    "vtorque_core.cli.config:config",
    "vtorque_core.cli.reap:reap",
)
_ELSEWHERE = dict.fromkeys(("doctor", "setup"), "vtorque-admin")


@click.group(cls=LazyGroup, lazy=_COMMANDS, elsewhere=_ELSEWHERE, context_settings=HELP)
@click.version_option(package_name="vtorque-core", prog_name="vtorque")
def vtorque() -> None:
    """Administer vTorque on this node: batch jobs inside virtual machines.

    Exit codes: 0 done, 1 a check failed, 2 wrong usage or config.
    """
