"""What every guest is started with: its domain's settings, its own disk, its shares' daemons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_plan import GuestPlan, ramdisk_dir, root_disk
from vtorque_core.api.job_files import Tree
from vtorque_core.api.libvirt_domain import Disk, Filesystem
from vtorque_core.images.pool import ramdisk_mib
from vtorque_core.plan import guests as plan
from vtorque_core.plan.domain.render import DomainSpec
from vtorque_core.plan.guests import Prepared
from vtorque_core.resources.disk import DiskCopy, Mount, Overlay
from vtorque_core.resources.user_disk import DiskFile, UserDisk
from vtorque_core.resources.virtiofs_daemon import SharedDirectory, Virtiofsd, file_limit
from vtorque_core.site.config import Site


def domain_spec(
    guest: GuestPlan, site: Site, accel: Literal["kvm", "tcg"], ports: int = 0
) -> DomainSpec:
    """Return what the core decides about a guest's domain."""
    return DomainSpec(
        guest, accel, site.node.qemu_user, str(site.node.uefi),
        allow_qemu_args=site.node.allow_qemu_args, ports=ports,
    )  # fmt: skip


def root_disks(each: Prepared, site: Site) -> Iterable[Resource]:
    """Return what a guest's own disk is made with; a warm guest has it already.

    A boot source that brings the disk still gets the tmpfs that the disk lies in.
    """
    image = each.plan.image
    ram = ramdisk_dir(each.plan)
    if image.disk is None or each.plan.source.adopts:
        return
    if ram is not None:
        # A tmpfs of its own: the guest's writes end where its claim does, and never fill /run.
        limits = (f"size={ramdisk_mib(image.disk)}M", "mode=0711", "nosuid", "nodev", "noexec")
        yield Tree(str(ram), mode=0o711)
        yield Mount("tmpfs", str(ram), "tmpfs", limits)
    if each.plan.source.brings_disk:
        return
    made = str(root_disk(each.plan)), str(image.disk), image.disk_format
    if plan.copied(each.plan, site):
        yield DiskCopy(*made, uid=each.plan.qemu_uid, seconds=site.node.start_timeout)
    else:
        yield Overlay(*made, uid=each.plan.qemu_uid)


def daemons(each: Prepared) -> Iterable[Resource]:
    """Return the daemons that serve a guest its shares and its user's disk."""
    user, qemu, run_dir = each.plan.user, each.plan.qemu_uid, each.plan.run_dir
    shares = each.merged.lists(Filesystem)
    most = file_limit(each.plan.ram_mib // max(1, len(shares)))
    for share in shares:
        stem, root = run_dir / f"fs-{share.name}", user.subordinate_id or None
        of_share = {"subordinate_id": root, "readonly": share.readonly}
        of_share |= {"owner_check": share.user_owned, "nofile": most}
        of_share |= {"comes": each.plan.source.remote}
        yield Virtiofsd(SharedDirectory.beside(stem, share.source, user, qemu, **of_share))
    for disk in each.merged.lists(Disk):
        if disk.user_owned:
            stem, readonly = run_dir / f"disk-{disk.name}", disk.readonly
            yield UserDisk(DiskFile.beside(stem, disk.path, user, qemu, readonly=readonly))
