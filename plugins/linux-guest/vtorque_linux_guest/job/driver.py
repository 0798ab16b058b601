"""The driver of Linux guests. Runs as root on the node."""

# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vtorque_core.api import HostFault
from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_context import ContextItem
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.libvirt_domain import Element
from vtorque_core.api.node_job import Site
from vtorque_linux_guest.guest.linux_family import has_agent
from vtorque_linux_guest.job.agent_driver import AgentDriver, status_port
from vtorque_linux_guest.settings import Settings


class LinuxDriver(AgentDriver):
    """The driver of Linux guests; see :class:`vtorque_core.api.guest_driver.GuestDriver`."""

    def elements(self, guest: GuestPlan, site: Site) -> Iterator[Element]:
        """Return virtio ports, seed, shares and disks, and the image's kernel if it has one."""
        from vtorque_linux_guest.boot import hardware

        return hardware.elements(guest)

    def context(self, guest: GuestPlan, site: Site) -> Iterator[ContextItem]:
        """Return the variable ``DISTRO``, and the mounts of the shares and of the user's disk."""
        from vtorque_linux_guest.boot import hardware

        return hardware.context(guest)

    def resources(
        self, guest: GuestPlan, items: Sequence[ContextItem], site: Site
    ) -> Iterable[Resource]:
        """Return the seed and the files on the node that ``vmgr ssh`` uses to log in.

        Raises Refused and HostFault.
        """
        from vtorque_linux_guest.boot import seed_contents

        return seed_contents.resources(guest, items, site[Settings].for_image(guest.image))

    def await_warm(self, guest: GuestPlan, deadline: float) -> None:
        """Wait until a warm guest reports that it waits for its seed. Raises HostFault."""
        from vtorque_linux_guest.job import readiness

        if not has_agent(guest.image):  # it would wait only briefly for a seed
            raise HostFault(
                f"image {guest.image.name} has no vTorque agent (label agent=builtin), so it "
                "cannot be used for warm guests"
            )
        with status_port(guest.run_dir, deadline) as connection:
            readiness.await_seed(guest, connection, deadline)
