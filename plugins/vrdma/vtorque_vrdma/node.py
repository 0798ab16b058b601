"""Set up RDMA on the node and in guests, with the site's backend ``rxe``, ``sriov`` or ``hyv``.

Privileges: root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import ClassVar, Literal

from vtorque_core.api import (
    Act,
    HostFault,
    Refusal,
    Refused,
    constant_hook,
    derive,
    hookimpl,
    name_errors,
    setting,
)
from vtorque_core.api.claims import Claim, Notice, PoolClaim
from vtorque_core.api.guest_context import ContextItem, GuestDevice, GuestFile, Package, RootCommand
from vtorque_core.api.guest_plan import Address, GuestPlan, report_missing
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.job_files import File
from vtorque_core.api.libvirt_domain import Element, MetadataEntry, QemuArgs
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_passthrough.pci_functions import (
    SYSFS,
    VirtualFunction,
    virtual_functions,
    why_no_vfio,
)
from vtorque_passthrough.vfio import PciDevice, Vfio
from vtorque_vrdma.fence import Fence
from vtorque_vrdma.guid import VfGuid
from vtorque_vrdma.plugin import VRDMA

# The pool in which a guest holds a lease identifies its backend. For sriov the leased item is a PCI
# function; all plugins lease functions in pools named "pci" or "pci/...", so none is leased twice.
# For other backends the item has no meaning.
POOLS = {"rxe": "vrdma/rxe", "sriov": "pci/vrdma", "hyv": "vrdma/hyv"}
TOOL = "/usr/lib/vtorque/vtorque-rdma"
DEBIAN = ("rdma-core", "ibverbs-providers", "ibverbs-utils", "iproute2")
REDHAT = ("rdma-core", "libibverbs", "libibverbs-utils", "iproute")
PACKAGES = (*(Package(n, "debian") for n in DEBIAN), *(Package(n, "redhat") for n in REDHAT))


@dataclass(frozen=True)
class Backend:
    """One ``[[plugin.vrdma.backends]]``. ``nodes`` is a regular expression for whole node names."""

    kind: Literal["rxe", "sriov", "hyv"]
    nodes: str = ".*"

    def __post_init__(self) -> None:
        with name_errors("nodes is not a regular expression", re.error, fault=ValueError):
            re.compile(self.nodes)


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.vrdma]``."""

    backends: tuple[Backend, ...] = setting(
        (Backend("rxe"),),
        doc="RDMA backend of each node: rxe, sriov or hyv; the first entry that matches is used",
    )
    cards: tuple[str, ...] = setting(
        (), doc="sriov: network interfaces (physical functions) of the cards"
    )
    network: str = setting("", doc="rxe: network that carries RDMA; empty: the first")
    allow_unfiltered: bool = setting(
        False, doc="accept that the node cannot filter RDMA traffic of guests (sriov, macvtap)"
    )
    required: bool = setting(True, doc="refuse a job on a node without RDMA; false: run it without")
    sysfs: str = setting(SYSFS, doc="path of sysfs (for tests)")

    def backend(self, node: str) -> str:
        """Return the backend of a node, or an empty string."""
        return next((b.kind for b in self.backends if re.fullmatch(b.nodes, node)), "")


@dataclass(frozen=True)
class Fabric(MetadataEntry):
    """The RDMA backend of a guest, recorded in the domain's metadata.

    The entry forbids suspending the guest, because other guests treat a pause of half a second as a
    broken connection.
    """

    forbids: ClassVar[frozenset[Act]] = VRDMA.forbids


def missing_support(settings: Settings, kind: str) -> tuple[str, str]:
    """Return what the node lacks for a backend, and the fix; empty strings if it lacks nothing."""
    if kind == "sriov" and why_no_vfio(settings.sysfs):
        return why_no_vfio(settings.sysfs), "see vtorque doctor"
    if kind == "sriov" and not virtual_functions(settings.cards, settings.sysfs):
        names = ", ".join(settings.cards) or "cards is empty"
        return (
            f"virtual function for guests ({names})",
            "set [plugin.vrdma] cards, and sriov_numvfs",
        )
    if kind == "hyv" and not Path(settings.sysfs, "module/vhost_hyv").exists():
        return "kernel module vhost_hyv", "it is part of a patched kernel"
    if kind == "hyv" and not _guids(settings):
        return "RDMA card", "check /sys/class/infiniband"
    return ("", "") if kind else ("RDMA", "add the node to [[plugin.vrdma.backends]]")


def _guids(settings: Settings) -> str:
    """Return the GUIDs of the node's RDMA cards (XXXX:XXXX:XXXX:XXXX), one per line."""
    cards = sorted(Path(settings.sysfs).glob("class/infiniband/*/node_guid"))
    return "".join(card.read_text().strip() + "\n" for card in cards)


def _backend(guest: GuestPlan) -> str:
    return next((kind for kind, pool in POOLS.items() if guest.leased_items(pool)), "")


vtorque_settings = constant_hook(Settings)
vtorque_resources = constant_hook(
    Fence, VfGuid, Vfio
)  # Vfio, in case the plugin passthrough is disabled


@hookimpl
def vtorque_plan(guest: GuestPlan, site: Site) -> Iterator[Claim | Refusal | Notice]:
    """Claim what the guest needs for the site's RDMA backend, or report what the node lacks."""
    settings, kind = site[Settings], site[Settings].backend(guest.job.node)
    if not guest[VRDMA] or (kind != "rxe" and not guest.host.nodes):  # no nodes: a submit host
        return
    what, fix = missing_support(settings, kind)
    if what:
        where = "[plugin.vrdma] required"
        yield report_missing(
            guest, what, option=VRDMA, required=settings.required, where=where, fix=fix
        )
    elif kind == "sriov" and not settings.allow_unfiltered:
        yield _unfiltered_refusal("a virtual function", guest)
    elif kind == "sriov":
        found = virtual_functions(settings.cards, settings.sysfs)
        near = {a: vf.function.numa for a, vf in found.items() if vf.function.numa >= 0}
        yield PoolClaim(POOLS[kind], tuple(found), near=near, key=VRDMA.key)
    else:
        yield PoolClaim(POOLS[kind], (guest.name,), key=VRDMA.key)


def _unfiltered_refusal(what: str, guest: GuestPlan) -> Refusal:
    return Refusal(
        f"node {guest.job.node} cannot filter what a guest sends through {what}",
        VRDMA.key,
        "true",
        where="[plugin.vrdma] allow_unfiltered = false",
        fix="the site can accept that if the switch or subnet manager separates jobs",
    )


def _card(guest: GuestPlan, settings: Settings) -> Address:
    """Return the network card for Soft-RoCE. Raises Refused if the guest has no suitable card."""
    cards = [a for a in guest.addresses if a.network == settings.network and a.ip]
    if not cards:
        name = f"[networks.{settings.network}]" if settings.network else "[network]"
        message = f"guests have no address from vTorque in {name}, which Soft-RoCE needs"
        raise Refused(Refusal(message, VRDMA.key, "true"))
    if not cards[0].filtered and not settings.allow_unfiltered:
        raise Refused(_unfiltered_refusal("its network card", guest))
    return cards[0]


@hookimpl
def vtorque_guest_context(guest: GuestPlan, site: Site) -> Iterator[ContextItem]:
    """Yield the guest's RDMA packages and device, and commands that set up and check the device."""
    kind = _backend(guest)
    if not kind:
        return
    yield from PACKAGES
    tool = files("vtorque_vrdma").joinpath("guest", "vtorque-rdma").read_bytes()
    yield GuestFile(TOOL, tool, mode=0o755)
    if kind == "rxe":
        yield RootCommand((TOOL, "soft", _card(guest, site[Settings]).mac), stage="boot")
    if any(not vf.infiniband for vf in _leased_functions(guest, site)):
        yield RootCommand((TOOL, "up", _mac(guest)), stage="boot")
    yield GuestDevice("infiniband/uverbs*", "/dev/vtorque/rdma0")
    yield RootCommand((TOOL, "check"))


def _leased_functions(guest: GuestPlan, site: Site) -> list[VirtualFunction]:
    settings, items = site[Settings], guest.leased_items(POOLS["sriov"])
    found = virtual_functions(settings.cards, settings.sysfs) if items else {}
    if gone := set(items) - set(found):
        raise HostFault(f"virtual function {min(gone)} is no longer available to guests")
    return [found[item] for item in items]


def _mac(guest: GuestPlan) -> str:
    """Return a locally administered unicast MAC for the guest's virtual function."""
    return "52:54:00:" + derive(guest.secret, "vrdma-mac", guest.name, length=3).hex(":")


def _guid(guest: GuestPlan) -> str:
    """Return a locally administered EUI-64 GUID for the guest's virtual function."""
    return "02:" + derive(guest.secret, "vrdma-guid", guest.name, length=7).hex(":")


def _device(vf: VirtualFunction, guest: GuestPlan) -> PciDevice:
    return PciDevice("vf0", vf.function.address, None if vf.infiniband else _mac(guest))


@hookimpl
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterator[Element]:
    """Yield the RDMA device: a virtual function, or the device of the backend ``hyv``."""
    kind = _backend(guest)
    if kind:
        yield Fabric("rdma", kind)
    for vf in _leased_functions(guest, site):
        yield _device(vf, guest)
    if kind == "hyv":
        config = str(guest.run_dir / "hyv.conf").replace(",", ",,")  # escaped in a value: qemu(1)
        device = f"virtio-hyv-pci,config_path={config}"
        yield QemuArgs("hyv", ("-device", device, "-device", "virtio-rdmacm-pci"))


@hookimpl
def vtorque_pre_boot(job: NodeJob) -> None:
    """Acquire each guest's packet filter (rxe), virtual function (sriov) or configuration (hyv)."""
    for guest in job.guests:
        kind, settings = _backend(guest), job.site[Settings]
        if kind and (support := missing_support(settings, kind)[0]):
            raise HostFault(f"node {guest.job.node} no longer has {support}")
        if kind == "rxe":
            card = _card(guest, settings)
            peers = _peers(guest, settings.network) or (str(card.ip),)
            job.acquire(Fence(card.mac, str(card.ip), peers), guest)
        for vf in _leased_functions(guest, job.site):
            job.acquire(
                Vfio.for_function(_device(vf, guest), guest.qemu_uid, settings.sysfs), guest
            )
            if vf.infiniband:
                job.acquire(VfGuid.for_function(vf, _guid(guest)), guest)
        if kind == "hyv":
            path, content = guest.run_dir / "hyv.conf", _guids(settings).encode()
            job.acquire(File(str(path), 0o400, guest.qemu_uid, content=content), guest)


def _peers(guest: GuestPlan, network: str) -> tuple[str, ...]:
    ips = {ip for name, host, ip in guest.aliases if name == f"{host}-{network}"}
    return tuple(sorted(ips if network else {ip for _, ip in guest.peers if ip}))


def check(site: Site) -> Iterator[HealthResult]:
    """Check for each configured backend whether this node can provide it."""
    for kind in dict.fromkeys(backend.kind for backend in site[Settings].backends):
        what, fix = missing_support(site[Settings], kind)
        said = f"this node lacks {what}" if what else "this node supports it"
        yield HealthResult("warning" if what else "ok", f"backend {kind}: {said}", fix)


vtorque_health_checks = constant_hook(HealthCheck("RDMA", check))
