"""What the plugin declares: ``vmgr suspend``, ``vmgr resume``, ``[plugin.survive]``."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from vtorque_core.api import Command, OfJob, always
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


_OF_JOB = OfJob(("this_node",))

vtorque_settings = always(Settings)
vtorque_commands = always(Command("vmgr", _suspend, _OF_JOB), Command("vmgr", _resume, _OF_JOB))
