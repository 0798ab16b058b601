"""What the OSv plugin declares: guest type, image builder, ``-vm osv_mode``; for ``vsub`` too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vtorque_core.api import GuestType, Image, ImageBuilder, Option, Refusal, hookimpl
from vtorque_osv.settings import OSV_MODE, Settings

if TYPE_CHECKING:
    from vtorque_core.api_guest import GuestDriver
    from vtorque_core.api_image import Builder

SUPPORTS = frozenset({"EnvVar"})


def _driver() -> GuestDriver:
    from vtorque_osv.driver import OsvDriver  # noqa: PLC0415

    return OsvDriver()


def _builder() -> Builder:
    from vtorque_osv.build import OsvBuilder  # noqa: PLC0415

    return OsvBuilder()


def _check_script(script: bytes, image: Image) -> Iterable[Refusal]:
    from vtorque_osv.check import check_script  # noqa: PLC0415

    return check_script(script, image)


@hookimpl
def vtorque_settings() -> Iterator[type[Settings]]:
    """Yield ``[plugin.osv]``."""
    yield Settings


@hookimpl
def vtorque_options() -> Iterator[Option[Any]]:
    """Yield the plugin's ``-vm`` key."""
    yield OSV_MODE


@hookimpl
def vtorque_guest_types() -> Iterator[GuestType]:
    """Yield the guest type ``osv``."""
    yield GuestType("osv", supports=SUPPORTS, driver=_driver, check_script=_check_script)


@hookimpl
def vtorque_image_builders() -> Iterator[ImageBuilder]:
    """Yield the builder of OSv images."""
    yield ImageBuilder(
        "osv", "OSv from a loader and your programs, each a command by name", builder=_builder
    )
