"""Compose a disk for OSv: a boot record, optionally a loader, and one ROFS partition.

OSv finds its file system in the second entry of the boot record (drivers/blk-common.cc,
scripts/imgedit.py). Its boot code for the BIOS reads the NUL-terminated command line at byte 512
(arch/x64/boot16.S).
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import BinaryIO

from vtorque_core.api import Refused
from vtorque_osv import rofs

SECTOR = 512
ALIGN = 2 << 20  # bytes; where OSv's own images have their partitions
BOOT_LINE = 512
"""Offset in bytes of a bootable disk's command line."""

MAX_BOOT_LINE = 1023  # bytes: max_cmdline of OSv (include/osv/commands.hh) less its NUL
_ENTRY = 0x1BE + 16
_SIGNATURE = 0x1FE
_LINUX = 0x83


def write_disk(tree: rofs.RofsTree, out: Path, loader: Path | None = None) -> None:
    """Write a raw disk with the tree as its root file system.

    ``loader`` is OSv's ``loader.img`` for a bootable disk, or None for direct kernel boot. Raises
    Refused for a loader without a boot record.
    """
    with out.open("wb+") as file:
        if loader is None:
            file.write(bytes(SECTOR))
        else:
            with loader.open("rb") as source:
                shutil.copyfileobj(source, file)
            file.seek(_SIGNATURE)
            if file.read(2) != b"\x55\xaa":
                raise Refused(f"{loader}: has no boot record, so it is not a loader.img")
        start = -(-max(file.seek(0, 2), 1) // ALIGN) * ALIGN
        file.seek(start)
        size = rofs.write(tree, file)
        _partition(file, start, size)


def _partition(file: BinaryIO, start: int, size: int) -> None:
    """Write the partition entry: type, first sector, number of sectors.

    The CHS fields have their maximum, which means "not representable". OSv skips an entry whose
    starting sector is 0 (fs/devfs/device.cc).
    """
    beyond, first, count = b"\xfe\xff\xff", start // SECTOR, size // SECTOR
    entry = struct.pack("<B3sB3sII", 0, beyond, _LINUX, beyond, first, count)
    file.seek(_ENTRY)
    file.write(entry)
    file.seek(_SIGNATURE)
    file.write(b"\x55\xaa")
