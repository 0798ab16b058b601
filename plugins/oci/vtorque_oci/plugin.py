"""The plugin's declaration of the image builder ``oci``."""

from __future__ import annotations

from vtorque_core.api import ImageBuilder, constant_hook, deferred

vtorque_image_builders = constant_hook(
    ImageBuilder("oci", deferred("vtorque_oci.build:OciBuilder"))
)
