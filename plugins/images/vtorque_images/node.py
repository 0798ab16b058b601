"""The health checks of images on the node."""

from __future__ import annotations

from vtorque_core.api import deferred, hookimpl

vtorque_health_checks = hookimpl(deferred("vtorque_images.health:checks"))
