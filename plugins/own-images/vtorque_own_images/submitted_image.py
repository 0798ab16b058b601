"""The image of a submitted ``-vm img=`` value.

It is either the base image's kernel with the user's squashfs, or the user's disk with its own
kernel. The value is untrusted. This module does not open the file: a user process serves it to
QEMU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath

from vtorque_core.api import HostFault, Image, JobRequest, Refusal, Refused, printable, run_tool
from vtorque_core.api.node_job import Site
from vtorque_core.api.vm_options import IMG, disk_path
from vtorque_own_images.plugin import (
    BASE,
    FIRMWARE,
    ROOT,
    SCRIPT,
    SUDO,
    is_disk,
    policy_refusal,
)
from vtorque_own_images.submitted_disk import SubmittedDisk, parse_value

SUFFIX = ".squashfs"
SQUASHFS = "image"
"""Name of the domain element of the disk with the user's squashfs."""
SERIAL = "vtown"
"""Serial number by which the base image's initramfs finds the disk with the user's squashfs."""
SUID = "vtorque.suid=1"
"""Word of the kernel command line that enables setuid programs of the image."""
LABEL, SUDO_ALLOWED = "script", "sudo"
"""Label of the image, and its value if the job's user may become root."""
INSTALL_SUDO = "/usr/lib/vtorque/install-sudo"
"""Program of the base image that provides sudo in the guest."""
_SCRIPTS = {SCRIPT: "root", SUDO: SUDO_ALLOWED}
_DISK_RAM = 256  # MiB
_MAX_NAME = 40  # characters, so that a listing does not cut off what follows
SUDO_LABEL = "sudo"
"""Label of a base image that has this program."""
_FILE = re.compile(rf".*/([0-9a-f]{{64}}){re.escape(SUFFIX)}", re.ASCII)


def image(request: JobRequest, site: Site, pool: Callable[[str], Image]) -> Image:
    """Return the image for a request with the user's own image or disk. Raises Refused.

    :func:`vtorque_own_images.pull.resolve_request` has resolved the request's values.

    - The user's image has no kernel. Kernel, initrd, kernel command line and labels are those of
      the site's base image. If the request has the option ``root``, the kernel command line also
      enables setuid programs, and the label ``script`` says how the user becomes root.
    - The user's disk has its own kernel. It has only the labels of :func:`_disk_image`.
    """
    value = request[IMG]
    require_allowed(value, request[ROOT], site)
    if is_disk(value):
        return _disk_image(parse_value(value), request)
    found = _FILE.fullmatch(value)
    if found is None:
        raise Refused(
            "is not a copy of an image in your cache: submit with vsub",
            key=IMG.key,
            value=value,
        )
    try:
        disk_path(value)
    except ValueError as error:
        raise Refused(str(error), key=IMG.key, value=value) from None
    base = replace(_base_image(pool), name=_name(found[1][:12], request), source=value)
    if not request[ROOT]:
        return base
    if request[ROOT] == SUDO and SUDO_LABEL not in base.labels:
        fix = f"rebuild it with: vmgr images build {BASE} {BASE}"
        raise Refused(
            f"the base image {BASE} has no sudo (label {SUDO_LABEL} is missing)",
            key=ROOT.key,
            value=SUDO,
            fix=fix,
        )
    labels = {**base.labels, LABEL: _SCRIPTS[request[ROOT]]}
    return replace(base, cmdline=f"{base.cmdline} {SUID}".strip(), labels=labels)


def _name(image: str, request: JobRequest) -> str:
    """Return the image's name for logs and listings, which shows if the user is root inside."""
    return f"own:{image}" + (f",{ROOT.key}={request[ROOT]}" if request[ROOT] else "")


def _base_image(pool: Callable[[str], Image]) -> Image:
    try:
        return pool(BASE)
    except Refused as error:
        fix = f"ask your administrator to run: vmgr images build {BASE} {BASE}"
        raise Refused(f"the site's base image for users' own images: {error}", fix=fix) from None


def boots_own_kernel(image: Image) -> bool:
    """Return True if the image is a user's own disk. Firmware boots the kernel on this disk."""
    return bool(image.source) and image.kernel is None


def _disk_image(file: SubmittedDisk, request: JobRequest) -> Image:
    """Return the image of a user's disk; the options ``firmware`` and ``root`` set its labels.

    The disk can contain any system that cloud-init configures, so ``distro`` is ``disk``.
    """
    labels = {"init": "cloud-init", "firmware": request[FIRMWARE]}
    if request[ROOT]:
        labels[LABEL] = _SCRIPTS[request[ROOT]]
    name, arch = _name(printable(PurePath(file.path).name, _MAX_NAME), request), os.uname().machine
    return Image(name, "linux", "disk", arch, "", _DISK_RAM, labels=labels, source=file.path)


def refuse_sudo(request: JobRequest) -> Refusal | None:
    """Return the refusal of ``root=true`` if virtiofsd has no option ``--translate-uid``.

    Called on the submit host and on the node.
    """
    if request[ROOT] != SUDO or _translates_ids():
        return None
    return Refusal(
        "needs virtiofsd 1.13 or later, because both you and root of the guest use your files. "
        "This machine has an older version (Debian 12 has no other)",
        key=ROOT.key,
        value=SUDO,
        fix=f"write {ROOT.key}={SCRIPT}, or use Debian 13",
    )


def _translates_ids() -> bool:
    """Return whether this machine's virtiofsd has the option ``--translate-uid``.

    Also return True on a submit host without virtiofsd: then only the node can check this.
    """
    from vtorque_core.live.node_setup import VIRTIOFSD  # noqa: PLC0415 - few jobs need it

    is_root = os.geteuid() == 0
    if not is_root and not os.path.lexists(VIRTIOFSD):
        return True
    try:
        return "--translate-uid" in run_tool(VIRTIOFSD, "--help", timeout=10)
    except HostFault:  # the version of Debian 12 fails for a user with several groups
        if is_root:
            raise
        return False


def require_allowed(value: str, root: str, site: Site) -> None:
    """Raise Refused if the site's settings do not allow this image with this option ``root``."""
    if refused := policy_refusal(value, root, site):
        raise Refused(refused)
