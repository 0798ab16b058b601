"""Shared memory of a job on the node: one file in /dev/shm, and a PCI device in each guest.

The device is QEMU's ivshmem-plain (docs/specs/ivshmem-spec.txt). Its BAR 2 maps the shared memory.

Privileges: root.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from vtorque_core.api import Act, constant_hook, derive, hookimpl, setting, show_mib
from vtorque_core.api.claims import MemoryClaim, Notice
from vtorque_core.api.guest_context import ContextItem, EnvVar, PciMemory
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.libvirt_domain import Element, ListElement
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_unclot.plugin import SHMEM, UNCLOT
from vtorque_unclot.shm import Shm

DEVICE, BAR = "1af4:1110", 2  # ivshmem-spec.txt, "PCI device" and "BAR 2"
LINK = "/dev/vtorque/shmem"


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.unclot]``."""

    shm_reserve: int = setting(
        64, doc="part of /dev/shm that is reserved for other programs", unit="MiB"
    )


@dataclass(frozen=True)
class SharedMemory(ListElement):
    """libvirt's ``<shmem>``: the file ``/dev/shm/<region>`` of ``mib`` MiB as a PCI device.

    libvirt refuses to save or migrate a guest with this device, because QEMU would not transfer the
    shared memory.
    """

    template: ClassVar[str] = "vtorque_unclot:shmem.xml.j2"
    forbids: ClassVar[frozenset[Act]] = UNCLOT.forbids
    unique: ClassVar[tuple[str, ...]] = ("region",)
    name: str
    region: str
    mib: int


def region(guest: GuestPlan) -> str:
    """Return the name of the job's shared memory on this node, derived from the site's secret.

    The name includes the node, because test nodes on one machine share /dev/shm.
    """
    return "vtorque-" + derive(guest.secret, "unclot", guest.job.node).hex()


vtorque_settings = constant_hook(Settings)
vtorque_resources = constant_hook(Shm)


@hookimpl
def vtorque_plan(guest: GuestPlan) -> Iterator[MemoryClaim | Notice]:
    """Claim the job's shared memory once per node."""
    if not guest[UNCLOT] or guest.index:
        return
    yield MemoryClaim(guest[SHMEM], use="unclot", key=SHMEM.key)
    if guest.guests_per_node == 1:
        yield Notice(
            "unclot=true has no effect: the job has one guest on each node, and guests on "
            "different nodes cannot share memory; request vms_per_node=2 or more"
        )


@hookimpl
def vtorque_pre_boot(job: NodeJob) -> None:
    """Create the file in /dev/shm before QEMU does. Only the uids of the guests get access."""
    guest = job.guests[0]
    if guest[UNCLOT]:
        size, spare = guest[SHMEM] << 20, job.site[Settings].shm_reserve << 20
        where = "[plugin.unclot] shm_reserve"
        uid, *more = (each.qemu_uid for each in job.guests)
        others = tuple(more)
        shm = Shm(region(guest), size, uid=uid, others=others, spare=spare, where=where)
        job.acquire(shm)


@hookimpl
def vtorque_render_domain(guest: GuestPlan) -> Iterator[Element]:
    """Add the shared memory device to the guest."""
    if guest[UNCLOT]:
        yield SharedMemory("shmem", region(guest), guest[SHMEM])


@hookimpl
def vtorque_guest_context(guest: GuestPlan) -> Iterator[ContextItem]:
    """Set VTORQUE_SHMEM to the shared memory's path in the guest. The job's owner may open it."""
    if guest[UNCLOT] and "PciMemory" in guest.supports:
        yield PciMemory(DEVICE, BAR, LINK)
        yield EnvVar("VTORQUE_SHMEM", LINK)
        yield EnvVar("VTORQUE_SHMEM_SIZE", str(guest[SHMEM] << 20))


def check(site: Site) -> Iterator[HealthResult]:
    """Report how much of /dev/shm is free for jobs; warn if the default size does not fit."""
    left = Shm.room(site[Settings].shm_reserve << 20) >> 20
    said = f"{show_mib(left)} of /dev/shm for all jobs (limit of one: [options.unclot_shmem] max)"
    little = left < SHMEM.default
    fix = "mount -o remount,size=... /dev/shm" if little else ""
    yield HealthResult("warning" if little else "ok", said, fix)


vtorque_health_checks = constant_hook(HealthCheck("unclot: /dev/shm", check))
