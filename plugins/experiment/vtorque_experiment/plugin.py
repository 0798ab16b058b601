"""The plugin's declaration of ``vmgr experiment``."""

from __future__ import annotations

from vtorque_core.api import Command, constant_hook

vtorque_commands = constant_hook(
    Command("vmgr experiment", "vtorque_experiment.command:experiment")
)
