"""What the plugin declares: the image builder ``oci``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vtorque_core.api import ImageBuilder, hookimpl

if TYPE_CHECKING:
    from vtorque_core.api_image import Builder


def _builder() -> Builder:
    from vtorque_oci.build import OciBuilder  # noqa: PLC0415

    return OciBuilder()


@hookimpl
def vtorque_image_builders() -> Iterator[ImageBuilder]:
    """Yield the builder."""
    yield ImageBuilder("oci", "a container (OCI image, podman save, SIF) as a guest", _builder)
