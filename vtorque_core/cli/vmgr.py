"""``vmgr``: jobs and their guests, and the image pool, for users and admins."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click

from vtorque_core.cli.lazy import HELP, LazyGroup, run

_COMMANDS = {
    "images": ("vtorque_core.cli.images:images", "List, build, verify and remove images."),
    "ps": ("vtorque_core.cli.jobs:ps", "List jobs: id, name, owner, state, node, time."),
    "cancel": (
        "vtorque_core.cli.jobs:cancel",
        "Cancel jobs, as the batch system's own command would.",
    ),
    "logs": ("vtorque_core.cli.logs:logs", "Show the log of a job, or the console of a guest."),
    "console": (
        "vtorque_core.cli.guests:console",
        "Attach to the serial console of a job's guest.",
    ),
    "ssh": ("vtorque_core.cli.guests:ssh", "Log in to a running job's guest, as the job's user."),
    "phases": ("vtorque_core.cli.guests:phases", "Show how long each phase of a job took."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings=HELP)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="VTORQUE_CONFIG",
    default=None,
    help="Another site config than /etc/vtorque/vtorque.toml.",
)
@click.version_option(package_name="vtorque-core", prog_name="vmgr")
@click.pass_context
def vmgr(ctx: click.Context, config: Path | None) -> None:
    """Look at jobs in virtual machines and manage the images they start from.

    Exit codes: 0 done, 1 failed, 2 wrong usage or refused.
    """
    from vtorque_core.config import CONFIG_PATH  # noqa: PLC0415

    ctx.obj = config or CONFIG_PATH


def main() -> NoReturn:
    """Entry point of the command."""
    run(vmgr, "vmgr")


if __name__ == "__main__":
    main()
