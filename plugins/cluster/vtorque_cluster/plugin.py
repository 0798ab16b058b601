"""The plugin's commands: ``vtorque cluster`` and ``vmgr images sync``."""

from __future__ import annotations

from types import ModuleType

from vtorque_core.api import Command, constant_hook


def _commands() -> ModuleType:
    from vtorque_cluster import command  # noqa: PLC0415 - click

    return command


vtorque_commands = constant_hook(
    Command("vtorque cluster", lambda: _commands().cluster),
    Command("vmgr images sync", lambda: _commands().sync),
)
