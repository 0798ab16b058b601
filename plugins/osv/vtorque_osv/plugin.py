"""The plugin's declarations, which vsub imports: guest type, image builder, ``-vm osv_mode``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vtorque_core.api import GuestType, Image, ImageBuilder, Refusal, constant_hook
from vtorque_osv.settings import OSV_MODE, Settings

if TYPE_CHECKING:
    from vtorque_core.api.guest_driver import GuestDriver
    from vtorque_core.api.image_builder import Builder

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


vtorque_settings = constant_hook(Settings)
vtorque_options = constant_hook(OSV_MODE)
vtorque_guest_types = constant_hook(
    GuestType("osv", supports=SUPPORTS, driver=_driver, check_script=_check_script)
)
vtorque_image_builders = constant_hook(ImageBuilder("osv", _builder))
