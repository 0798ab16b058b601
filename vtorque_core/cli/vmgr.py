"""``vmgr``: show and control jobs and their guests, and manage the image pool."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click

from vtorque_core.cli.run_click import run
from vtorque_core.live.command_groups import HELP, PluginGroup, config_option

_COMMANDS = {
    "vtorque-jobs": "cancel ps",
    "vtorque-joblog": "logs",
    "vtorque-linux-guest": "clean console ssh",
    "vtorque-login": "state",
    "vtorque-report": "report",
}
_IMAGES = {
    "vtorque-cluster": "sync",
    "vtorque-disk-image": "add update",
    "vtorque-images": "build default label list remove show sign verify",
    "vtorque-own-images": "pull",
}


@click.group(cls=PluginGroup, elsewhere=_COMMANDS, context_settings=HELP)
@config_option
@click.version_option(package_name="vtorque-core", prog_name="vmgr")
@click.pass_context
def vmgr(ctx: click.Context, config: Path) -> None:
    """Inspect and control jobs in virtual machines, and manage images.

    Exit codes: 0 done, 1 failed, 2 wrong usage or refused.
    """
    ctx.obj = config


@vmgr.group(cls=PluginGroup, elsewhere=_IMAGES, context_settings=HELP)
def images() -> None:
    """List and manage the images of guests."""


def main() -> NoReturn:
    run(vmgr, "vmgr")


if __name__ == "__main__":
    main()
