"""Register the commands ``vtorque setup``, ``doctor``, ``config`` and ``plugins``."""

from __future__ import annotations

from vtorque_core.api import Command, constant_hook

vtorque_commands = constant_hook(
    Command("vtorque setup", "vtorque_admin.command:setup"),
    Command("vtorque doctor", "vtorque_admin.command:doctor"),
    Command("vtorque config", "vtorque_admin.config_command:config"),
    Command("vtorque plugins", "vtorque_admin.plugins_command:plugins"),
)
