"""Register the plugin's commands, ``-vm`` options and settings."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from vtorque_core.api import Command, Remote, constant_hook
from vtorque_survive import asked
from vtorque_survive.asked import CHECKPOINT, RESUME
from vtorque_survive.settings import Settings

if TYPE_CHECKING:
    import click


def _command(module: str, name: str) -> Callable[[], click.Command]:
    """Return a function that imports a command, which only its caller needs."""

    def load() -> click.Command:
        found: click.Command = getattr(import_module(f"vtorque_survive.{module}"), name)
        return found

    return load


_OF_JOB = Remote(("this_node",))

vtorque_settings = constant_hook(Settings)
vtorque_options = constant_hook(RESUME, CHECKPOINT)
vtorque_parse_args = asked.vtorque_parse_args
vtorque_commands = constant_hook(
    Command("vmgr suspend", _command("command", "suspend"), _OF_JOB),
    Command("vmgr resume", _command("command", "resume"), _OF_JOB),
    Command("vmgr checkpoint", _command("command", "checkpoint"), Remote(("stop", "this_node"))),
    Command("vmgr checkpoints", _command("checkpoints_command", "checkpoints")),
    Command("vtorque drain", _command("drain_command", "drain")),
    Command("vmgr migrate", _command("move_command", "migrate")),
    Command("vmgr arrival", _command("move_command", "arrives")),
)
