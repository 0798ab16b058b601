"""A guest of a job on this node, as hooks see it, and its boot source."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from vtorque_core.api.batch_system import BareNode, Grant
from vtorque_core.api.claims import Notice, Placement
from vtorque_core.api.host_topology import Topology
from vtorque_core.api.values import Act, Image, JobRequest, Option
from vtorque_core.api.vm_options import FS_TYPE
from vtorque_core.base.errors import Refusal
from vtorque_core.base.names import JobAttempt, Paths, tap_name

T = TypeVar("T")


@dataclass(frozen=True)
class JobUser:
    """The job's owner in the node's user database.

    Attributes:
        groups: (name, gid), primary group first.
        subordinate_id: uid and gid with which root in this user's guests accesses host files.
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
    """One guest NIC.

    Attributes:
        ip: None if DHCP assigns the address. If ``dhcp`` is False, None means no address.
        network: empty for ``[network]``, otherwise the name of ``[networks.<name>]``. Only the NIC
            in ``[network]`` takes default route and name servers from DHCP.
        mtu, metric: None means the default.
        filtered: the node drops frames with a forged source MAC or source address.
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

    @property
    def tap(self) -> str:
        """Name of the tap device on the node, if the NIC is filtered."""
        return tap_name(self.mac)


@dataclass(frozen=True)
class Share:
    """A host directory that every guest gets (``[shares.<name>]``).

    Attributes:
        source: host directory, or ``server:/export`` (nfs).
        user_owned: the job's owner must own the source.
    """

    name: str
    source: str
    target: str
    kind: Literal["virtiofs", "nfs"] = "virtiofs"
    readonly: bool = False
    user_owned: bool = False


@dataclass(frozen=True)
class Identity:
    """Properties that a restored or migrated guest keeps.

    Attributes:
        name, uuid: name and UUID of the libvirt domain.
        job_id, attempt: the job attempt from which the guest's secrets derive.
        leased: (pool, item) of each network address, which the job must lease on this node, too.
    """

    name: str
    uuid: str
    hostname: str
    job_id: str
    attempt: int
    leased: tuple[tuple[str, str], ...]


class Boot(Protocol):
    """The start of one guest, as its boot source sees it. As root, in this guest's thread.

    Every method raises HostFault if libvirt or the guest fails, or after the deadline.

    Attributes:
        failed: set when another guest of the job has failed.
        channels: Unix sockets of the guest's channels.
    """

    guest: GuestPlan
    paths: Paths
    failed: threading.Event
    channels: Sequence[Path]

    @property
    def deadline(self) -> float:
        """Deadline of the current step in ``time.monotonic()`` seconds."""

    @property
    def rendered(self) -> str:
        """Domain XML for a cold boot."""

    def create(self) -> None:
        """Create the domain of :attr:`rendered`, paused."""

    def adapt_xml(self, xml: str, state_dir: Path, run_dir: Path) -> str:
        """Return the XML of an earlier domain, adapted to this guest's files, owner and CPUs.

        ``xml`` must come from a root-owned file. The directories are those of the earlier guest.
        Raises Refused if the job requests other virtual hardware.
        """

    def restore(self, memory: Path, state_dir: Path, run_dir: Path) -> None:
        """Restore a domain, paused, from the file ``memory`` that libvirt saved.

        The directories are as in :meth:`adapt_xml`.
        """

    def adopt_guest(self) -> None:
        """Attach this guest's devices to the claimed warm guest, and resume that guest."""

    def filter_nics(self) -> None:
        """Complete the packet filters of the guest's NICs."""

    def resume(self) -> None:
        """Resume the domain."""

    def await_ready(self) -> None:
        """Wait until the guest reports READY."""

    def set_clock(self) -> None:
        """Set the guest's clock after a suspension, if the driver supports it."""


class BootSource:
    """A source from which one guest starts. Override the methods that differ from a cold boot.

    Attributes:
        forbids: operations that libvirt cannot do with a guest from this source. The source is not
            used for a job whose options need one of these operations.
        fallback: boot the guest cold if the source raises HostFault, or if the guest is not ready
            after half of the remaining time.
        brings_disk: :meth:`start` or ``vtorque_pre_boot`` creates the guest's disk
            (``GuestPlan.root_disk``).
        remote: the guest runs on another node until :meth:`start` returns. ``[node] start_timeout``
            begins after :meth:`start`. If :meth:`start` fails, the core destroys no domain.
    """

    name: str = "cold"
    forbids: frozenset[Act] = frozenset()
    fallback: bool = False
    brings_disk: bool = False
    remote: bool = False

    @property
    def identity(self) -> Identity | None:
        """Identity that the guest keeps; None: a new guest of this job."""
        return None

    @property
    def warm_key(self) -> str:
        """Key of the warm guest that becomes the job's guest; empty: none."""
        return ""

    def start(self, boot: Boot) -> None:
        """Create the domain before ``boot.deadline``."""
        boot.create()

    def run(self, boot: Boot) -> None:
        """Resume the domain."""
        if not self.remote:
            boot.resume()

    def await_ready(self, boot: Boot) -> None:
        """Wait until the guest can run the script, at most until ``boot.deadline``."""
        boot.await_ready()


class ColdBoot(BootSource):
    """The default source: a boot of the guest's operating system."""


ROOT_DISK = "root.qcow2"
"""File name of each guest's writable disk."""


@dataclass(frozen=True)
class GuestPlan:
    """One guest of the job on this node.

    Attributes:
        index: number of the guest on this node, from 0.
        rank: number of the guest in the job, from 0.
        request: the job's options; read them with ``guest[OPTION]``.
        peers: (hostname, ip) of all guests in rank order, in the first network.
        state_dir: root-owned directory on disk.
        run_dir: root-owned directory in memory.
        secret: bytes derived for this job attempt, equal on all nodes of the job.
        placement: resources that the guest gets; empty in ``vtorque_plan``.
        qemu_uid: uid of the guest's QEMU on the host. Give this uid access to files for QEMU.
        aliases: (``<hostname>-<network>``, hostname, ip) of all guests in other networks.
        host: hardware of this node; unknown on a submit host.
        supports: names of the supported context items.
        hostnames: host names of all guests in rank order; empty before ``vtorque_guest_context``.
        slots: vCPUs of the guests in ``hostnames``.
        granted, bare: see :class:`vtorque_core.api.batch_system.BatchJob`.
        source: the boot source. It is a warm guest only after the phase ``render domain``.
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
    source: BootSource = field(default_factory=ColdBoot)

    @property
    def home(self) -> str:
        """The owner's home in the guest: target of the share ``home``, otherwise /home/NAME."""
        shared = (share.target for share in self.shares if share.name == "home")
        return next(shared, f"/home/{self.user.name}")

    @property
    def ramdisk_dir(self) -> Path | None:
        """Mount point of the guest's tmpfs; None without fs_type=ramdisk."""
        return self.run_dir / "ram" if self[FS_TYPE] == "ramdisk" else None

    @property
    def root_disk(self) -> Path:
        """Path of the guest's writable qcow2 file, in memory with fs_type=ramdisk.

        It is an overlay over the image, or a copy (``[images] ramdisk``).
        """
        return (self.ramdisk_dir or self.state_dir) / ROOT_DISK

    def __getitem__(self, option: Option[T]) -> T:
        return self.request[option]

    def leased_items(self, pool: str) -> tuple[str, ...]:
        """Return the leased items of a pool; empty without a claim."""
        return tuple(self.placement.leased.get(pool, ()))

    def amount(self, pool: str) -> int:
        """Return the leased amount of a pool (``AmountClaim``); 0 without a claim."""
        return self.placement.amounts.get(pool, 0)


def report_missing(
    guest: GuestPlan, what: str, *, option: Option[Any], required: bool, where: str, fix: str
) -> Refusal | Notice:
    """Return the result of ``vtorque_plan`` for a node without the hardware of ``option``.

    The job is refused if ``required``; otherwise the user is notified. ``what`` names the
    missing hardware, as in "node n1 has no WHAT". ``where`` is the setting of ``required``
    (``"[plugin.acme-fpga] required"``), and ``fix`` says what the admin or user can do.
    """
    key, value = option.key, option.show(guest[option])
    if required:
        message = f"node {guest.job.node} has no {what}"
        return Refusal(message, key=key, value=value, where=f"{where} = true", fix=fix)
    return Notice(f"runs without {key}={value}: node {guest.job.node} has no {what}; {fix}")
