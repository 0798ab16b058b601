"""Register ``vtorque setup`` and ``vtorque doctor``."""

from __future__ import annotations

from types import ModuleType

from vtorque_core.api import Command, always


def _commands() -> ModuleType:
    from vtorque_admin import command  # noqa: PLC0415 - click

    return command


vtorque_commands = always(
    Command("vtorque setup", lambda: _commands().setup),
    Command("vtorque doctor", lambda: _commands().doctor),
)
