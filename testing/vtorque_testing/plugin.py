"""Register the command ``vtorque plugins new`` for plugin authors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtorque_core.api import Command, constant_hook

if TYPE_CHECKING:
    import click


def _new() -> click.Command:
    from vtorque_testing.new_plugin import new  # noqa: PLC0415 - click

    return new


vtorque_commands = constant_hook(Command("vtorque plugins new", _new))
