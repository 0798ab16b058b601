"""The plugin's settings and commands."""

from __future__ import annotations

from vtorque_core.api import Command, constant_hook
from vtorque_pool.settings import Settings

vtorque_settings = constant_hook(Settings)
vtorque_commands = constant_hook(Command("vtorque pool", "vtorque_pool.command:pool"))
