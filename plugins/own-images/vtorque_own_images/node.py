"""The plugin on the node: the disk with the user's image, and a health check."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from vtorque_core.api import Refusal, constant_hook, hookimpl
from vtorque_core.api.guest_context import RootCommand
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.health import HealthCheck, HealthResult, ok, warning
from vtorque_core.api.libvirt_domain import Disk
from vtorque_core.api.node_job import Site
from vtorque_core.api.values import is_personal
from vtorque_own_images.submitted_image import (
    INSTALL_SUDO,
    LABEL,
    SERIAL,
    SUDO_ALLOWED,
    refuse_sudo,
)


@hookimpl
def vtorque_render_domain(guest: GuestPlan) -> Iterator[Disk]:
    """Yield the read-only disk with the user's image. A user process serves it to QEMU."""
    if path := guest.image.source:
        yield Disk("image", path, "raw", readonly=True, serial=SERIAL, user_owned=True)


@hookimpl
def vtorque_plan(guest: GuestPlan) -> Iterator[Refusal]:
    """Refuse ``root=true`` if this node's virtiofsd does not support it."""
    if guest.image.source and (refused := refuse_sudo(guest.request)):
        yield refused


@hookimpl
def vtorque_guest_context(guest: GuestPlan) -> Iterator[RootCommand]:
    """Yield the command that lets the job's user become root, if the job has ``root=true``."""
    if guest.image.source and guest.image.labels.get(LABEL) == SUDO_ALLOWED:
        yield RootCommand((INSTALL_SUDO,), "boot")


_PACKAGES = {"skopeo": "skopeo", "sqfstar": "squashfs-tools", "sqfs2tar": "squashfs-tools-ng"}


def tools_check(site: Site) -> Iterator[HealthResult]:
    """Check the tools that copy and convert images."""
    if not is_personal(site):
        yield ok(
            "users' own images are refused: this version supports them only on a user's own machine"
        )
        return
    missing = [tool for tool in _PACKAGES if shutil.which(tool) is None]
    if not missing:
        yield ok("own images can be copied and converted")
        return
    packages = " ".join(_PACKAGES[tool] for tool in missing)
    what = f"{', '.join(missing)}: not installed, so some own images cannot be used"
    yield warning(what, fix=f"apt-get install {packages}")


vtorque_health_checks = constant_hook(HealthCheck("own images", tools_check))
