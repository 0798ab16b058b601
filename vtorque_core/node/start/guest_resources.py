"""Resources and settings of every guest: domain spec, disk, daemons of shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Literal

from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.job_files import Tree
from vtorque_core.api.libvirt_domain import Disk, Filesystem, Interface
from vtorque_core.base.names import tap_name
from vtorque_core.config.site_config import Site
from vtorque_core.images.pool import ramdisk_mib
from vtorque_core.node.start.attempt import StartAttempt
from vtorque_core.plan import guests as plan
from vtorque_core.plan.domain.render import DomainSpec, console_socket
from vtorque_core.plan.guest_network import all_networks
from vtorque_core.plan.guests import GuestSpec
from vtorque_core.resources import netfilter
from vtorque_core.resources.console import ConsoleRecorder
from vtorque_core.resources.disk import DiskCopy, MountResource, Overlay
from vtorque_core.resources.lease import ImageUse
from vtorque_core.resources.netfilter import Netfilter
from vtorque_core.resources.user_disk import ServedDisk, UserDisk
from vtorque_core.resources.virtiofs_daemon import ServedDirectory, Virtiofsd, file_limit


def domain_spec(
    guest: GuestPlan, site: Site, accel: Literal["kvm", "tcg"], ports: int = 0
) -> DomainSpec:
    return DomainSpec(
        guest, accel, site.node.qemu_user, str(site.node.uefi),
        allow_qemu_args=site.node.allow_qemu_args, ports=ports, templates=site.templates,
    )  # fmt: skip


def root_disks(each: GuestSpec, site: Site) -> Iterable[Resource]:
    """Return the resources to create for a guest's root disk; none for a warm guest.

    If the boot source creates the disk (a checkpoint or migration), returns only the tmpfs of a
    root disk in memory.
    """
    image = each.plan.image
    ram = each.plan.ramdisk_dir
    if image.disk is None or each.plan.source.warm_key:
        return
    if ram is not None:
        # A separate tmpfs limits the guest's writes to its claim, so they cannot fill /run.
        limits = (
            f"size={ramdisk_mib(each.plan.request, image)}M",
            "mode=0711",
            "nosuid",
            "nodev",
            "noexec",
        )
        yield Tree(str(ram), mode=0o711)
        yield MountResource("tmpfs", str(ram), "tmpfs", limits)
    if each.plan.source.brings_disk:
        return
    made = str(each.plan.root_disk), str(image.disk), image.disk_format
    if plan.has_copied_disk(each.plan, site):
        yield DiskCopy(*made, uid=each.plan.qemu_uid, seconds=site.node.start_timeout)
    else:
        yield Overlay(*made, uid=each.plan.qemu_uid)


def daemons(each: GuestSpec) -> Iterable[Resource]:
    user, qemu, run_dir = each.plan.user, each.plan.qemu_uid, each.plan.run_dir
    if not each.plan.source.warm_key:  # the console of a warm guest is recorded already
        log, socket = each.plan.state_dir / "console.log", console_socket(each.plan, each.merged)
        yield ConsoleRecorder((socket, str(log), str(qemu)), str(run_dir / "console.lock"))
    own = bool(each.plan.image.source)  # a user's image
    shares = each.merged.lists(Filesystem)
    most = file_limit(each.plan.ram_mib // max(1, len(shares)))
    for share in shares:
        stem = run_dir / f"fs-{share.name}"
        root = user.subordinate_id or None if share.guest_root == "other" else None
        of_share: dict[str, object] = {"subordinate_id": root, "readonly": share.readonly}
        of_share |= {"owner_check": share.user_owned, "nofile": most}
        of_share |= {"comes": each.plan.source.remote, "guest_root": share.guest_root}
        of_share |= {"users_fault": share.user_owned and own, "nosuid": own}
        yield Virtiofsd(ServedDirectory.at_stem(stem, share.source, user, qemu, **of_share))
    for disk in each.merged.lists(Disk):
        if disk.user_owned:
            stem = run_dir / f"disk-{disk.name}"
            of_disk = {"readonly": disk.readonly, "users_fault": own}
            yield UserDisk(ServedDisk.at_stem(stem, disk.path, user, qemu, **of_disk))


def acquire_all(
    start: StartAttempt, prepared: Sequence[GuestSpec], *, guard: bool = True,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Acquire and journal the directories, images and resources of all guests.

    ``guard``: also load packet filters that block guests' access to the node's own services. Calls
    ``meanwhile`` while the guests' helper processes start.
    """
    paths, key = start.site.paths, start.job.key
    for top in (paths.job_state(key), paths.job_run(key)):
        start.acquire(Tree(str(top), mode=0o711))
    files = (each.plan.image.disk or each.plan.image.kernel for each in prepared)
    for version in dict.fromkeys(file.parent for file in files if file):
        start.acquire(ImageUse(str(version)))
    guards = ""
    for network in all_networks(start.site).values() if guard else ():
        script = netfilter.node_guard(network, start.site.node.libvirt_uri)
        guards += script
        if script and not network.filter:
            netfilter.load(script)  # otherwise the filters of the NICs load it
    for each in prepared:
        tops = (Tree(str(top), mode=0o711) for top in (each.plan.state_dir, each.plan.run_dir))
        start.acquire_all(chain(tops, root_disks(each, start.site)), guest=each.plan)
    wanted = [(one, each.plan) for each in prepared for one in _helpers(each, start.site, guards)]
    # Each thread mostly waits for a process, which uses the CPUs of the start.
    with ThreadPoolExecutor(min(8, 2 * len(os.sched_getaffinity(0)))) as pool:
        helpers = [pool.submit(start.acquire, *one) for one in wanted]
        try:
            meanwhile()
        finally:
            for helper in helpers:
                helper.result()
    for each in prepared:
        start.acquire_all(each.resources, guest=each.plan, acting=each.owner)


def _helpers(each: GuestSpec, site: Site, guards: str) -> Iterable[Resource]:
    yield from daemons(each)  # no helper needs another one
    for nic in each.merged.lists(Interface):
        if nic.filtered:
            limit = site.network.max_connections
            yield Netfilter(tap_name(nic.mac), nic.mac, nic.ip, guards, limit, nic.ipv6)
