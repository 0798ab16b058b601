"""The plugin's commands below ``vmgr images``."""

from __future__ import annotations

from vtorque_core.api import Command, constant_hook

vtorque_commands = constant_hook(
    Command("vmgr images list", "vtorque_images.pool_commands:list_command"),
    Command("vmgr images show", "vtorque_images.pool_commands:show"),
    Command("vmgr images verify", "vtorque_images.pool_commands:verify"),
    Command("vmgr images remove", "vtorque_images.pool_commands:remove"),
    Command("vmgr images label", "vtorque_images.pool_commands:label"),
    Command("vmgr images default", "vtorque_images.pool_commands:default"),
    Command("vmgr images build", "vtorque_images.make:build"),
    Command("vmgr images sign", "vtorque_images.sign:sign"),
)
