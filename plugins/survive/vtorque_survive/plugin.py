"""Register the plugin's commands, ``-vm`` options and settings."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from vtorque_core.api import Command, Remote, constant_hook
from vtorque_survive import asked
from vtorque_survive.asked import CHECKPOINT, RESUME
from vtorque_survive.settings import Settings

if TYPE_CHECKING:
    import click


def _commands() -> ModuleType:
    from vtorque_survive import command  # noqa: PLC0415 - click

    return command


def _suspend() -> click.Command:
    found: click.Command = _commands().suspend
    return found


def _resume() -> click.Command:
    found: click.Command = _commands().resume
    return found


def _checkpoint() -> click.Command:
    found: click.Command = _commands().checkpoint
    return found


def _checkpoints() -> click.Command:
    from vtorque_survive.checkpoints_command import checkpoints  # noqa: PLC0415 - click

    return checkpoints


def _drain() -> click.Command:
    from vtorque_survive.drain_command import drain  # noqa: PLC0415 - click

    return drain


def _migrate() -> click.Command:
    from vtorque_survive.move_command import migrate  # noqa: PLC0415 - click

    return migrate


def _arrival() -> click.Command:
    from vtorque_survive.move_command import arrives  # noqa: PLC0415 - click

    return arrives


_OF_JOB = Remote(("this_node",))

vtorque_settings = constant_hook(Settings)
vtorque_options = constant_hook(RESUME, CHECKPOINT)
vtorque_parse_args = asked.vtorque_parse_args
vtorque_commands = constant_hook(
    Command("vmgr suspend", _suspend, _OF_JOB),
    Command("vmgr resume", _resume, _OF_JOB),
    Command("vmgr checkpoint", _checkpoint, Remote(("stop", "this_node"))),
    Command("vmgr checkpoints", _checkpoints),
    Command("vtorque drain", _drain),
    Command("vmgr migrate", _migrate),
    Command("vmgr arrival", _arrival),
)
