"""Register the commands ``vtorque setup``, ``doctor``, ``config`` and ``plugins``."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from vtorque_core.api import Command, constant_hook

if TYPE_CHECKING:
    import click


def _commands() -> ModuleType:
    from vtorque_admin import command  # noqa: PLC0415 - click

    return command


def _config() -> click.Command:
    from vtorque_admin.config_command import config  # noqa: PLC0415 - click

    return config


def _plugins() -> click.Command:
    from vtorque_admin.plugins_command import plugins  # noqa: PLC0415 - click

    return plugins


vtorque_commands = constant_hook(
    Command("vtorque setup", lambda: _commands().setup),
    Command("vtorque doctor", lambda: _commands().doctor),
    Command("vtorque config", _config),
    Command("vtorque plugins", _plugins),
)
