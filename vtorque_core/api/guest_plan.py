"""A placed guest as hooks see it: ``GuestPlan``, its user, addresses and shares.

For acting modules: ``vsub`` never imports it. A plugin asks (claims, elements, context items,
resources); the core decides, acquires and releases.
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
    """The job's owner as the node's user database has it. ``groups``: (name, gid), primary first.

    ``subordinate_id`` is the host id that root inside a guest of this user is mapped to.
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
    """One guest NIC: assigned, never discovered.

    ``ip`` is None with DHCP, and where the NIC has no address (``dhcp`` is then False). ``prefix``
    is the network's length; ``gateway``, ``dns``, ``search`` may be empty. ``network``: empty for
    ``[network]``, whose NIC is the first, else the name of ``[networks.<name>]``; only the first
    takes a default route and name servers from DHCP. ``mtu`` in bytes, None: the network's own.
    ``metric`` of the default route, None: the guest's own choice. ``filtered``: the node drops
    what the guest sends with another MAC, or another source address than ``ip``.
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

    Placeholders are expanded. ``source`` is a host directory (virtiofs) or ``server:/export``
    (nfs); ``target`` is where it appears in the guest. ``user_owned``: the source must belong to
    the job's user.
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
    """One guest of the job on this node, validated; all hooks get it.

    Args:
        job: whose it is, and which node this is.
        name: libvirt domain name; ``uuid`` its UUID, ``hostname`` what the guest calls itself.
        index: of the guest on this node, from 0; ``rank``: in the whole job, from 0.
        guests_per_node: how many guests the job has on each node.
        ram_mib: guest RAM in MiB.
        hostnames: of all guests of the job in rank order, this one's included. Empty until the
            phase ``render domain``; ``vtorque_guest_context`` is the first hook that sees them.
        slots: the vCPUs of the same guests, which differ where ``vcpus=job`` and the batch system
            gives the job other numbers of CPUs on its nodes. Empty as long as ``hostnames``.
        request: ``guest[OPTION]`` reads it.
        state_dir, run_dir: this guest's own root-owned directories, on disk and in memory.
        peers: (hostname, ip) of all guests of the job in rank order, this one included, in the
            first network.
        aliases: (``<hostname>-<network>``, hostname, ip) of the same guests in the others.
        bare: the job's nodes without guests, of a mixed request; their ranks follow the guests'.
        secret: derived for this job and attempt only; the same on all its nodes.
        placement: the ledger's answer; empty while claims are being made.
        shares: host directories this guest gets, in the site config's order.
        ntp: time servers, names or addresses; empty: the image's own choice.
        qemu_uid: the host user that QEMU runs as; files made for QEMU must be theirs to read.
        host: the node's NUMA nodes, cores and caches; without ``nodes`` on a front end.
        granted: what the batch system gives the job on this node, as
            :class:`vtorque_core.api.batch_system.BatchJob` has it.
        supports: names of the context items that the guest can apply, for a plugin that can do
            without; any other item refuses the job.
        spare: the key of the spare guest that becomes this one: it has run since before the job,
            its clock stood still, and its devices are plugged in; empty: it is booted for the job.
        saved: the guest that goes on as this one, in place of a boot; its disk is not made anew.
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
        """The user's home in the guest: the target of the share ``home``, or /home/NAME."""
        shared = (share.target for share in self.shares if share.name == "home")
        return next(shared, f"/home/{self.user.name}")

    def __getitem__(self, option: Option[T]) -> T:
        """Return the value of an option for this job."""
        return self.request[option]

    def leased(self, pool: str) -> tuple[str, ...]:
        """Return the items of a pool that this guest got; empty if it asked for none."""
        return tuple(self.placement.leased.get(pool, ()))

    def amount(self, pool: str) -> int:
        """Return how much of a pool this guest got (``AmountClaim``); 0 if it asked for none."""
        return self.placement.amounts.get(pool, 0)


def lacks(
    guest: GuestPlan, what: str, *, option: Option[Any], required: bool, where: str, fix: str
) -> Refusal | Notice:
    """Answer a wish that this node cannot fulfil, from ``vtorque_plan``.

    Args:
        guest: whose wish it is.
        what: the missing capability, as in "node n1 has no <what>".
        option: the ``-vm`` key that asks for it.
        required: the site's word: refuse the job, or run it without and say so.
        where: the key that says which: ``"[plugin.acme-fpga] required"``.
        fix: what the admin can do, or the user.
    """
    key, value = option.key, option.show(guest[option])
    if required:
        message = f"node {guest.job.node} has no {what}"
        return Refusal(message, key=key, value=value, where=f"{where} = true", fix=fix)
    return Notice(f"runs without {key}={value}: node {guest.job.node} has no {what}; {fix}")


ROOT_DISK = "root.qcow2"
"""The name of each guest's own disk, whoever has made it."""


def ramdisk_dir(guest: GuestPlan) -> Path | None:
    """Return where the guest's own tmpfs is mounted, with fs_type=ramdisk."""
    return guest.run_dir / "ram" if guest[FS_TYPE] == "ramdisk" else None


def root_disk(guest: GuestPlan) -> Path:
    """Return the qcow2 file that the guest writes to: on disk, or in memory with fs_type=ramdisk.

    A layer over the image's disk, or with ``[images] ramdisk = "copy"`` a disk that stands alone.
    """
    return (ramdisk_dir(guest) or guest.state_dir) / ROOT_DISK
