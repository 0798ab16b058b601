"""The image of a submitted ``-vm img=`` value: the base image's kernel and the user's squashfs.

The value is untrusted. This module does not open the file: a user process serves it to QEMU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from vtorque_core.api import Image, JobRequest, Refused
from vtorque_core.api.node_job import Site
from vtorque_core.api.values import is_personal
from vtorque_core.api.vm_options import IMG, disk_path
from vtorque_own_images.plugin import BASE, ROOT, refusal

SUFFIX = ".squashfs"
SERIAL = "vtown"
"""Serial number by which the base image's initramfs finds the disk with the user's squashfs."""
SUID = "vtorque.suid=1"
"""Word of the kernel command line that enables setuid programs of the image."""
_FILE = re.compile(rf".*/([0-9a-f]{{64}}){re.escape(SUFFIX)}", re.ASCII)


def image(request: JobRequest, site: Site, pool: Callable[[str], Image]) -> Image:
    """Return the image for a request that :func:`vtorque_own_images.pull.resolve` has resolved.

    Kernel, initrd, command line and labels are those of the base image. With ``root=script``, the
    command line enables setuid programs, and the label ``script`` is set. Raises Refused.
    """
    value = request[IMG]
    require_possible(value, site)
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
    base = replace(pool(BASE), name=f"own:{found[1][:12]}", source=value)
    if not request[ROOT]:
        return base
    labels = {**base.labels, "script": "root"}
    return replace(base, cmdline=f"{base.cmdline} {SUID}".strip(), labels=labels)


def require_possible(value: str, site: Site) -> None:
    """Raise Refused on a site with an administrator, where own images are not supported yet."""
    if not is_personal(site):
        raise Refused(refusal(value))
