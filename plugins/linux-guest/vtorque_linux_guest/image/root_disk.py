"""Write a file tree to the root disk of an image, a qcow2, without mounting the disk."""

from __future__ import annotations

from pathlib import Path

from vtorque_core.api import HostFault, Refused, confined_tool, run_tool
from vtorque_linux_guest.image.ext4 import write_ext4
from vtorque_linux_guest.image.filetree import FileTree

LABEL = "vtroot"
DISK_TIMEOUT = 600.0  # seconds


def write_disk(tree: FileTree, work: Path, disk: Path, size: int, boot: bytes = b"") -> None:
    """Write the tree to a sparse qcow2, as an ext4 file system of ``size`` MiB.

    ``boot`` has the disk's boot sectors, which precede the file system; empty: no boot sectors.
    Raises Refused if the files do not fit, HostFault if a tool fails.
    """
    raw = work / "root.raw"
    write_ext4(tree, raw, size, LABEL)
    convert_disk(raw, disk, boot)


def convert_disk(raw: Path, disk: Path, boot: bytes = b"") -> None:
    """Check the ext4 file system ``raw`` without privileges, and convert it to the qcow2 ``disk``.

    ``boot`` is as in :func:`write_disk`. Removes ``raw``. Raises HostFault if a tool fails.
    """
    raw.chmod(0o644)  # the tool runs as nobody and reopens the file through its descriptor
    try:
        with raw.open("rb") as file:
            path = confined_tool.path_of(file.fileno())
            argv = ("e2fsck", "-fn", path)
            confined_tool.run(*argv, files=(file.fileno(),), most=0, seconds=DISK_TIMEOUT)
    except (HostFault, Refused) as error:
        raise HostFault(f"vTorque wrote an invalid root disk, which is a bug: {error}") from None
    parts = [raw]
    if boot:
        parts.insert(0, raw.with_suffix(".boot"))
        parts[0].write_bytes(boot)
    # Without -W it writes in order: the same blocks give the same file (qemu-img(1)).
    run_tool(
        *("qemu-img", "convert", "-f", "raw", "-O", "qcow2", *map(str, parts), str(disk)),
        timeout=DISK_TIMEOUT,
    )
    raw.unlink()
