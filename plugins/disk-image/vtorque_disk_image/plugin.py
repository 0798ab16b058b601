"""The plugin's declarations: the image builder ``disk``, ``vmgr images add`` and ``update``."""

from __future__ import annotations

from vtorque_core.api import Command, ImageBuilder, constant_hook, deferred

vtorque_image_builders = constant_hook(
    ImageBuilder("disk", deferred("vtorque_disk_image.builder:DiskBuilder"))
)
vtorque_commands = constant_hook(
    Command("vmgr images add", "vtorque_disk_image.command:add"),
    Command("vmgr images update", "vtorque_disk_image.command:update"),
)
