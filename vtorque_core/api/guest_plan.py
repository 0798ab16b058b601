"""A placed guest, as hooks see it: ``GuestPlan``, its owner, addresses and shares.

For acting modules; ``vsub`` never imports this. Plugins return claims, elements, context items and
resources. The core places, acquires and releases.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from vtorque_core.api.batch_system import BareNode, Grant
from vtorque_core.api.claims import Notice, Placement
from vtorque_core.api.host_topology import Topology
from vtorque_core.api.values import Image, JobRequest, Option
from vtorque_core.api.vm_options import FS_TYPE
from vtorque_core.base.errors import Refusal
from vtorque_core.base.names import JobAttempt

T = TypeVar("T")


@dataclass(frozen=True)
class JobUser:
    """The job's owner in the node's user database.

    Attributes:
        groups: (name, gid), primary group first.
        subordinate_id: host id that root in this user's guests is mapped to.
    """

    name: str
    uid: int
    gid: int
    groups: tuple[tuple[str, int], ...]
    home: str
    shell: str
    subordinate_id: int = 0


@dataclass(frozen=True)
class Address:
    """One guest NIC with its assigned address.

    Attributes:
        ip: None with DHCP, or if the NIC has no address (``dhcp`` is then False).
        prefix: length of the network prefix.
        network: empty for ``[network]``, whose NIC is the first; otherwise the name of
            ``[networks.<name>]``. Only the first NIC takes default route and name servers from
                DHCP.
        mtu: in bytes; None: the network's default.
        metric: of the default route; None: the guest's default.
        filtered: the node drops frames with another source MAC or source address.
    """

    mac: str
    ip: str | None = None
    prefix: int = 24
    gateway: str | None = None
    dns: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    network: str = ""
    mtu: int | None = None
    metric: int | None = None
    dhcp: bool = True
    filtered: bool = True


@dataclass(frozen=True)
class Share:
    """A host directory that every guest gets: one ``[shares.<name>]`` table of the site config.

    Attributes:
        source: host directory (virtiofs) or ``server:/export`` (nfs), with placeholders expanded.
        target: mount point in the guest.
        user_owned: the job's owner must own the source.
    """

    name: str
    source: str
    target: str
    kind: Literal["virtiofs", "nfs"] = "virtiofs"
    readonly: bool = False
    user_owned: bool = False


@dataclass(frozen=True)
class SavedGuest:
    """A guest that was saved while it stood still, and that goes on as one of another job's.

    Or that still runs on another node, and comes here.

    Args:
        name, uuid: its libvirt domain's, which cannot change; ``hostname`` what it calls itself.
        job_id, attempt: of the job that it was booted for: its secrets are that one's.
        leased: (pool, item) of its addresses, which it must have again.
        state_dir, run_dir: where its files were.
        memory: libvirt's file of it, root's alone.
        xml: libvirt's XML of one that comes here while it runs; empty: it was saved.
        arrive: called with the XML that it is to have here, and what is set if another guest of
            the job here fails; returns when it runs here.
        gate: called once it stands here, with the time.monotonic() until which it may wait, and
            what is set if another guest of the job here fails; it runs when that returns.
    """

    name: str
    uuid: str
    hostname: str
    job_id: str
    attempt: int
    leased: tuple[tuple[str, str], ...]
    state_dir: Path
    run_dir: Path
    memory: Path
    xml: str = ""
    arrive: Callable[..., None] | None = None
    gate: Callable[[float, threading.Event], None] | None = None


@dataclass(frozen=True)
class GuestPlan:
    """One validated guest of the job on this node.

    Attributes:
        job: the job attempt, with its owner and this node.
        index: number of the guest on this node, from 0.
        rank: number of the guest in the job, from 0.
        guests_per_node: number of the job's guests on each node.
        name, uuid: of the libvirt domain.
        hostname: the guest's own host name.
        ram_mib: RAM in MiB.
        request: the job's options; read them with ``guest[OPTION]``.
        addresses: the guest's NICs.
        peers: (hostname, ip) of all guests in rank order, in the first network.
        state_dir, run_dir: this guest's root-owned directories, on disk and in memory.
        secret: derived for this job attempt; the same on all its nodes.
        placement: the ledger's answer; empty in ``vtorque_plan``.
        shares: host directories for this guest, in the order of the site config.
        ntp: time servers; empty: the image's default.
        qemu_uid: host user of QEMU. Files for QEMU must be readable to this user.
        aliases: (``<hostname>-<network>``, hostname, ip) of all guests in the other networks.
        host: the node's NUMA nodes, cores and caches; without ``nodes`` on a submit host.
        supports: names of the context items that the guest can apply. Any other item refuses the
            job.
        hostnames: of all guests in rank order. Empty before the phase ``render domain``, so
            ``vtorque_guest_context`` is the first hook that sees them.
        slots: vCPUs of the same guests. They differ if ``vcpus=job`` and the batch system grants
            different numbers of CPUs per node. Empty as long as ``hostnames``.
        granted: as in :class:`vtorque_core.api.batch_system.BatchJob`.
        bare: the job's nodes without guests (mixed request); their ranks follow the guests'.
        spare: key of the warm guest that becomes this guest; empty: the guest boots for the job.
        saved: checkpoint that the guest is restored from, instead of a boot with a new disk.
    """

    job: JobAttempt
    index: int
    rank: int
    guests_per_node: int
    name: str
    uuid: str
    hostname: str
    vcpus: int
    ram_mib: int
    image: Image
    user: JobUser
    request: JobRequest
    addresses: tuple[Address, ...]
    peers: tuple[tuple[str, str], ...]
    state_dir: Path
    run_dir: Path
    secret: bytes = field(repr=False)
    placement: Placement = field(default_factory=Placement)
    shares: tuple[Share, ...] = ()
    ntp: tuple[str, ...] = ()
    qemu_uid: int = 0
    aliases: tuple[tuple[str, str, str], ...] = ()
    host: Topology = field(default_factory=Topology, repr=False)
    supports: frozenset[str] = field(default=frozenset(), repr=False)
    hostnames: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    granted: Mapping[str, Grant] | None = None
    bare: tuple[BareNode, ...] = ()
    spare: str = ""
    saved: SavedGuest | None = None

    @property
    def comes(self) -> bool:
        """Whether it comes from another node, where it runs, and is not started or restored."""
        return self.saved is not None and self.saved.arrive is not None

    @property
    def home(self) -> str:
        """Path of the owner's home in the guest: target of the share ``home``, or /home/NAME."""
        shared = (share.target for share in self.shares if share.name == "home")
        return next(shared, f"/home/{self.user.name}")

    def __getitem__(self, option: Option[T]) -> T:
        """Return the value of an option."""
        return self.request[option]

    def leased(self, pool: str) -> tuple[str, ...]:
        """Return the leased items of a pool; empty without a claim."""
        return tuple(self.placement.leased.get(pool, ()))

    def amount(self, pool: str) -> int:
        """Return the leased amount of a pool (``AmountClaim``); 0 without a claim."""
        return self.placement.amounts.get(pool, 0)


def lacks(
    guest: GuestPlan, what: str, *, option: Option[Any], required: bool, where: str, fix: str
) -> Refusal | Notice:
    """Return the answer of ``vtorque_plan`` if this node lacks what an option requests.

    Args:
        guest: the guest.
        what: the missing capability, as in "node n1 has no <what>".
        option: the ``-vm`` key that requests it.
        required: True: refuse the job. False: run it without, and notify the user.
        where: the setting that decides: ``"[plugin.acme-fpga] required"``.
        fix: what the admin or the user can do.
    """
    key, value = option.key, option.show(guest[option])
    if required:
        message = f"node {guest.job.node} has no {what}"
        return Refusal(message, key=key, value=value, where=f"{where} = true", fix=fix)
    return Notice(f"runs without {key}={value}: node {guest.job.node} has no {what}; {fix}")


ROOT_DISK = "root.qcow2"
"""File name of each guest's writable disk."""


def ramdisk_dir(guest: GuestPlan) -> Path | None:
    """Return the mount point of the guest's tmpfs with fs_type=ramdisk, otherwise None."""
    return guest.run_dir / "ram" if guest[FS_TYPE] == "ramdisk" else None


def root_disk(guest: GuestPlan) -> Path:
    """Return the path of the guest's writable qcow2 file, in memory with fs_type=ramdisk.

    It is an overlay over the image, or a full copy with ``[images] ramdisk = "copy"``.
    """
    return (ramdisk_dir(guest) or guest.state_dir) / ROOT_DISK
