"""The plugin's declarations: the image builder ``disk``, ``vmgr images add`` and ``update``."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from vtorque_core.api import Command, ImageBuilder, constant_hook

if TYPE_CHECKING:
    from vtorque_core.api.image_builder import Builder


def _builder() -> Builder:
    from vtorque_disk_image.builder import DiskBuilder  # noqa: PLC0415

    return DiskBuilder()


def _commands() -> ModuleType:
    from vtorque_disk_image import command  # noqa: PLC0415 - click

    return command


vtorque_image_builders = constant_hook(ImageBuilder("disk", _builder))
vtorque_commands = constant_hook(
    Command("vmgr images add", lambda: _commands().add),
    Command("vmgr images update", lambda: _commands().update),
)
