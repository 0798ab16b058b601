"""The root disk of an image, from a tree of files to a qcow2, without mounting anything."""

from __future__ import annotations

from pathlib import Path

from vtorque_core.api import HostFault, run_tool
from vtorque_linux_guest.image.ext4 import write_ext4
from vtorque_linux_guest.image.filetree import FileTree

LABEL = "vtroot"
DISK_TIMEOUT = 600.0  # seconds


def write_disk(tree: FileTree, work: Path, disk: Path, size: int) -> None:
    """Write a qcow2 of ``size`` MiB with the tree as its ext4 file system; sparse.

    Raises Refused if the files do not fit, HostFault if a tool fails.
    """
    raw = work / "root.raw"
    write_ext4(tree, raw, size, LABEL)
    try:
        run_tool("e2fsck", "-fn", str(raw), timeout=DISK_TIMEOUT)
    except HostFault as error:
        raise HostFault(f"the root disk is broken, which is a bug: {error}") from None
    # Without -W it writes in order: the same blocks give the same file (qemu-img(1)).
    run_tool(
        *("qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(disk)),
        timeout=DISK_TIMEOUT,
    )
    raw.unlink()
