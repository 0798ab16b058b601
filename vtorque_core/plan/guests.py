"""Plan a job's guests: image, names, shares, claims, context. As root on the node."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import hooks
from vtorque_core.api.acquired import Resource
from vtorque_core.api.batch_system import PeerGuest
from vtorque_core.api.boot_source import BootSource, ColdBoot, Identity
from vtorque_core.api.claims import (
    Claim,
    CoreClaim,
    MemoryClaim,
    Notice,
    Placement,
    PoolClaim,
    RamClaim,
)
from vtorque_core.api.guest_context import ContextItem, EnvVar
from vtorque_core.api.guest_driver import GuestDriver
from vtorque_core.api.guest_plan import GuestPlan, Share
from vtorque_core.api.host_topology import Topology, show_cpus
from vtorque_core.api.libvirt_domain import Disk, Element, MemoryBacking
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.api.vm_options import FS_TYPE, RAM, VCPUS, VMS_PER_NODE
from vtorque_core.base import names
from vtorque_core.base.errors import HostFault, Refusal, Refused
from vtorque_core.config import policy
from vtorque_core.config.job_size import vcpus_on
from vtorque_core.config.site_config import Site
from vtorque_core.images.pool import ramdisk_mib, select_image
from vtorque_core.plan import guest_network, host_ids
from vtorque_core.plan.domain.merge import Contributed, MergedDomain, merge
from vtorque_core.plan.job_context import JobContext
from vtorque_core.plan.placement.model import RAM_USE

_log = logging.getLogger(__name__)

SAVED = "saved-guest"
"""Ledger pool of restored guests' UUIDs, so that no two jobs run the same guest."""


@dataclass(frozen=True)
class PlannedGuest:
    plan: GuestPlan
    driver: GuestDriver
    claims: tuple[Claim, ...]
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class GuestSpec:
    """A placed guest with its domain elements. ``owner``: plugin of the guest type."""

    plan: GuestPlan
    driver: GuestDriver
    owner: str
    contributed: Sequence[Contributed]
    merged: MergedDomain
    items: Sequence[ContextItem]
    resources: tuple[Resource, ...] = ()

    @property
    def environ(self) -> Mapping[str, str]:
        return {item.name: item.value for item in self.items if isinstance(item, EnvVar)}

    @property
    def unless(self) -> Mapping[str, tuple[str, ...]]:
        """Variables of ``environ``, each with the variables that suppress it (:class:`EnvVar`)."""
        found = [item for item in self.items if isinstance(item, EnvVar)]
        return {item.name: item.unless for item in found if item.unless}


def plan_guests(
    context: JobContext, request: JobRequest, arriving: Sequence[BootSource] = ()
) -> list[PlannedGuest]:
    """Return this node's guests with all claims, before placement. Acquires nothing.

    ``arriving`` are boot sources of guests that migrate to this node, in the guests' order.
    """
    site = context.site
    cache = Path(site.images.cache) if site.images.cache else None
    signers = Path(site.images.signers) if site.images.signers else None
    image = select_image(request, site, context.plugins, cache, signers)
    disk = ramdisk_mib(request, image)
    request, notes = policy.resolve(request, site, context.plugins, context.granted, image, disk)
    uids = host_ids.free_uids(site)
    sources = list(arriving)
    require_possible(sources, remote=True)
    if context.machine is not None and not sources:
        sources = _offered_sources(context, request, image)
    guests = []
    for index in range(request[VMS_PER_NODE]):
        guest_type = context.plugins.guest_type(image.guest_type)
        source = sources[index] if sources else ColdBoot()
        plan = _guest(context, request, image, index, source)
        plan = dataclasses.replace(plan, supports=guest_type.supports)
        claims, notices = _claims(context, plan, uids, disk)
        said = map(Notice, () if index else notes)
        guests.append(PlannedGuest(plan, guest_type.driver(), claims, (*said, *notices)))
    return guests


def _offered_sources(context: JobContext, request: JobRequest, image: Image) -> list[BootSource]:
    sources = context.plugins.collect_from_one(
        hooks.vtorque_boot_sources,
        job=context.job, request=request, image=image, user=context.user, site=context.site,
    )  # fmt: skip
    require_possible(sources)
    if sources and len(sources) != request[VMS_PER_NODE]:
        count = len(sources)
        raise Refused(
            f"does not match the boot sources, which have {count} guests per node",
            key=VMS_PER_NODE.key,
            value=str(request[VMS_PER_NODE]),
        )
    return sources


def require_possible(
    sources: Iterable[BootSource], *, adopts: bool = False, remote: bool = False
) -> None:
    """Raise HostFault for a boot source that cannot be used in this step.

    ``adopts``: warm guests are possible. ``remote``: every source must be a migration from another
    node; otherwise, none may be.
    """
    for source in sources:
        problem = ""
        if source.remote != remote:
            problem = "does not come from another node" if remote else "comes from another node"
        elif source.remote and source.fallback:
            problem = (
                "comes from another node and has a fallback: the guest could run on both nodes"
            )
        elif source.warm_key and not adopts:
            problem = "adopts a warm guest before the guests are rendered"
        if problem:
            raise HostFault(f"boot source {source.name} {problem}", stage="plan")


def _guest(
    context: JobContext, request: JobRequest, image: Image, index: int, source: BootSource
) -> GuestPlan:
    job, site = context.job, context.site
    count = request[VMS_PER_NODE]
    attempt = context.attempt
    name = names.guest_name(job.id, job.attempt, job.node, index)
    uuid, hostname = names.guest_uuid(name), names.guest_hostname(job.node, index, count)
    known = source.identity or Identity(name, uuid, hostname, job.id, job.attempt, ())
    return GuestPlan(
        job=attempt,
        index=index,
        rank=job.node_index * count + index,
        guests_per_node=count,
        name=known.name,
        uuid=known.uuid,
        hostname=known.hostname,
        source=source,
        vcpus=request[VCPUS],
        ram_mib=request[RAM],
        image=image,
        user=context.user,
        request=request,
        addresses=(),
        peers=(),
        state_dir=site.paths.job_state(attempt.key) / f"g{index}",
        run_dir=site.paths.job_run(attempt.key) / f"g{index}",
        secret=names.derive(context.secret, "job", known.job_id, known.attempt),
        shares=_shares(context, request, image),
        ntp=tuple(site.network.ntp),
        granted=job.granted,
        host=context.machine or Topology(),
    )


def _shares(context: JobContext, request: JobRequest, image: Image) -> tuple[Share, ...]:
    user = context.user
    known = {"user": user.name, "home": user.home, "uid": str(user.uid), "job": context.job.id}
    found = tuple(
        Share(
            name=name,
            source=_expand(share.source, known),
            target=_expand(share.target, known),
            kind=share.kind,
            readonly=share.readonly,
            user_owned=share.user_owned,
        )
        for name, share in context.site.shares.items()
    )
    if not image.source:
        return found
    own = policy.own_images(image.source, context.plugins)
    return tuple(own.shares(request, user.home, found))


def _expand(text: str, known: dict[str, str]) -> str:
    for word, value in known.items():
        text = text.replace("{" + word + "}", value)
    return text


def _claims(
    context: JobContext, guest: GuestPlan, uids: tuple[str, ...], disk: int
) -> tuple[tuple[Claim, ...], tuple[Notice, ...]]:
    job, site = context.job, context.site
    claims: list[Claim] = [
        CoreClaim("vcpu", guest.vcpus),
        MemoryClaim(guest.ram_mib, use=RAM_USE),
        MemoryClaim(site.node.qemu_overhead, use="emulator"),
    ]
    if disk:
        claims.append(MemoryClaim(disk, use="ramdisk", key=FS_TYPE.key))
    if (known := guest.source.identity) is None:
        claims += guest_network.claims(site, job, guest.guests_per_node, guest.index)
    else:
        claims += guest_network.keep_addresses(site, job, guest, known.leased)
        claims.append(PoolClaim(SAVED, (guest.uuid,)))
    claims += host_ids.claims(guest, uids)
    refusals, notices = [], []
    for contribution in context.plugins.collect(hooks.vtorque_plan, guest=guest, site=site):
        if isinstance(contribution.item, Refusal):
            refusals.append(contribution.item)
        elif isinstance(contribution.item, Notice):
            notices.append(contribution.item)
        else:
            claims.append(contribution.item)
    if refusals:
        raise Refused(*refusals)
    return tuple(claims), tuple(notices)


def distance_notices(planned: PlannedGuest, placement: Placement) -> list[Notice]:
    return [
        Notice(
            f"{claim.advisor} advised NUMA node {show_cpus(claim.near)}; guest "
            f"{planned.plan.index} is on {show_cpus(placement.nodes)}, which has free resources"
        )
        for claim in planned.claims
        if isinstance(claim, RamClaim)
        and claim.near
        and not set(placement.nodes) <= set(claim.near)
    ]


def placement_notices(
    planned: Sequence[PlannedGuest], placements: Sequence[Placement]
) -> list[Notice]:
    notices = [notice for one in planned for notice in one.notices]
    for one, at in zip(planned, placements, strict=True):
        notices += distance_notices(one, at)
    return notices


def log_plan(guests: Sequence[GuestPlan], notices: Sequence[Notice]) -> None:
    for notice in notices:
        _log.warning("%s", notice.text)
    for guest in guests:
        address = next((each.ip for each in guest.addresses if each.ip), "none")
        _log.info(
            "%s: image %s, %d vCPUs on cores %s, %d MiB, address %s",
            *(guest.hostname, guest.image.name, guest.vcpus),
            " ".join(str(core) for core in guest.placement.cores.get("vcpu", ())) or "any",
            *(guest.ram_mib, address),
            extra={"guest": guest.index},
        )


def place_guests(
    context: JobContext, planned: Sequence[PlannedGuest], placements: Sequence[Placement]
) -> list[GuestPlan]:
    site = context.site
    guests = [
        dataclasses.replace(one.plan, placement=at)
        for one, at in zip(planned, placements, strict=True)
    ]
    addressed = guest_network.assign_addresses(site, context.job, context.secret, guests)
    return [
        dataclasses.replace(guest, qemu_uid=host_ids.guest_uid(guest, site)) for guest in addressed
    ]


def peer_guests(context: JobContext, guests: Sequence[GuestPlan]) -> list[PeerGuest]:
    """Return all guests of the job in rank order.

    With ``vcpus=job``, the vCPUs of a guest follow the job's number of CPUs on the guest's node.
    """
    job, site, plugins = context.job, context.site, context.plugins
    first = guests[0]
    request, count = first.request, first.guests_per_node
    sizes = [first.vcpus] * len(job.nodes)
    if VCPUS.key in request.of_job and len(job.cpu_counts) == len(job.nodes):
        sizes = [
            first.vcpus if cpus == job.cpu_count else vcpus_on(request, site, plugins, cpus)
            for cpus in job.cpu_counts
        ]
    return [
        PeerGuest(names.guest_hostname(node, index, count), size, first.ram_mib)
        for node, size in zip(job.nodes, sizes, strict=True)
        for index in range(count)
    ]


def prepare_guests(
    context: JobContext,
    guests: Sequence[GuestPlan],
    planned: Sequence[PlannedGuest],
    of_batch: Callable[[Sequence[PeerGuest]], Iterable[ContextItem]] = lambda _: (),
) -> list[GuestSpec]:
    """Collect the domain elements and context items (files, commands) of the placed guests.

    ``of_batch`` returns those of the batch system.
    """
    peers = peer_guests(context, guests)
    batch, prepared = tuple(of_batch(peers)), []
    hostnames, slots = zip(*((peer.hostname, peer.slots) for peer in peers), strict=True)
    for placed_guest, driver in zip(guests, (one.driver for one in planned), strict=True):
        guest = dataclasses.replace(placed_guest, hostnames=hostnames, slots=slots)
        items = context_of(context, guest, driver, batch)
        contributed = domain_contributions(context, guest, driver)
        owner = context.plugins.plugin_of_guest_type(guest.image.guest_type)
        merged = merge(contributed)
        prepared.append(GuestSpec(guest, driver, owner, contributed, merged, items))
    return prepared


def context_of(
    context: JobContext, guest: GuestPlan, driver: GuestDriver, batch: Sequence[ContextItem] = ()
) -> list[ContextItem]:
    """Return all context items of a guest, including those of the batch system (``batch``).

    Raises Refused if the guest type does not support an item.
    """
    site, plugins = context.site, context.plugins
    items: list[ContextItem] = [
        EnvVar("VTORQUE_JOBID", guest.job.id),
        EnvVar("VTORQUE_RANK", str(guest.rank)),
        *batch,
        *driver.context(guest, site),
    ]
    for contribution in plugins.collect(hooks.vtorque_guest_context, guest=guest, site=site):
        kind = type(contribution.item).__name__
        if kind not in guest.supports:
            raise Refused(
                f"plugin {contribution.plugin} needs {kind} in the guest; guest type "
                f"{guest.image.guest_type} of image {guest.image.name} does not support it",
                fix="choose another image, or drop the option that needs it",
            )
        items.append(contribution.item)
    return items


def domain_contributions(
    context: JobContext, guest: GuestPlan, driver: GuestDriver
) -> list[Contributed]:
    site, plugins = context.site, context.plugins
    owner = plugins.plugin_of_guest_type(guest.image.guest_type)
    found = [Contributed("core", "vtorque-core", e) for e in _core_elements(guest, site)]
    found += [
        Contributed(owner, plugins.distributions[owner], e) for e in driver.elements(guest, site)
    ]
    found += [
        Contributed(c.plugin, c.distribution, c.item)
        for c in plugins.collect(hooks.vtorque_render_domain, guest=guest, site=site)
    ]
    return found


def _core_elements(guest: GuestPlan, site: Site) -> Iterator[Element]:
    image = guest.image
    if image.disk is not None:
        yield Disk(
            "root",
            path=str(guest.root_disk),
            format="qcow2",
            serial="vtroot",
            boot=None if image.kernel else 1,
            base=None if has_copied_disk(guest, site) else str(image.disk),
            base_format=image.disk_format,
        )
    yield from guest_network.interfaces(site, guest)
    if guest.placement.page_kib is not None:  # memfd needs no hugetlbfs mounted, memfd_create(2)
        yield MemoryBacking(hugepages_kib=guest.placement.page_kib, source="memfd")


def has_copied_disk(guest: GuestPlan, site: Site) -> bool:
    return guest[FS_TYPE] == "ramdisk" and site.images.ramdisk == "copy"
