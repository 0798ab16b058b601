"""The plugin's declarations, which vsub imports: guest type, image builder, ``-vm osv_mode``."""

from __future__ import annotations

from vtorque_core.api import GuestType, ImageBuilder, constant_hook, deferred
from vtorque_osv.settings import OSV_MODE, Settings

SUPPORTS = frozenset({"EnvVar"})

vtorque_settings = constant_hook(Settings)
vtorque_options = constant_hook(OSV_MODE)
vtorque_guest_types = constant_hook(
    GuestType(
        "osv",
        supports=SUPPORTS,
        driver=deferred("vtorque_osv.driver:OsvDriver"),
        check_script=deferred("vtorque_osv.check:check_script"),
    )
)
vtorque_image_builders = constant_hook(
    ImageBuilder("osv", deferred("vtorque_osv.build:OsvBuilder"))
)
