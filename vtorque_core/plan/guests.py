"""Plan a job's guests: image, names, shares, claims, context. As root on the node.

Acquires nothing.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import hooks
from vtorque_core.api.acquired import Resource
from vtorque_core.api.batch_system import BatchJob, PeerGuest
from vtorque_core.api.boot_source import BootSource, Identity
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
from vtorque_core.api.guest_plan import GuestPlan, JobUser, Share, root_disk
from vtorque_core.api.host_topology import Topology
from vtorque_core.api.libvirt_domain import Disk, Element, MemoryBacking
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.api.vm_options import ARCH, DISTRO, FS_TYPE, IMG, RAM, VCPUS, VMS_PER_NODE
from vtorque_core.base import names
from vtorque_core.base.errors import ConfigError, HostFault, Refusal, Refused
from vtorque_core.base.trust import require_secret
from vtorque_core.images import pool, signature
from vtorque_core.images.pool import ramdisk_mib
from vtorque_core.plan import boot_sources, guest_network, guest_uids, subordinate_ids
from vtorque_core.plan.domain.merge import Contributed, MergedDomain, merge
from vtorque_core.plan.placement import job_cores, node_hardware
from vtorque_core.plan.placement.demand import RAM_USE
from vtorque_core.plan.placement.topology import show_cpus
from vtorque_core.site import policy
from vtorque_core.site.config import Site
from vtorque_core.site.job_limits import groups_of
from vtorque_core.site.job_size import Granted
from vtorque_core.site.plugins import Plugins

SAVED = "saved-guest"
"""The ledger's pool of guests with an identity from before: a lease of the UUID, so that no two
jobs have one at the same time."""


def load_secret(path: Path) -> bytes:
    """Return the site secret. Raises HostFault if missing, short, or readable by others."""
    try:
        require_secret(path, os.geteuid())
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (ConfigError, OSError) as error:
        raise HostFault(f"site secret: {error}; run vtorque setup install") from None
    with os.fdopen(descriptor, "rb") as file:
        secret = file.read(4096)
    if len(secret) < 32:
        raise HostFault(f"site secret {path} has {len(secret)} bytes; it needs 32 or more")
    return secret


@dataclass(frozen=True)
class PlannedGuest:
    """A guest with its driver, its claims and notices."""

    plan: GuestPlan
    driver: GuestDriver
    claims: tuple[Claim, ...]
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A placed guest with its domain elements and driver.

    ``owner`` is the plugin of its guest type.
    """

    plan: GuestPlan
    driver: GuestDriver
    owner: str
    contributed: Sequence[Contributed]
    merged: MergedDomain
    items: Sequence[ContextItem]
    resources: tuple[Resource, ...] = ()

    @property
    def environ(self) -> Mapping[str, str]:
        """Variables among its context items."""
        return {item.name: item.value for item in self.items if isinstance(item, EnvVar)}

    @property
    def unless(self) -> Mapping[str, tuple[str, ...]]:
        """For each variable, the user's variables that replace it."""
        found = [item for item in self.items if isinstance(item, EnvVar)]
        return {item.name: item.unless for item in found if item.unless}


def job_user(name: str, site: Site) -> JobUser:
    """Return the job's owner from this node's user database.

    Raises HostFault for an unknown user, Refused for root.
    """
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise HostFault(f"user {name!r} is unknown on this node") from None
    if entry.pw_uid == 0:
        raise Refused("jobs of root do not run in guests; submit as an ordinary user")
    ids = (name, entry.pw_uid, site.node.subordinate_ids)
    return JobUser(
        name=entry.pw_name,
        uid=entry.pw_uid,
        gid=entry.pw_gid,
        groups=groups_of(name, entry.pw_gid),
        home=entry.pw_dir,
        shell=entry.pw_shell or "/bin/sh",
        subordinate_id=0 if site.owner else subordinate_ids.of_user(*ids),
    )


def attempt_of(job: BatchJob, user: JobUser) -> names.JobAttempt:
    return names.JobAttempt(job.id, job.attempt, user.name, user.uid, job.node)


def node_share(job: BatchJob, site: Site) -> job_cores.NodeShare:
    return job_cores.NodeShare(
        machine=node_hardware.topology(site.node.libvirt_uri),
        cpus=job.cpus,
        cpu_count=job.cpu_count,
        mem_mib=job.mem_mib,
        reserve_cores=site.node.host_reserve_cores,
        reserve_mib=site.node.host_reserve_ram,
        exclusive=site.node.exclusive and not (job.whole_node or job.whole_user),
        whole_node=job.whole_node,
        numa=None if site.node.numa == "none" else site.node.numa,
    )


def plan_guests(
    job: BatchJob,
    request: JobRequest,
    site: Site,
    plugins: Plugins,
    user: JobUser,
    site_secret: bytes,
    machine: Topology | None = None,
    granted: Granted = Granted(),  # noqa: B008 (frozen)
    arriving: Sequence[BootSource] = (),
) -> list[PlannedGuest]:
    """Return this node's guests with all claims, before placement.

    On a submit host, ``machine`` is None and ``granted`` has the resources per node. ``arriving``
    are sources of guests that migrate to this node, in order. Raises Refused if this node can never
    satisfy the request, otherwise HostFault.
    """
    cache = Path(site.images.cache) if site.images.cache else None
    accept = signature.acceptor(site.images.signers)
    wanted = (request[IMG], request[DISTRO], request[ARCH])
    image = pool.select(site.images.pool, *wanted, cache, accept)
    ram = image.disk is not None and request[FS_TYPE] == "ramdisk"
    disk = ramdisk_mib(image.disk) if ram and image.disk else 0
    request, notes = policy.settle(request, site, plugins, granted, image, disk)
    guest_type = plugins.guest_type(image.guest_type)
    driver = guest_type.driver()
    secret = names.derive(site_secret, "job", job.id, job.attempt)
    count, uids = request[VMS_PER_NODE], guest_uids.free(site)
    sources = list(arriving)
    boot_sources.require_possible(sources, remote=True)
    if machine is not None and not sources:
        sources = boot_sources.offered(job, request, site, plugins, user, image)
    guests = []
    for index in range(count):
        plan = _guest(job, request, site, user, image, secret, index)
        if sources:
            plan = boot_sources.with_source(plan, sources[index], site_secret)
        plan = dataclasses.replace(plan, host=machine or Topology(), supports=guest_type.supports)
        claims, notices = _claims(plan, job, site, plugins, uids, disk)
        said = map(Notice, () if index else notes)
        guests.append(PlannedGuest(plan, driver, claims, (*said, *notices)))
    return guests


def _guest(
    job: BatchJob,
    request: JobRequest,
    site: Site,
    user: JobUser,
    image: Image,
    secret: bytes,
    index: int,
) -> GuestPlan:
    count = request[VMS_PER_NODE]
    attempt = attempt_of(job, user)
    name = names.guest_name(job.id, job.attempt, job.node, index)
    return GuestPlan(
        job=attempt,
        index=index,
        rank=job.node_index * count + index,
        guests_per_node=count,
        name=name,
        uuid=names.guest_uuid(name),
        hostname=names.guest_hostname(job.node, index, count),
        vcpus=request[VCPUS],
        ram_mib=request[RAM],
        image=image,
        user=user,
        request=request,
        addresses=(),
        peers=(),
        state_dir=site.paths.job_state(attempt.key) / f"g{index}",
        run_dir=site.paths.job_run(attempt.key) / f"g{index}",
        secret=secret,
        shares=_shares(job, site, user),
        ntp=tuple(site.network.ntp),
        granted=job.granted,
    )


def _shares(job: BatchJob, site: Site, user: JobUser) -> tuple[Share, ...]:
    known = {"user": user.name, "home": user.home, "uid": str(user.uid), "job": job.id}
    return tuple(
        Share(
            name=name,
            source=_expand(share.source, known),
            target=_expand(share.target, known),
            kind=share.kind,
            readonly=share.readonly,
            user_owned=share.user_owned,
        )
        for name, share in site.shares.items()
    )


def _expand(text: str, known: dict[str, str]) -> str:
    for word, value in known.items():
        text = text.replace("{" + word + "}", value)
    return text


def _claims(
    guest: GuestPlan,
    job: BatchJob,
    site: Site,
    plugins: Plugins,
    uids: tuple[str, ...],
    disk: int,
) -> tuple[tuple[Claim, ...], tuple[Notice, ...]]:
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
        claims += _same_addresses(guest, known, job, site)
        claims.append(PoolClaim(SAVED, (guest.uuid,)))
    claims += guest_uids.claims(guest, uids)
    refusals, notices = [], []
    for contribution in plugins.collect(hooks.vtorque_plan, guest=guest, site=site):
        if isinstance(contribution.item, Refusal):
            refusals.append(contribution.item)
        elif isinstance(contribution.item, Notice):
            notices.append(contribution.item)
        else:
            claims.append(contribution.item)
    if refusals:
        raise Refused(*refusals)
    return tuple(claims), tuple(notices)


def _same_addresses(
    guest: GuestPlan, known: Identity, job: BatchJob, site: Site
) -> Iterator[PoolClaim]:
    had = dict(known.leased)
    now = {c.pool: c for c in guest_network.claims(site, job, guest.guests_per_node, guest.index)}
    for each in {**now, **had}:
        both = each in had and each in now
        if not both or not guest_network.gives(site, now[each], had[each]):
            raise Refused(
                f"the guest that was saved has the address {had.get(each, 'none')} "
                f"({each}), which this site gives no guest any more"
            )
        yield PoolClaim(each, (had[each],))


def not_near(planned: PlannedGuest, placement: Placement) -> list[Notice]:
    """Return notices about advised NUMA nodes (:class:`RamClaim`) that were not available."""
    return [
        Notice(
            f"{claim.advisor} advised NUMA node {show_cpus(claim.near)}; guest "
            f"{planned.plan.index} is on {show_cpus(placement.nodes)}, which the ledger had free"
        )
        for claim in planned.claims
        if isinstance(claim, RamClaim)
        and claim.near
        and not set(placement.nodes) <= set(claim.near)
    ]


def placed(
    planned: Sequence[PlannedGuest],
    placements: Sequence[Placement],
    job: BatchJob,
    site: Site,
    site_secret: bytes,
) -> list[GuestPlan]:
    """Return the placed guests with names, NICs and addresses."""
    guests = [
        dataclasses.replace(one.plan, placement=at)
        for one, at in zip(planned, placements, strict=True)
    ]
    peers = guest_network.peers(site, job, guests)
    aliases = guest_network.aliases(site, job, guests)
    bare = tuple(
        dataclasses.replace(node, address=guest_network.node_address(node.name))
        for node in job.bare
    )
    return [
        dataclasses.replace(
            guest,
            addresses=tuple(guest_network.addresses(site, site_secret, guest)),
            qemu_uid=guest_uids.of_guest(guest, site),
            peers=peers,
            aliases=aliases,
            bare=bare,
        )
        for guest in guests
    ]


def peer_guests(
    guests: Sequence[GuestPlan], job: BatchJob, site: Site, plugins: Plugins
) -> list[PeerGuest]:
    """Return all guests of the job in rank order.

    With ``vcpus=job``, sizes follow each node's number of CPUs.
    """
    first = guests[0]
    request, count = first.request, first.guests_per_node
    sizes = [first.vcpus] * len(job.nodes)
    if VCPUS.key in request.of_job and len(job.cpu_counts) == len(job.nodes):
        sizes = [
            first.vcpus if cpus == job.cpu_count else policy.vcpus_on(request, site, plugins, cpus)
            for cpus in job.cpu_counts
        ]
    return [
        PeerGuest(names.guest_hostname(node, index, count), size, first.ram_mib)
        for node, size in zip(job.nodes, sizes, strict=True)
        for index in range(count)
    ]


def prepare(
    guests: Sequence[GuestPlan],
    planned: Sequence[PlannedGuest],
    job: BatchJob,
    site: Site,
    plugins: Plugins,
    of_batch: Callable[[Sequence[PeerGuest]], Iterable[ContextItem]] = lambda _: (),
) -> list[Prepared]:
    """Return everything for the placed guests and their domains. Acquires nothing.

    ``of_batch`` returns the batch system's context items for all guests. Raises Refused and
    Conflict.
    """
    peers = peer_guests(guests, job, site, plugins)
    batch, prepared = tuple(of_batch(peers)), []
    hostnames, slots = zip(*((peer.hostname, peer.slots) for peer in peers), strict=True)
    for placed_guest, driver in zip(guests, (one.driver for one in planned), strict=True):
        guest = dataclasses.replace(placed_guest, hostnames=hostnames, slots=slots)
        items = context_of(guest, driver, site, plugins, batch)
        contributed = domain_contributions(guest, driver, site, plugins)
        owner = plugins.plugin_of("vtorque_guest_types", guest.image.guest_type)
        merged = merge(contributed)
        prepared.append(Prepared(guest, driver, owner, contributed, merged, items))
    return prepared


def context_of(
    guest: GuestPlan,
    driver: GuestDriver,
    site: Site,
    plugins: Plugins,
    batch: Sequence[ContextItem] = (),
) -> list[ContextItem]:
    """Return all context items of a guest, including ``batch``, those of the batch system.

    Raises Refused, naming plugin and item, if the guest type does not support one.
    """
    supports = plugins.guest_type(guest.image.guest_type).supports
    items: list[ContextItem] = [
        EnvVar("VTORQUE_JOBID", guest.job.id),
        EnvVar("VTORQUE_RANK", str(guest.rank)),
        *batch,
        *driver.context(guest, site),
    ]
    for contribution in plugins.collect(hooks.vtorque_guest_context, guest=guest, site=site):
        kind = type(contribution.item).__name__
        if kind not in supports:
            raise Refused(
                f"plugin {contribution.plugin} needs {kind} in the guest; guest type "
                f"{guest.image.guest_type} of image {guest.image.name} has none",
                fix="choose another image, or drop the option that needs it",
            )
        items.append(contribution.item)
    return items


def domain_contributions(
    guest: GuestPlan, driver: GuestDriver, site: Site, plugins: Plugins
) -> list[Contributed]:
    """Return all domain elements of a guest with their plugins, the core's first."""
    owner = plugins.plugin_of("vtorque_guest_types", guest.image.guest_type)
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
            path=str(root_disk(guest)),
            format="qcow2",
            serial="vtroot",
            boot=None if image.kernel else 1,
            base=None if copied(guest, site) else str(image.disk),
            base_format=image.disk_format,
        )
    yield from guest_network.interfaces(site, guest)
    if guest.placement.page_kib is not None:  # memfd needs no hugetlbfs mounted, memfd_create(2)
        yield MemoryBacking(hugepages_kib=guest.placement.page_kib, source="memfd")


def copied(guest: GuestPlan, site: Site) -> bool:
    """Return True if the guest's disk is a copy of the image's instead of an overlay."""
    return guest[FS_TYPE] == "ramdisk" and site.images.ramdisk == "copy"
