"""Boot sources: the ways in which a guest of a job comes up. For acting modules.

A guest is booted cold (:class:`ColdBoot`) unless a plugin offers another source: a checkpoint that
is restored, a warm guest that is taken over. The core calls the methods of a source, one thread
for each guest; it journals the domain before, and destroys it afterwards by its UUID with no
plugin loaded.
"""

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
    """A source for a guest that has been rendered, by the guest's ``index``."""

    index: int
    source: BootSource


@dataclass(frozen=True)
class RenderedGuest:
    """A placed guest whose domain is known, but not started.

    ``bare_xml`` renders the domain without devices that can be plugged in, owner and names. A
    running guest whose XML was equal can become this guest.
    """

    plan: GuestPlan
    driver: GuestDriver
    bare_xml: Callable[[], str]
