"""The labels of an OSv image, and whether a script can run in it. No I/O.

Labels:

- ``command.<name>``: a named command line.
- ``mounts``: the mount points for shares, separated by ``,``.
- ``root``: the site's share that is the root file system.
- ``rest``: ``true`` if the image has ``/libhttpserver-api.so``.
- ``cloud-init``: ``true`` if the image has ``/usr/mgmt/cloud-init.so``.
- ``nfs``: ``true`` if the image has ``/tools/mount-fs.so`` with NFS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vtorque_core.api import Image, Refusal, Refused
from vtorque_osv import script

COMMAND = "command."
MOUNTS = "mounts"
ROOT = "root"
REST = "rest"
CLOUD_INIT = "cloud-init"
NFS = "nfs"


def named_commands(image: Image) -> Mapping[str, str]:
    """Return the image's command lines by name."""
    labels = image.labels.items()
    return {key.removeprefix(COMMAND): line for key, line in labels if key.startswith(COMMAND)}


def has(image: Image, label: str) -> bool:
    """Return whether the image contains an optional part of OSv, according to ``label``."""
    return image.labels.get(label) == "true"


def mount_points(image: Image) -> tuple[str, ...]:
    """Return the mount points for shares."""
    return tuple(path for path in image.labels.get(MOUNTS, "").split(",") if path)


def check_script(content: bytes, image: Image) -> Iterable[Refusal]:
    """Return the reasons why the script cannot run in a guest of this image; empty if it can."""
    try:
        script.parse(content, named_commands(image))
    except Refused as error:
        return error.refusals
    return ()
