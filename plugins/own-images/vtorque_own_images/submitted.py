"""The image of a submitted value: the site's kernel, and a disk that is the user's file.

The value is untrusted, and nothing opens the file here. A process of the user serves it to QEMU.
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
"""Serial number of the disk with the user's file. The base image's initramfs finds it by that."""
SUID = "vtorque.suid=1"
"""Word of the kernel command line with which setuid programs of the image work."""
_FILE = re.compile(rf".*/([0-9a-f]{{64}}){re.escape(SUFFIX)}", re.ASCII)


def image(request: JobRequest, site: Site, pool: Callable[[str], Image]) -> Image:
    """Return the image of a request, whose value :func:`vtorque_own_images.pull.resolve` returned.

    Kernel, initrd, command line and labels are the base image's, with additions of a closed set for
    root=script. Raises Refused.
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
    """Raise Refused on a site with an administrator, which this version does not support."""
    if not is_personal(site):
        raise Refused(refusal(value))
