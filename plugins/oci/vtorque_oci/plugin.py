"""The plugin's declaration of the image builder ``oci``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtorque_core.api import ImageBuilder, constant_hook

if TYPE_CHECKING:
    from vtorque_core.api.image_builder import Builder


def _builder() -> Builder:
    from vtorque_oci.build import OciBuilder  # noqa: PLC0415

    return OciBuilder()


vtorque_image_builders = constant_hook(ImageBuilder("oci", _builder))
