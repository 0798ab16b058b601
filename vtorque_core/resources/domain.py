"""A kind of what is acquired: a libvirt domain."""

from __future__ import annotations

from vtorque_core.api.acquired import RELEASE_TIME, CoreResource, unjournalled
from vtorque_core.base.record import dataclass
from vtorque_core.resources import stopped_daemons


@dataclass(frozen=True)
class Domain(CoreResource):
    """A transient libvirt domain; it needs every earlier record of its guest.

    ``daemons``: the lock files of the user's daemons that its QEMU connects to.
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

    def create(self) -> None:
        """Start it from the XML. Raises HostFault."""
        from vtorque_core.base import hypervisor  # noqa: PLC0415 - libvirt costs 22 ms

        with stopped_daemons.ended(self.daemons):
            hypervisor.create_domain(self.uri, self.xml, paused=self.paused)

    def release(self) -> None:
        """Destroy it and wait until it has gone; gone already is fine."""
        from vtorque_core.base import hypervisor  # noqa: PLC0415

        hypervisor.destroy_domain(self.uri, self.uuid, RELEASE_TIME)
