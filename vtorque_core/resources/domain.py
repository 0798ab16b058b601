"""A kind of what is acquired: a libvirt domain."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api.acquired import RELEASE_TIME, CoreResource, unjournalled
from vtorque_core.resources import stopped_daemons

if TYPE_CHECKING:
    from vtorque_core.base import hypervisor


@dataclass(frozen=True)
class Domain(CoreResource):
    """A transient libvirt domain; it needs every earlier record of its guest.

    ``daemons``: the lock files of the user's daemons that its QEMU connects to. ``taken``: it is a
    spare guest's that is there already, paused, and becomes the job's by this. ``saved``: libvirt's
    file of a saved one, which is restored, paused, with the XML, in at most ``seconds``.
    ``arrive``: it comes from another node with the XML, and this returns when it runs here.
    """

    kind = "domain"
    blocking = True
    settle = 5.0
    name: str
    uuid: str
    uri: str
    xml: str = unjournalled("")
    paused: bool = unjournalled(default=False)
    daemons: tuple[str, ...] = unjournalled(())
    taken: hypervisor.Taken | None = unjournalled()
    saved: str = unjournalled("")
    arrive: Callable[[str], None] | None = unjournalled()
    seconds: float = unjournalled(60.0)

    def create(self) -> None:
        """Start it from the XML, or have it become the job's. Raises HostFault."""
        from vtorque_core.base import hypervisor  # noqa: PLC0415 - libvirt costs 22 ms

        # All of a saved one's memory is read between QEMU's first and last word to them.
        slow = self.saved or self.arrive
        with stopped_daemons.ended(self.daemons, self.seconds if slow else None):
            if self.arrive is not None:
                self.arrive(self.xml)
            elif self.saved:
                hypervisor.restore_domain(self.uri, self.saved, self.xml, self.seconds)
            elif self.taken is None:
                hypervisor.create_domain(self.uri, self.xml, paused=self.paused)
            else:
                hypervisor.take_domain(self.uri, self.uuid, self.taken)

    def release(self) -> None:
        """Destroy it and wait until it has gone; gone already is fine."""
        from vtorque_core.base import hypervisor  # noqa: PLC0415

        hypervisor.destroy_domain(self.uri, self.uuid, RELEASE_TIME)
        if self.uri == "qemu:///session":  # what root's libvirtd writes is logrotate(8)'s to remove
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            Path(cache, "libvirt/qemu/log", f"{self.name}.log").unlink(missing_ok=True)
