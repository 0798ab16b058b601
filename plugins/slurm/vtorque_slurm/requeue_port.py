"""The virtio port of guests on which a job's script requests a requeue of its job.

Privileges: root, on the node. Root never reads the port: its host end belongs to the job's owner,
whose process :mod:`vtorque_slurm.requeue_helper` runs beside the script.
"""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api import hookimpl
from vtorque_core.api.guest_context import ContextItem, GuestFile, RootCommand
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.libvirt_domain import Channel, Element
from vtorque_core.api.node_job import Site
from vtorque_slurm import inside_guests
from vtorque_slurm.plugin import REQUEUE_SOCKET
from vtorque_slurm.settings import Settings

PORT = "org.vtorque.requeue"
_PROGRAM = "/usr/lib/vtorque/slurm-requeue"  # guest/scontrol starts it


@hookimpl
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterator[Element]:
    """Add the port, also to guests that do not use it: a warm guest has no rank yet."""
    if _has_port(guest, site):
        yield Channel("requeue", PORT, str(guest.run_dir / REQUEUE_SOCKET), owner="job")


@hookimpl
def vtorque_guest_context(guest: GuestPlan, site: Site) -> Iterator[ContextItem]:
    """Add the program that uses the port to the job's first guest, and let the owner open it."""
    if _has_port(guest, site) and guest.rank == 0:
        yield GuestFile(_PROGRAM, inside_guests.program("requeue"), mode=0o755)
        yield RootCommand((_PROGRAM, "--own-port", f"{guest.user.uid}:{guest.user.gid}"))


def _has_port(guest: GuestPlan, site: Site) -> bool:
    return site[Settings].requeue and "RootCommand" in guest.supports
