"""The resources of this plugin."""

from __future__ import annotations

from vtorque_core.api.acquired import Resource
from vtorque_linux_guest.boot.seed import Seed
from vtorque_linux_guest.job.site_epilogue import SiteEpilogue


def resources() -> list[type[Resource]]:
    """Return the classes with which a teardown releases this plugin's resources."""
    return [Seed, SiteEpilogue]
