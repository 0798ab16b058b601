"""The plugin's commands: ``vtorque cluster`` and ``vmgr images sync``."""

from __future__ import annotations

from vtorque_core.api import Command, constant_hook

vtorque_commands = constant_hook(
    Command("vtorque cluster", "vtorque_cluster.command:cluster"),
    Command("vmgr images sync", "vtorque_cluster.sync_command:sync"),
)
