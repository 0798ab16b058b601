"""PCIe passthrough on the node: find the site's cards, lease them, hand them to the guest.

A card is an IOMMU group: hardware cannot keep its functions apart, so one guest gets all of them.
They are bound to VFIO before the domain starts, and reset after it has ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from vtorque_core.api import HostFault, Refusal, always, hookimpl, setting
from vtorque_core.api.claims import Claim, Notice, PoolClaim
from vtorque_core.api.guest_context import GuestDevice
from vtorque_core.api.guest_plan import GuestPlan, lacks
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_passthrough.pci_functions import SYSFS, PciFunction, functions, together, why_no_vfio
from vtorque_passthrough.plugin import CLASS, PCI, cards
from vtorque_passthrough.vfio import PciDevice, Vfio

POOL = "pci"  # one for all classes: a card that two of them describe is leased once
CLASSES = "[plugin.passthrough] classes"


@dataclass(frozen=True)
class CardClass:
    """One ``[[plugin.passthrough.classes]]``.

    Args:
        name: what users write.
        ids: ``vendor:device`` of its functions, as ``lspci -nn`` shows them.
        addresses: globs of the PCI addresses that may be given away.
        most: cards for one guest, 0: as many as the node has.
        allow_no_reset: also cards that the kernel cannot reset between two jobs.
        device: glob of the device nodes that the guest's driver makes below /dev, which the job's
            user then owns: the n-th is /dev/vtorque/<name><n>.
    """

    name: str
    ids: tuple[str, ...]
    addresses: tuple[str, ...] = ("*",)
    most: int = 0
    allow_no_reset: bool = False
    device: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(CLASS, self.name, re.ASCII):
            raise ValueError(f"name is {self.name!r}: write a small letter, then a-z 0-9 _ -")
        for ident in self.ids:
            if not re.fullmatch("[0-9a-f]{4}:[0-9a-f]{4}", ident, re.ASCII):
                raise ValueError(f"{self.name}: {ident!r} is not vendor:device like 10de:20b0")

    def has(self, function: PciFunction) -> bool:
        """Return whether a function belongs to this class."""
        places = (fnmatchcase(function.address, glob) for glob in self.addresses)
        return function.ident in self.ids and any(places)


@dataclass(frozen=True)
class Settings:
    """``[plugin.passthrough]``."""

    classes: tuple[CardClass, ...] = setting(
        (),
        doc='what jobs may have: [[plugin.passthrough.classes]] name = "gpu", ids = ["10de:20b0"]',
    )
    required: bool = setting(
        True, doc="refuse a job whose cards the node lacks; false: run without"
    )
    sysfs: str = setting(SYSFS, doc="where sysfs is (for tests)")


@dataclass(frozen=True)
class Card:
    """All functions of one IOMMU group but bridges, leased by the first one's address.

    ``classes``: all that its functions are of, as the site orders them. Users have it by the first
    one's name and limits only, else they would get the GPU through the class of its sound card.
    """

    functions: tuple[PciFunction, ...]
    classes: tuple[CardClass, ...]

    @property
    def name(self) -> str:
        """The class by which users ask for it."""
        return self.classes[0].name

    @property
    def item(self) -> str:
        """What the ledger knows it by."""
        return self.functions[0].address

    def must_reset(self, function: PciFunction) -> bool:
        """Return whether the site wants this function reset between two jobs."""
        return not any(c.allow_no_reset for c in self.classes if c.has(function))

    @property
    def problem(self) -> str:
        """Return why no guest can have it; empty: one can."""
        for f in self.functions:
            if not f.group:
                return f"{f.address} is in no IOMMU group"
            if not any(c.has(f) for c in self.classes):
                return f"IOMMU group {f.group} also has {f.address}, {f.ident}, of no class"
            if f.used:
                return f"{f.address}: {f.used}"
            if self.must_reset(f) and not f.resets:
                return f"{f.address} cannot be reset, and no class of it says allow_no_reset"
        return ""


def find_cards(settings: Settings) -> dict[str, Card]:
    """Return the node's cards that have a function of any class, by what they are leased as."""
    everything = functions(settings.sysfs).values()
    found = {}
    for function in everything:
        if not function.bridge and any(c.has(function) for c in settings.classes):
            group = together(everything, function.group) if function.group else (function,)
            mine = tuple(c for c in settings.classes if any(c.has(f) for f in group))
            found[group[0].address] = Card(group, mine)
    return found


vtorque_settings = always(Settings)
vtorque_resources = always(Vfio)


@hookimpl
def vtorque_plan(guest: GuestPlan, site: Site) -> Iterator[Claim | Refusal | Notice]:
    """Claim as many cards of each class as the user wants, or say why the node has them not."""
    wanted, settings = cards(guest[PCI]), site[Settings]
    refusals = [r for name, n in wanted.items() for r in _refused(name, n, guest, settings)]
    if refusals or not wanted or not guest.host.nodes:  # without nodes: a front end
        yield from refusals
        return
    found = find_cards(settings).values()
    claims = []
    for name, number in wanted.items():
        of_class = [card for card in found if card.name == name]
        free = {card.item: card.functions[0].numa for card in of_class if not card.problem}
        if len(free) < number:
            why = "".join(f"; {card.problem}" for card in of_class if card.problem)
            missing = why_no_vfio(settings.sysfs) if of_class else ""
            yield lacks(
                guest,
                f"{number} PCI cards of class {name} for guests (usable: {len(free)}{why})",
                option=PCI,
                required=settings.required,
                where="[plugin.passthrough] required",
                fix=f"it needs {missing}" if missing else "ask for fewer, or for another node",
            )
            return
        near = {item: node for item, node in free.items() if node >= 0}
        claims.append(PoolClaim(POOL, tuple(free), number, near, PCI.key))
    yield from claims


def _refused(name: str, number: int, guest: GuestPlan, settings: Settings) -> Iterator[Refusal]:
    known = {c.name: c for c in settings.classes}
    if name not in known:
        names = ", ".join(known) or "none"
        yield Refusal(f"there is no class {name}", PCI.key, guest[PCI], names, CLASSES)
    elif known[name].most and number > known[name].most:
        most = f"{known[name].most} for each guest"
        yield Refusal(f"too many of {name}", PCI.key, guest[PCI], most, f"{CLASSES}, most")


@hookimpl
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterator[PciDevice]:
    """Yield all functions of the leased cards."""
    found = find_cards(site[Settings]) if guest.leased(POOL) else {}
    for item in guest.leased(POOL):
        card = found.get(item)
        if card is None or card.problem:
            raise HostFault(f"PCI card {item}: {card.problem if card else 'has gone'}")
        for f in card.functions:
            name = re.sub("[:.]", "-", f.address)
            yield PciDevice(name, f.address, must_reset=card.must_reset(f))


@hookimpl
def vtorque_pre_boot(job: NodeJob) -> None:
    """Bind all functions of the leased cards to VFIO, for QEMU's user to open."""
    for guest in job.guests:
        for device in list(vtorque_render_domain(guest, job.site)):
            job.acquire(Vfio.of(device, guest.qemu_uid, job.site[Settings].sysfs), guest)


@hookimpl
def vtorque_guest_context(guest: GuestPlan, site: Site) -> Iterator[GuestDevice]:
    """Yield the device nodes of the cards, for the job's user."""
    wanted = cards(guest[PCI]) if guest.leased(POOL) else {}
    for of in (c for c in site[Settings].classes if c.device):
        for nth in range(wanted.get(of.name, 0)):
            yield GuestDevice(of.device, f"/dev/vtorque/{of.name}{nth}", nth)


def check(site: Site) -> Iterator[HealthResult]:
    """Say whether the node can give its cards away, and which it cannot."""
    settings = site[Settings]
    found = find_cards(settings)
    missing = why_no_vfio(settings.sysfs)
    if not found:
        yield HealthResult("ok", f"no card of any class of {CLASSES} is on this node")
    elif missing:
        yield HealthResult("failed", "guests can have no PCI card", fix=f"it needs {missing}")
    for item, card in found.items():
        about = f"{item} ({card.name}, IOMMU group {card.functions[0].group or 'none'})"
        if card.problem:
            yield HealthResult("warning", f"{about}: {card.problem}", fix=f"see {CLASSES}")
        else:
            yield HealthResult("ok", f"{about}: guests can have it")


vtorque_health_checks = always(HealthCheck("PCI cards", check))
