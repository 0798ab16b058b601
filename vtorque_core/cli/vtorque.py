"""``vtorque``: the admin's command, and the hidden entry points that root's hooks call."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from vtorque_core.cli.entry import begin
from vtorque_core.cli.lazy import HELP, LazyGroup, run
from vtorque_core.errors import VtorqueError

_COMMANDS = {
    "setup": ("vtorque_core.cli.setup:setup", "Prepare this node, or take it back."),
    "doctor": ("vtorque_core.cli.doctor:doctor", "Check this node and say how to mend it."),
    "plugins": ("vtorque_core.cli.plugins:plugins", "List plugins, their hooks and their state."),
    "config": ("vtorque_core.cli.config:config", "Check, show or explain the site config."),
    "reap": ("vtorque_core.cli.reap:reap", "Release what ended jobs have left behind."),
    "local": ("vtorque_core.cli.local:local", "The embedded batch system."),
    "hook": ("vtorque_core.cli.hook:hook", ""),
    "jobshell": ("vtorque_core.cli.hook:jobshell", ""),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings=HELP)
@click.version_option(package_name="vtorque-core", prog_name="vtorque")
def vtorque() -> None:
    """Administer vTorque on this node: batch jobs inside virtual machines.

    Exit codes: 0 done, 1 a check failed, 2 wrong usage or config.
    """


def main() -> NoReturn:
    """Entry point of the command."""
    try:
        begin("vtorque_core.cli.vtorque")
    except VtorqueError as error:
        sys.stderr.write(f"vtorque: {error}\n")
        sys.exit(error.exit_code)
    run(vtorque, "vtorque")


if __name__ == "__main__":
    main()
