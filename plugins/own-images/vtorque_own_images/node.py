"""The plugin on the node: the disk with the user's image, and a health check."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import ClassVar

from vtorque_core.api import Act, Refusal, constant_hook, deferred, hookimpl
from vtorque_core.api.guest_context import RootCommand
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.health import HealthCheck, HealthResult, ok, warning
from vtorque_core.api.libvirt_domain import Disk, Element, MetadataEntry
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_core.api.values import is_personal
from vtorque_core.api.vm_options import FS_TYPE, IMG
from vtorque_linux_guest.settings import Settings as LinuxSettings
from vtorque_linux_guest.settings import agent_path
from vtorque_own_images.plugin import BASE, Settings
from vtorque_own_images.submitted_image import (
    INSTALL_SUDO,
    LABEL,
    SERIAL,
    SQUASHFS,
    SUDO_ALLOWED,
    boots_own_kernel,
    refuse_sudo,
)


class OwnImage(MetadataEntry):
    """Metadata of a guest that may be neither saved nor migrated."""

    forbids: ClassVar[frozenset[Act]] = frozenset({"save", "migrate"})


@hookimpl
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterator[Element]:
    """Yield the disk with the user's image. A user process serves it read-only to QEMU."""
    if boots_own_kernel(guest.image):
        from vtorque_own_images import own_disk  # noqa: PLC0415 - few jobs need it

        yield own_disk.element(guest)
    elif path := guest.image.source:
        yield Disk(SQUASHFS, path, "raw", readonly=True, serial=SERIAL, user_owned=True)
    if guest.image.source and not is_personal(site):
        yield OwnImage("own-image", "yes")


@hookimpl
def vtorque_plan(guest: GuestPlan, site: Site) -> Iterator[Refusal]:
    """Refuse ``root=true`` if this node's virtiofsd does not support it.

    Refuse a user's own disk if the job has ``fs_type=ramdisk``, or if this node lacks the guest
    agent. On a site with an administrator, refuse users' own images unless the node confines them.
    """
    if guest.image.name == BASE and not guest.image.source:
        why, fix = "is only the base of users' own images", "write the name of another image"
        yield Refusal(why, key=IMG.key, value=BASE, fix=fix)
    if guest.image.source and not is_personal(site):
        from vtorque_own_images import site_rules  # noqa: PLC0415 - few jobs need it

        yield from site_rules.refuse_guest(guest, site)
    if guest.image.source and (refused := refuse_sudo(guest.request)):
        yield refused
    if not boots_own_kernel(guest.image):
        return
    if guest[FS_TYPE] == "ramdisk":
        why = "is not available for your own disk"
        yield Refusal(why, key=FS_TYPE.key, value=guest[FS_TYPE], fix=f"omit {FS_TYPE.key}")
    agent = agent_path(site[LinuxSettings], guest.image.arch)
    if not agent.exists():
        fix = f"run {sys.executable} -I -m vtorque_linux_guest.agent.build {agent}"
        yield Refusal("needs the agent", key=IMG.key, value=guest.image.source, fix=fix)


@hookimpl
def vtorque_pre_boot(job: NodeJob) -> None:
    """Create packet filters, and the writable disks of guests that boot the user's own disk."""
    if not is_personal(job.site) and any(guest.image.source for guest in job.guests):
        from vtorque_own_images import site_rules  # noqa: PLC0415 - few jobs need it

        site_rules.protect_job(job)
    for guest in job.guests:
        if boots_own_kernel(guest.image):
            from vtorque_own_images import own_disk  # noqa: PLC0415 - few jobs need it

            most = job.site[Settings].max_size
            job.acquire(own_disk.overlay(guest, most), guest=guest)


@hookimpl
def vtorque_guest_context(guest: GuestPlan) -> Iterator[RootCommand]:
    """For ``root=true``, yield a command that installs sudo, or tests sudo on a user's own disk."""
    if not guest.image.source or guest.image.labels.get(LABEL) != SUDO_ALLOWED:
        return
    if boots_own_kernel(guest.image):  # fail early if the disk has no sudo that obeys the rule
        yield RootCommand(("sudo", "-nu", guest.user.name, "sudo", "-n", "true"))
    else:
        yield RootCommand((INSTALL_SUDO,), "boot")


_PACKAGES = {
    "skopeo": "skopeo",
    "sqfstar": "squashfs-tools",
    "zstd": "zstd",
    "sqfs2tar": "squashfs-tools-ng",
}


def tools_check(site: Site) -> Iterator[HealthResult]:
    """Check the tools that copy and convert images, and what a site needs to run own images."""
    if not is_personal(site):
        if not site[Settings].allow:
            yield ok("users' own images are refused ([plugin.own-images] allow = false)")
            return
        from vtorque_own_images import site_rules  # noqa: PLC0415 - few sites need it

        yield from site_rules.check_site(site)
    missing = [tool for tool in _PACKAGES if shutil.which(tool) is None]
    if not missing:
        yield ok("own images can be copied and converted")
        return
    packages = " ".join(_PACKAGES[tool] for tool in missing)
    what = f"{', '.join(missing)}: not installed, so some own images cannot be used"
    yield warning(what, fix=f"apt-get install {packages}")


vtorque_resources = hookimpl(deferred("vtorque_own_images.own_disk:resources"))
vtorque_health_checks = constant_hook(HealthCheck("own images", tools_check))
