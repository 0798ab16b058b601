"""PCIe passthrough on the node: find the site's cards, lease them, and assign them to guests.

A card is an IOMMU group. Hardware cannot isolate the PCI functions of a group from each other, so
one guest gets all of them. The functions are bound to vfio-pci before the domain starts, and reset
after the domain has ended.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from vtorque_core.api import HostFault, Refusal, Refused, constant_hook, hookimpl
from vtorque_core.api.batch_system import Grant
from vtorque_core.api.claims import Claim, Notice, PoolClaim
from vtorque_core.api.guest_context import GuestDevice
from vtorque_core.api.guest_plan import GuestPlan, report_missing
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_passthrough import plugin
from vtorque_passthrough.device_files import function_of_file
from vtorque_passthrough.pci_functions import PciFunction, functions, group_of, why_no_vfio
from vtorque_passthrough.plugin import CLASSES, PCI, CardClass, Settings, cards
from vtorque_passthrough.vfio import PciDevice, Vfio

POOL = "pci"  # one pool for all classes: a card of two classes is leased once
WHERE = "[plugin.passthrough] required"


def is_in_class(of: CardClass, function: PciFunction) -> bool:
    """Return whether a PCI function belongs to a card class."""
    places = (fnmatchcase(function.address, glob) for glob in of.addresses)
    return function.ident in of.ids and any(places)


@dataclass(frozen=True)
class CardGroup:
    """A card: all functions of one IOMMU group except bridges.

    ``classes`` lists the classes of all functions, in the site's order. Users can request the card
    only by the first class. Otherwise they could get a GPU by the class of the GPU's sound
    function.
    """

    functions: tuple[PciFunction, ...]
    classes: tuple[CardClass, ...]

    @property
    def name(self) -> str:
        """The class by which users request the card."""
        return self.classes[0].name

    @property
    def item(self) -> str:
        """The card's name in leases."""
        return self.functions[0].address

    @property
    def addresses(self) -> frozenset[str]:
        """The PCI addresses of the card's functions."""
        return frozenset(f.address for f in self.functions)

    def must_reset(self, function: PciFunction) -> bool:
        """Return whether the site requires a reset of this PCI function between two jobs."""
        return not any(c.allow_no_reset for c in self.classes if is_in_class(c, function))

    @property
    def problem(self) -> str:
        """The reason why no guest can have the card, or an empty string."""
        for f in self.functions:
            if not f.group:
                return f"{f.address} has no IOMMU group"
            mine = [c for c in self.classes if is_in_class(c, f)]
            if not mine:
                return (
                    f"IOMMU group {f.group} also contains {f.address}, {f.ident}, without a class"
                )
            if f.host_use:
                return f"{f.address}: {f.host_use}"
            if f.host_driver and any(c.resource and not c.files for c in mine):
                return (
                    f"{f.address} is bound to the host's driver {f.driver}, so jobs without "
                    "guests may use it: bind it to vfio-pci at boot, or set files in its class"
                )
            if self.must_reset(f) and not f.resets:
                return f"{f.address} cannot be reset, and its classes do not set allow_no_reset"
        return ""


def find_cards(settings: Settings) -> dict[str, CardGroup]:
    """Return this node's cards that belong to the site's card classes.

    A card belongs to a class if one of its PCI functions does. The keys are the cards' names in
    leases.
    """
    everything = functions(settings.sysfs).values()
    found = {}
    for function in everything:
        if not function.bridge and any(is_in_class(c, function) for c in settings.classes):
            group = group_of(everything, function.group) if function.group else (function,)
            mine = tuple(c for c in settings.classes if any(is_in_class(c, f) for f in group))
            found[group[0].address] = CardGroup(group, mine)
    return found


vtorque_resources = constant_hook(Vfio)


@hookimpl
def vtorque_plan(guest: GuestPlan, site: Site) -> Iterator[Claim | Refusal | Notice]:
    """Claim the requested number of cards of each class, or report why the node lacks them."""
    wanted, settings = cards(guest[PCI]), site[Settings]
    if not wanted or not guest.host.nodes:  # no nodes: a submit host
        return
    if refusals := list(_grant_refusals(guest, site)):
        yield from refusals
        return
    found = find_cards(settings).values()
    claims = []
    for kind in (c for c in settings.classes if c.name in wanted):
        number = wanted[kind.name]
        of_class = [c for c in _cards_of(kind, guest, found, settings.sysfs) if c.name == kind.name]
        free = {card.item: card.functions[0].numa for card in of_class if not card.problem}
        if len(free) < number:
            why = "".join(f"; {card.problem}" for card in of_class if card.problem)
            lack = f"{number} PCI cards of class {kind.name} for guests (usable: {len(free)}{why})"
            if kind.resource and guest.granted is not None:
                raise _fault(f"{guest.job.node} has no {lack}; the job holds {kind.resource}", why)
            missing = why_no_vfio(settings.sysfs) if of_class else ""
            fix = f"it lacks {missing}" if missing else "request fewer cards, or another node"
            yield report_missing(guest, lack, option=PCI, required=settings.required,
                                 where=WHERE, fix=fix)  # fmt: skip
            return
        near = {item: node for item, node in free.items() if node >= 0}
        claims.append(PoolClaim(POOL, tuple(free), number, near, PCI.key))
    yield from claims


def _grant_refusals(guest: GuestPlan, site: Site) -> Iterator[Refusal]:
    """Yield a refusal for each resource of which the batch system granted too little."""
    needed = Counter[str]()
    for extra in plugin.vtorque_needs(guest.request, site):
        needed.update(extra.resources)
    for resource, need in needed.items():
        given = need if guest.granted is None else guest.granted.get(resource, Grant(0)).count
        if given < need:
            said = f"guests of node {guest.job.node} need {need} {resource}, but the batch system"
            fix = "submit with vsub, which requests unshared cards, and do not change the request"
            yield Refusal(f"{said} granted the job {given}", PCI.key, guest[PCI], fix=fix)


def _cards_of(
    kind: CardClass, guest: GuestPlan, found: Collection[CardGroup], sysfs: str
) -> Collection[CardGroup]:
    if guest.granted is None or not kind.files:
        return found
    grant = guest.granted.get(kind.resource, Grant(0))
    if len(grant.devices) < grant.count:
        raise Refused(
            f"the batch system does not report which {kind.resource} of node {guest.job.node} "
            "are exclusive to this job: request whole cards, or ask the administrator"
        )
    numbers = {function_of_file(file, sysfs): n for n, file in reversed([*enumerate(kind.files)])}
    at = {number: address for address, number in numbers.items() if address}
    device = f"{kind.resource} of node {guest.job.node}: number"
    mine = []
    for number in grant.devices:
        if (card := next((c for c in found if at.get(number) in c.addresses), None)) is None:
            raise _fault(f"{device} {number} ('files' of class {kind.name}) is not a known card")
        if others := {numbers[a] for a in card.addresses & numbers.keys()} - set(grant.devices):
            raise _fault(f"{device} {number} shares its IOMMU group with number {min(others)}")
        mine.append(card)
    return mine


def _fault(message: str, broken: str = "") -> HostFault:
    """Return a HostFault that blames the node only if cards are broken.

    A lack of cards may have other reasons: the batch system may count several classes as one
    resource, or the user may have requested too little of the batch system's resource.
    """
    fault = HostFault(message)
    fault.blames_node = bool(broken)
    return fault


@hookimpl
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterator[PciDevice]:
    """Yield all PCI functions of the leased cards."""
    found = find_cards(site[Settings]) if guest.leased_items(POOL) else {}
    for item in guest.leased_items(POOL):
        card = found.get(item)
        if card is None or card.problem:
            raise HostFault(f"PCI card {item}: {card.problem if card else 'is missing'}")
        for f in card.functions:
            name = re.sub("[:.]", "-", f.address)
            yield PciDevice(name, f.address, must_reset=card.must_reset(f))


@hookimpl
def vtorque_pre_boot(job: NodeJob) -> None:
    """Bind all PCI functions of the leased cards to VFIO, and give QEMU's user access."""
    for guest in job.guests:
        for device in list(vtorque_render_domain(guest, job.site)):
            job.acquire(Vfio.for_function(device, guest.qemu_uid, job.site[Settings].sysfs), guest)


@hookimpl
def vtorque_guest_context(guest: GuestPlan, site: Site) -> Iterator[GuestDevice]:
    """Yield links ``/dev/vtorque/<class><n>`` to the device nodes of the guest's cards."""
    wanted = cards(guest[PCI]) if guest.leased_items(POOL) else {}
    for of in (c for c in site[Settings].classes if c.device):
        for nth in range(wanted.get(of.name, 0)):
            yield GuestDevice(of.device, f"/dev/vtorque/{of.name}{nth}", nth)


def check(site: Site) -> Iterator[HealthResult]:
    """Report which cards of the node are available to guests, and why other cards are not."""
    settings = site[Settings]
    found = find_cards(settings)
    missing = why_no_vfio(settings.sysfs)
    if not found:
        yield HealthResult("ok", f"no card of the classes in {CLASSES} is on this node")
    elif missing:
        yield HealthResult("failed", "guests cannot use PCI cards", fix=f"it lacks {missing}")
    for item, card in found.items():
        about = f"{item} ({card.name}, IOMMU group {card.functions[0].group or 'none'})"
        if card.problem:
            yield HealthResult("warning", f"{about}: {card.problem}", fix=f"see {CLASSES}")
        else:
            yield HealthResult("ok", f"{about}: available to guests")
    for of in settings.classes:
        for number, file in enumerate(of.files):
            if address := function_of_file(file, settings.sysfs):
                yield HealthResult("ok", f"{of.resource} number {number} is {address} ({file})")


vtorque_health_checks = constant_hook(HealthCheck("PCI cards", check))
