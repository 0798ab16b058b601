"""What ``vtorque doctor`` looks at on a user's own site alone, where root has prepared nothing."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api import children
from vtorque_core.api.health import HealthResult, failed, ok, warning
from vtorque_core.base import kvm
from vtorque_core.resources._user_daemon_exec import CLONE_NEWUSER, unshare
from vtorque_core.site.config import Site

_KVM = Path("/dev/kvm")
_TRY_TIME = 10.0  # seconds
# Where Debian has them; the image's tools are its builder's to ask for.
_PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "libvirtd": "libvirt-daemon-system",
    "virtlogd": "libvirt-daemon-system",
    "setpriv": "util-linux",
    "/usr/lib/qemu/virtiofsd": "virtiofsd, on Debian 12 qemu-system-common",
    "musl-gcc": "musl-tools and gcc, for the first image",
}


def check_accel(site: Site) -> Iterator[HealthResult]:
    """Check whether KVM executes a guest instruction, and for whom /dev/kvm is."""
    chosen = kvm.choose(site.node.accel, site.paths.run, site.node.qemu_user)
    if not chosen.warning:
        yield ok(f"guests run with {chosen.type}")
    elif _KVM.exists() and not os.access(_KVM, os.R_OK | os.W_OK):
        user = pwd.getpwuid(site.owner).pw_name
        yield warning(chosen.warning, f"as root: usermod -aG kvm {user}; then log in again")
    else:
        yield warning(chosen.warning, "enable virtualization in the firmware (or nested, in a VM)")


def check_namespaces(_: Site) -> Iterator[HealthResult]:
    """Check that a user may have a user namespace: virtiofsd shuts itself into one."""
    problem = children.in_child(lambda: unshare(CLONE_NEWUSER), _TRY_TIME)
    if problem:
        yield failed(
            f"no user namespace for virtiofsd: {problem}",
            "as root: sysctl kernel.unprivileged_userns_clone=1 "
            "kernel.apparmor_restrict_unprivileged_userns=0, whichever this kernel has",
        )
    else:
        yield ok("virtiofsd can have a user namespace")


def check_tools(_: Site) -> Iterator[HealthResult]:
    """Check the programs that a job and its image need."""
    for tool, package in _PACKAGES.items():
        if shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin"):
            yield ok(f"{tool} is there")
        else:
            yield failed(f"{tool} is missing", f"as root: install the package {package}")
