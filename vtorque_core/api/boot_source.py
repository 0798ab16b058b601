"""Boot sources, from which guests start. Only for ``vtorque1.node`` modules of plugins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vtorque_core.api.guest_driver import GuestDriver
from vtorque_core.api.guest_plan import Boot as Boot
from vtorque_core.api.guest_plan import BootSource as BootSource
from vtorque_core.api.guest_plan import ColdBoot as ColdBoot
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.guest_plan import Identity as Identity


@dataclass(frozen=True)
class Offer:
    """A boot source that a plugin offers for the guest with this ``index``."""

    index: int
    source: BootSource


@dataclass(frozen=True)
class RenderedGuest:
    """A guest, with its placement, before its start.

    ``bare_xml`` returns the guest's domain XML without hot-plugged devices, owner and names. A warm
    guest with equal XML can become this guest.
    """

    plan: GuestPlan
    driver: GuestDriver
    bare_xml: Callable[[], str]
