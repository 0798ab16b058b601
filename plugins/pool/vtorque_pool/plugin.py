"""The plugin's settings and commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtorque_core.api import Command, constant_hook
from vtorque_pool.settings import Settings

if TYPE_CHECKING:
    import click


def _pool() -> click.Command:
    from vtorque_pool.command import pool  # noqa: PLC0415 - click

    return pool


vtorque_settings = constant_hook(Settings)
vtorque_commands = constant_hook(Command("vtorque pool", _pool))
