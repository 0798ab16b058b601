"""``vmgr``: jobs and their guests, and the image pool, for users and admins."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click

from vtorque_core.cli.lazy import HELP, LazyGroup, config_option, run

_ELSEWHERE = {
    **dict.fromkeys(("cancel", "ps"), "vtorque-jobs"),
    "logs": "vtorque-joblog",
    "report": "vtorque-report",
    "state": "vtorque-login",
    **dict.fromkeys(("ssh", "console", "clean"), "vtorque-linux-guest"),
}
_IMAGES = {
    **dict.fromkeys(
        ("build", "default", "label", "list", "remove", "show", "sign", "verify"), "vtorque-images"
    ),
    **dict.fromkeys(("add", "update"), "vtorque-disk-image"),
    "pull": "vtorque-own-images",
    "sync": "vtorque-cluster",
}


@click.group(cls=LazyGroup, lazy=(), elsewhere=_ELSEWHERE, context_settings=HELP)
@config_option
@click.version_option(package_name="vtorque-core", prog_name="vmgr")
@click.pass_context
def vmgr(ctx: click.Context, config: Path) -> None:
    """Inspect and control jobs in virtual machines, and manage images.

    Exit codes: 0 done, 1 failed, 2 wrong usage or refused.
    """
    ctx.obj = config


@vmgr.group(cls=LazyGroup, lazy=(), elsewhere=_IMAGES, context_settings=HELP)
def images() -> None:
    """List and manage the images of guests."""


def main() -> NoReturn:
    run(vmgr, "vmgr")


if __name__ == "__main__":
    main()
