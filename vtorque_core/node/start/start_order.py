"""The start of a job's guests on this node, phase by phase, all of it journalled.

Runs as root in the prologue, under the job's lock. Raises what went wrong; the prologue releases
and tells it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vtorque_core import job_log, kept, ledger, log, names, plan, policy, proof, timeline
from vtorque_core.api import JobRequest
from vtorque_core.api_batch import BatchJob, NodeAdapter, PeerGuest
from vtorque_core.api_context import ContextItem
from vtorque_core.api_domain import Disk, Filesystem, Interface, PciDevice
from vtorque_core.api_guest import GuestDriver, LateDriver
from vtorque_core.api_node import GuestPlan, JobUser, Resource
from vtorque_core.api_options import KEEP, LOG, SHOW_LOG, VM_EPILOGUE, VM_PROLOGUE
from vtorque_core.api_resources import ramdisk_dir, root_disk
from vtorque_core.boot import Prepared, Start, boot_all, boot_on_order
from vtorque_core.config import Site
from vtorque_core.domain.daemons import disk_daemon, share_daemon
from vtorque_core.domain.merge import merge
from vtorque_core.domain.render import tap_name
from vtorque_core.errors import HostFault, Refused
from vtorque_core.image_pool import ramdisk_mib
from vtorque_core.journal import Journal
from vtorque_core.network import of_site
from vtorque_core.plugins import Plugins
from vtorque_core.proof import Proof, ProofGuest
from vtorque_core.records import JobHeader, JournalError, read
from vtorque_core.request import Request
from vtorque_core.resources import (
    DiskCopy,
    File,
    ImageUse,
    Mount,
    Netfilter,
    Overlay,
    Tree,
    Vfio,
    netfilter,
)

# Phases in which nothing of the user's takes part. Later on their disk may be broken, and they can
# kill their own daemons or have their guest hang.
_NODES_OWN = ("plan", "render domain")
_log = logging.getLogger(__name__)


def proof_file(told: Proof, user: JobUser, site: Site) -> File:
    """Return the proof as a resource: root's, for the user's primary group to read."""
    path = str(site.paths.proof(told.job))
    return File(path, mode=0o640, gid=user.gid, replace=True, content=told.encode())


def header(job: BatchJob, user: JobUser, site: Site, plugins: Plugins) -> JobHeader:
    """Return the journal's first line: whose job it is, and which plugins act for it."""
    return JobHeader(
        id=job.id,
        attempt=job.attempt,
        owner=user.name,
        uid=user.uid,
        batch=site.batch.system,
        plugins={name: plugins.distributions[name] for name in plugins.names},
        whole_node=job.whole_node,
    )


def start_job(
    job: BatchJob,
    site: Site,
    plugins: Plugins,
    adapter: NodeAdapter,
    reap_gone: Callable[[], None] = lambda: None,
    begun: Callable[[], None] = lambda: None,
) -> None:
    """Boot all guests of the job on this node and prove them ready.

    ``reap_gone`` is called if the job's claims are in use, ``begun`` when the job shell can see
    that the start is at work. Raises Refused, HostFault (both may
    come from plugins) with everything still journalled.
    """
    assert job.blob is not None  # noqa: S101 - the caller has looked
    if job.bad_request:
        raise Refused(job.bad_request)
    if job.unknown:
        raise HostFault(f"the batch system does not tell all of the job: {job.unknown}")
    request = Request.decode(job.blob)
    user = plan.job_user(job.owner, site)
    wanted = policy.decide(request, site, plugins)
    log.ask(wanted[LOG])
    _log.debug("asked for: %s", " ".join(sorted(wanted.given)) or "nothing")
    with Journal.start(site.paths, header(job, user, site, plugins)) as journal:
        deadline = time.monotonic() + site.node.start_timeout
        start = Start(job.id, user, site, deadline, journal, plugins)
        told = _proof(start, job, wanted)
        start.acquire(proof_file(told, user, site))
        begun()
        with blame(start):
            _start(start, job, wanted, told, adapter, reap_gone)


@contextlib.contextmanager
def blame(start: Start) -> Iterator[None]:
    """Have a HostFault say whether the node is at fault, by the phase in which it came."""
    try:
        yield
    except HostFault as error:
        if start.phase not in _NODES_OWN:
            error.blames_node = False
        raise


def _start(
    start: Start,
    job: BatchJob,
    wanted: JobRequest,
    told: Proof,
    adapter: NodeAdapter,
    reap_gone: Callable[[], None],
) -> None:
    site, plugins, journal, user = start.site, start.plugins, start.journal, start.user
    secret = plan.load_secret(site.paths.secret)
    start.enter("plan")
    share = plan.node_share(job, site)
    planned = plan.plan_guests(job, wanted, site, plugins, user, secret, share.machine)
    claims = [p.claims for p in planned]
    try:
        placements = ledger.place(journal, claims, share, site.paths)
    except ledger.InUse:
        reap_gone()
        placements = ledger.place(journal, claims, share, site.paths)
    notices = [notice for p in planned for notice in p.notices]
    for each, at in zip(planned, placements, strict=True):
        notices += plan.not_near(each, at)
    helpers = {cpu for at in placements for cpu in at.cores["emulator"]}
    if helpers:  # every helper process that we start stays off the guests' own cores
        os.sched_setaffinity(0, helpers)
    placed = [replace(p.plan, placement=at) for p, at in zip(planned, placements, strict=True)]
    start.guests = plan.addressed(placed, job, site, secret)
    _keep_facts(start, job, wanted)
    for notice in notices:
        _log.warning("%s", notice.text)
    for guest in start.guests:
        _log_guest(guest)
    start.enter("render domain")
    drivers = [p.driver for p in planned]
    peers = plan.peer_guests(start.guests, job)
    batch = tuple(adapter.context(job, peers))
    prepared = [
        _prepare(g, d, start, batch, peers) for g, d in zip(start.guests, drivers, strict=True)
    ]
    start.enter("pre-boot")
    _acquire_all(start, prepared)
    for name, content in _user_files(wanted).items():
        path = proof.user_file_path(site.paths, job.id, job.attempt, name)
        mine = File(str(path), mode=0o400, uid=user.uid, gid=user.gid, content=content)
        start.acquire(mine)
    start.act("vtorque_pre_boot")
    on_order = isinstance(prepared[0].driver, LateDriver)
    if on_order:
        boot_on_order(start, prepared)
    else:
        boot_all(start, prepared)
    first = start.guests[0]
    proof.write(
        site.paths,
        replace(
            told,
            state="ready",
            guest_type=first.image.guest_type,
            plugin=plugins.plugin_of("vtorque_guest_types", first.image.guest_type),
            environ={**told.environ, **prepared[0].environ},
            detail=tuple(dict.fromkeys((*(each.text for each in notices), *start.warnings))),
            guests=tuple(
                ProofGuest(g.name, g.hostname, g.rank, str(g.run_dir)) for g in start.guests
            ),
        ),
        gid=user.gid,
    )
    start.enter("await the script" if on_order else "run")
    with contextlib.suppress(JournalError, OSError):
        timeline.keep_start(site.paths, read(journal.path))


def _log_guest(guest: GuestPlan) -> None:
    address = next((each.ip for each in guest.addresses if each.ip), None)
    _log.info(
        "%s: image %s, %d vCPUs on cores %s, %d MiB, address %s",
        *(guest.hostname, guest.image.name, guest.vcpus),
        " ".join(str(core) for core in guest.placement.cores.get("vcpu", ())) or "any",
        *(guest.ram_mib, address or "none"),
        extra={"guest": guest.index},
    )


def _keep_facts(start: Start, job: BatchJob, wanted: JobRequest) -> None:
    """Keep who gets what, for the job's owner to look at also after its end."""
    guests = [
        {"rank": g.rank, "index": g.index, "hostname": g.hostname, "domain": g.name}
        | {"vcpus": g.vcpus, "ram_mib": g.ram_mib}
        for g in start.guests
    ]
    user, image = start.user, start.guests[0].image
    kept.place(start.site.paths, user.uid, job.id, job.attempt).add_facts(
        job=job.id,
        attempt=job.attempt,
        owner=user.name,
        uid=user.uid,
        node=job.node,
        nodes=list(job.nodes),
        name=job.name,
        batch=start.site.batch.system,
        image=image.name,
        guest_type=image.guest_type,
        started=time.time(),
        guests=guests,
        given=sorted(wanted.given),
        **job_log.facts(log.current(), start.site),
    )


def _proof(start: Start, job: BatchJob, wanted: JobRequest) -> Proof:
    """Return what the wrapper is told while the guests start."""
    environ = {"HOME": f"/home/{start.user.name}"} if "home" in start.site.shares else {}
    return Proof(
        job=job.id,
        attempt=job.attempt,
        uid=start.user.uid,
        state="starting",
        deadline=start.deadline,
        grace=start.site.node.grace,
        shell=wanted.shell,
        files={name: proof.digest(content) for name, content in _user_files(wanted).items()},
        keep=wanted[KEEP],
        show_log=wanted[SHOW_LOG],
        environ=environ,
    )


def _user_files(wanted: JobRequest) -> dict[str, bytes]:
    found = zip(proof.USER_FILES, (wanted[VM_PROLOGUE], wanted[VM_EPILOGUE]), strict=True)
    return {name: file.content for name, file in found if file is not None}


def _prepare(
    guest: GuestPlan,
    driver: GuestDriver,
    start: Start,
    batch: Sequence[ContextItem],
    peers: Sequence[PeerGuest],
) -> Prepared:
    items = plan.context_of(guest, driver, start.site, start.plugins, batch, peers)
    contributed = plan.domain_contributions(guest, driver, start.site, start.plugins)
    resources = tuple(driver.resources(guest, items, start.site))
    owner = start.plugins.plugin_of("vtorque_guest_types", guest.image.guest_type)
    return Prepared(guest, driver, owner, contributed, merge(contributed), items, resources)


def _acquire_all(start: Start, prepared: Sequence[Prepared]) -> None:
    key = names.job_key(start.id, start.guests[0].attempt)
    for top in (start.site.paths.job_state(key), start.site.paths.job_run(key)):
        start.acquire(Tree(str(top), mode=0o711))
    for version in dict.fromkeys(file.parent for p in prepared if (file := _image_file(p))):
        start.acquire(ImageUse(str(version)))
    guards = {}
    for network in of_site(start.site).values():
        guard = netfilter.node_guard(network, start.site.node.libvirt_uri)
        if guard:
            guards[network.source] = guard
        if guard and not network.filter:
            netfilter.load(guard)  # no NIC of the site's brings it
    for each in prepared:
        for directory in (each.plan.state_dir, each.plan.run_dir):
            start.acquire(Tree(str(directory), mode=0o711), guest=each.plan)
        for resource in _guest_resources(each, start.site, guards):
            start.acquire(resource, guest=each.plan)
        start.acting = each.owner
        for resource in each.resources:
            start.acquire(resource, guest=each.plan)
        start.acting = "core"


def _image_file(each: Prepared) -> Path | None:
    return each.plan.image.disk or each.plan.image.kernel


def _guest_resources(each: Prepared, site: Site, guards: Mapping[str, str]) -> Iterable[Resource]:
    image = each.plan.image
    ram = ramdisk_dir(each.plan)
    if image.disk is not None and ram is not None:
        # A tmpfs of its own: the guest's writes end where its claim does, and never fill /run.
        limits = (f"size={ramdisk_mib(image.disk)}M", "mode=0711", "nosuid", "nodev", "noexec")
        yield Tree(str(ram), mode=0o711)
        yield Mount("tmpfs", str(ram), "tmpfs", limits)
    if image.disk is not None:
        made = str(root_disk(each.plan)), str(image.disk), image.disk_format
        if plan.copied(each.plan, site):
            yield DiskCopy(*made, uid=each.plan.qemu_uid, seconds=site.node.start_timeout)
        else:
            yield Overlay(*made, uid=each.plan.qemu_uid)
    for element in each.merged.lists(Filesystem):
        yield share_daemon(each.plan, element)
    for disk in each.merged.lists(Disk):
        if disk.user_owned:
            yield disk_daemon(each.plan, disk)
    for nic in each.merged.lists(Interface):
        if nic.filtered:
            guard = guards.get(nic.source, "") if nic.kind == "network" else ""
            yield Netfilter(tap_name(nic.mac), nic.mac, nic.ip, guard)
    for card in each.merged.lists(PciDevice):
        yield Vfio.of(card.address, each.plan.qemu_uid, must_reset=card.must_reset)
