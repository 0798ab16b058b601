"""Register the command ``vtorque plugins new`` for plugin authors."""

from __future__ import annotations

from vtorque_core.api import Command, constant_hook

vtorque_commands = constant_hook(Command("vtorque plugins new", "vtorque_testing.new_plugin:new"))
