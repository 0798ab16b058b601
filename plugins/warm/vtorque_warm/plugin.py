"""Register the plugin's commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtorque_core.api import Command, constant_hook

if TYPE_CHECKING:
    import click


def _warm() -> click.Command:
    from vtorque_warm.command import warm  # noqa: PLC0415 - click

    return warm


vtorque_commands = constant_hook(Command("vtorque warm", _warm))
