"""Register the plugin's commands."""

from __future__ import annotations

from vtorque_core.api import Command, constant_hook

vtorque_commands = constant_hook(Command("vtorque warm", "vtorque_warm.command:warm"))
