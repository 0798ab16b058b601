"""The node's conditions for users' own images on a site with an administrator. Privileges: root.

Root decides by the node's config, libvirt and kernel, and by nothing in the request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

from vtorque_admin import doctor
from vtorque_core.api import Refusal, Refused, VtorqueError
from vtorque_core.api.children import run_in_child
from vtorque_core.api.guest_plan import ColdBoot, GuestPlan
from vtorque_core.api.health import HealthResult, failure, warning
from vtorque_core.api.node_job import NodeJob
from vtorque_core.api.node_job import Site as PluginSite
from vtorque_core.api.vm_options import IMG
from vtorque_core.live import libvirt
from vtorque_core.live.node_setup import AnyNetwork, all_networks, host_ids
from vtorque_core.live.site_config import Site
from vtorque_own_images.job_filter import JobFilter
from vtorque_own_images.own_disk import NAME, cached_status
from vtorque_own_images.plugin import BASE, Settings
from vtorque_own_images.submitted_disk import size_problem
from vtorque_own_images.submitted_image import SQUASHFS, boots_own_kernel

_FIX = "confine QEMU (plugins/own-images/README.md, For administrators)"
ENFORCE = Path("/sys/fs/selinux/enforce")
_SECONDS = 10.0  # for an answer of the user's file system
_SAFE_MODES = (None, "nat")
"""Forward modes (https://libvirt.org/formatnetwork.html): None for an isolated network."""


def refuse_guest(guest: GuestPlan, site: PluginSite) -> Iterator[Refusal]:
    """Yield what this node lacks for a guest of a user's own image.

    Called by ``vtorque_plan``. A dry run of a user cannot ask libvirt, and skips these checks.
    """
    of_node, value = cast(Site, site), guest.image.source
    require_cold_boot(guest)
    if guest.index or (os.geteuid() and not guest.host.nodes):
        return
    for problem in network_problems(of_node):
        yield Refusal(f"is your own image, and {problem}", key=IMG.key, value=value)
    if site[Settings].opt_in_unconfined_qemu:
        return
    problems = [*confinement_problems(of_node)]
    if not any(host_ids.claims(guest, ("1",))):
        problems.append("a guest that boots from a disk gets no separate uid on this architecture")
    for problem in problems:
        where = "[plugin.own-images] opt_in_unconfined_qemu"
        yield Refusal(f"is your own image, but {problem}", key=IMG.key, value=value, where=where)


def require_cold_boot(guest: GuestPlan) -> None:
    """Raise Refused for a guest from a checkpoint, a migration or the pool of warm guests."""
    if not isinstance(guest.source, ColdBoot):
        why = f"cannot start from the boot source {guest.source.name} on this site"
        raise Refused(why, key=IMG.key, value=guest.image.source)


def network_problems(site: Site) -> Iterator[str]:
    """Yield the reasons why guests of users' own images may not use the site's networks.

    Allows only filtered libvirt networks with static addresses. Packets may leave the node only
    through the node's NAT (forward mode ``nat``) or not at all (an isolated network).
    """
    for name, network in all_networks(site).items():
        table = f"[networks.{name}]" if name else "[network]"
        if network.kind != "network":
            yield f'{table} kind is "{network.kind}": own images need "network"'
        elif network.addressing != "static":
            yield f'{table} addressing is "{network.addressing}": own images need "static"'
        elif not network.filter:
            yield f"{table} filter is false: own images need a packet filter"
        elif (mode := _forward_mode(network, site.node.libvirt_uri)) not in _SAFE_MODES:
            yield f'libvirt network {network.source} has the forward mode "{mode}", not "nat"'


def _forward_mode(network: AnyNetwork, uri: str) -> str | None:
    assert network.kind == "network"  # noqa: S101 - checked by the caller
    xml = libvirt.network_xml(uri, network.source)
    if xml is None:
        return "inactive"
    forward = ElementTree.fromstring(xml).find("forward")  # noqa: S314 - from libvirt
    return None if forward is None else forward.get("mode", "nat")


def confinement_problems(site: Site) -> Iterator[str]:
    """Yield each reason why QEMU is not fully confined on this node."""
    try:
        models = doctor.security_models(site.node.libvirt_uri)
        settings = doctor.qemu_settings(doctor.QEMU_CONF)
    except (OSError, VtorqueError) as error:
        yield f"libvirt's confinement of QEMU is unknown: {error}"
        return
    if not {"apparmor", "selinux"} & set(models):
        yield "neither AppArmor nor SELinux confines QEMU"
    elif "apparmor" not in models and ENFORCE.exists() and ENFORCE.read_text().strip() != "1":
        yield "SELinux is permissive"
    for key in ("seccomp_sandbox", "security_default_confined", "clear_emulator_capabilities"):
        if settings.get(key, "1") == "0":
            yield f"{doctor.QEMU_CONF} has {key} = 0"
    if not site.node.guest_uids:
        yield "QEMU has no uid per guest ([node] guest_uids = 0)"


def protect_job(job: NodeJob) -> None:
    """Check the guests of a job with the user's own image, and acquire their packet filters.

    Raises:
        Refused: A guest's boot source is not its image, the image is too large, or the guest's
            network has no packet filter or no static addresses.
    """
    networks = all_networks(cast(Site, job.site)).values()
    nics = [nic for guest in job.guests for nic in guest.addresses]
    own, taps = tuple(nic.ip for nic in nics if nic.ip), tuple(nic.tap for nic in nics)
    subnets = tuple(network.subnet for network in networks)
    for guest in job.guests:
        require_cold_boot(guest)  # a warm guest is chosen after the plan
        _require_size(guest, job.site[Settings].max_size)
        for nic in guest.addresses:
            if not (nic.ip and nic.filtered):
                raise Refused("the guest's network has no packet filter or no static addresses")
            made = JobFilter(nic.tap, nic.gateway or "", own, taps, subnets)
            job.acquire(made, guest=guest)


def _require_size(guest: GuestPlan, most: int) -> None:
    """Refuse a user's image file of more than ``most`` MiB.

    This checks the file that the user's process has opened, because QEMU gets that file.
    """
    from vtorque_core.live.suspend import served_file  # noqa: PLC0415 - few jobs need it

    lock = guest.run_dir / f"disk-{NAME if boots_own_kernel(guest.image) else SQUASHFS}.lock"

    def check() -> None:
        if problem := size_problem(served_file(lock, cached_status).st_size, most):
            raise Refused(problem)

    # In a child, because the user's file system can hang.
    if wrong := run_in_child(check, _SECONDS):
        raise Refused(wrong, key=IMG.key, value=guest.image.source)


def check_site(site: PluginSite) -> Iterator[HealthResult]:
    """Check what this node needs to run users' own images. For ``vtorque doctor``."""
    of_node, accepted = cast(Site, site), site[Settings].opt_in_unconfined_qemu
    for problem in network_problems(of_node):
        yield failure(f"own images are refused: {problem}", "change the network's table")
    for problem in confinement_problems(of_node):
        if accepted:
            yield warning(f"own images run although {problem}", _FIX)
        else:
            yield failure(f"own images are refused: {problem}", _FIX)
    if not (of_node.images.pool / BASE).exists():
        yield failure(f"own images need the base image {BASE}", f"vmgr images build {BASE} {BASE}")
