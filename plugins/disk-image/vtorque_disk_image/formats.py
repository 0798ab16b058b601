"""Detect and check the format of a disk by its first bytes, without tools.

A disk can refer to other files (a backing file, extents, a data file), which QEMU's tools then
open. A user could read /etc/shadow by naming it in a disk. Therefore this module checks headers
before QEMU's tools run, and refuses disks that refer to other files.
"""

from __future__ import annotations

import os
import struct
from array import array
from typing import Literal

from vtorque_core.api import Refused
from vtorque_core.api.qcow2 import HEADER, MAGIC, check_qcow2

Format = Literal["qcow2", "vmdk", "vhdx", "raw"]
FORMATS: tuple[Format, ...] = ("qcow2", "vmdk", "vhdx", "raw")

_ALONE = "convert it to a single file: qemu-img convert"
_VMDK = struct.Struct("<4sIIQQQQIQQQ")  # "VMware Virtual Disk Format 5.0", SparseExtentHeader
_VMDK_ENTRIES = 512  # of each grain table
_VMDK_PACKED = 1 << 16  # flag: grains are compressed; a truncated grain cannot be unpacked
_MOST_TABLES = 1 << 20  # grain tables; each describes 32 MiB if grains have 64 KiB
_VMDK_DESCRIPTOR = 20 * 512  # bytes that QEMU 7.2 reads of it: block/vmdk.c, DESC_SIZE
_MOST_DESCRIPTOR = 1 << 20
_AT_END = (1 << 64) - 1
_OTHER = {
    b"\x1f\x8b": "a gzip file: unpack it first",
    b"PK\x03\x04": "a zip file: unpack it first",
    b"\xfd7zXZ\0": "an xz file: unpack it first",
    b"BZh": "a bzip2 file: unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd file: unpack it first",
    b"COWD": f"an ESX disk in several files: {_ALONE} -O qcow2",
    b"# Disk DescriptorFile": f"a description of other files: {_ALONE} -O qcow2",
    b"conectix": "a disk of the old VHD format: qemu-img convert -O qcow2",
    b"<<< ": "a VirtualBox disk: qemu-img convert -O qcow2",
    b"LUKS\xba\xbe": "encrypted",
    b"#!": "a script",
}


def detect(descriptor: int) -> Format | Literal["elf"]:
    """Detect a file's format by its first bytes. ``elf`` is a kernel that needs no disk.

    Raises Refused for an unknown format.
    """
    head = os.pread(descriptor, 70000, 0)
    if head.startswith(MAGIC):
        return "qcow2"
    if head.startswith(b"KDMV"):
        return "vmdk"
    if head.startswith(b"vhdxfile"):
        return "vhdx"
    if head.startswith(b"\x7fELF"):
        return "elf"
    for magic, what in _OTHER.items():
        if head.startswith(magic):
            raise Refused(f"is {what}")
    if head[257:262] == b"ustar":
        raise Refused("is a tar file: unpack it first")
    if _looks_raw(head):
        return "raw"
    raise Refused(
        "is not a known disk format: qcow2, vmdk, vhdx, or a raw disk with a partition table "
        "or file system; for any other raw disk use --format raw"
    )


def _looks_raw(head: bytes) -> bool:
    """Return True if the data begins with a boot sector, GPT, or known file system."""
    return (
        head[510:512] == b"\x55\xaa"
        or head[512:520] == b"EFI PART"
        or head[4096:4104] == b"EFI PART"
        or head[1080:1082] == b"\x53\xef"
        or head.startswith(b"XFSB")
        or head[65600:65608] == b"_BHRfS_M"
        or head[32769:32774] == b"CD001"
    )


def check(descriptor: int, kind: str, most: int) -> None:
    """Check that a disk is complete, refers to no other file, and has at most ``most`` bytes.

    Checks only headers. A vhdx is not checked at all: its size must be checked with qemu-img.
    Raises Refused.
    """
    size = os.fstat(descriptor).st_size
    if kind == "qcow2":
        check_size(check_qcow2(os.pread(descriptor, HEADER, 0), size), most)
    elif kind == "vmdk":
        _check_vmdk(descriptor, size, most)
    elif kind == "raw":
        check_size(size, most)


def check_size(size: int, most: int) -> None:
    """Raise Refused if a disk is empty, or larger than the site's limit in bytes."""
    if size > most:
        limit = f"{most >> 20} MiB, set with [images] max_disk"
        raise Refused(f"is a disk of {size >> 20} MiB, more than allowed (limit: {limit})")
    if size <= 0:
        raise Refused("is a disk of size 0")


def _check_vmdk(descriptor: int, file_size: int, most: int) -> None:
    offset = 0
    at_end = _check_vmdk_header(descriptor, offset, file_size, most)
    if at_end:  # streamOptimized: QEMU uses the header before the end marker (the footer)
        if file_size < 1536:
            raise Refused("is a truncated vmdk")
        _check_vmdk_header(descriptor, file_size - 1024, file_size, most)


def _check_vmdk_header(descriptor: int, offset: int, file_size: int, most: int) -> bool:
    """Check a vmdk's header and description; return True if QEMU reads the footer instead."""
    data = os.pread(descriptor, _VMDK.size, offset)
    if len(data) < _VMDK.size:
        raise Refused("is a truncated vmdk")
    magic, _, flags, capacity, grain, where, length, _, _, directory, _ = _VMDK.unpack(data)
    if magic != b"KDMV":
        raise Refused("is a truncated vmdk: the footer is missing")
    if capacity == 0:
        raise Refused(f"is a vmdk that describes other files; {_ALONE}")
    check_size(capacity * 512, most)
    if where:
        wanted = min(max(length * 512, _VMDK_DESCRIPTOR), _MOST_DESCRIPTOR)
        if where * 512 >= file_size:
            raise Refused("is a truncated vmdk: its description is beyond the end of the file")
        _check_vmdk_descriptor(os.pread(descriptor, wanted, where * 512))
    whole = grain and directory * 512 < file_size and not flags & _VMDK_PACKED
    if whole and _last_grain(descriptor, directory, capacity // grain) + grain * 512 > file_size:
        raise Refused("is a truncated vmdk: its data is beyond the end of the file")
    return bool(directory == _AT_END)


def _last_grain(descriptor: int, directory: int, grains: int) -> int:
    """Return the offset in bytes of a vmdk's last grain of data, or 0 if it has no data.

    From this offset, the caller detects a truncated last grain, which QEMU reads as zeros. qemu-img
    check(1) detects all other truncations.
    """
    tables = _numbers(descriptor, directory * 512, grains // _VMDK_ENTRIES + 1)
    found = (max(_numbers(descriptor, at * 512, _VMDK_ENTRIES), default=0) for at in tables if at)
    return max(found, default=0) * 512


def _numbers(descriptor: int, offset: int, count: int) -> array[int]:
    data = os.pread(descriptor, min(count, _MOST_TABLES) * 4, offset)
    return array("I", data[: len(data) // 4 * 4])


def _check_vmdk_descriptor(text: bytes) -> None:
    if b"parentfilenamehint" in text.lower():
        raise Refused(f"has a backing file; {_ALONE}")
    lines = [line.split() for line in text.split(b"\0", 1)[0].splitlines()]
    extents = [words for words in lines if words and words[0] in (b"RW", b"RDONLY", b"NOACCESS")]
    if len(extents) > 1 or any(len(e) < 3 or e[2] != b"SPARSE" for e in extents):
        raise Refused(f"is a vmdk in several files; {_ALONE}")


def check_kernel(head: bytes) -> None:
    """Check that a file begins like a kernel that QEMU can boot. Raises Refused.

    Supported are bzImage (Documentation/arch/x86/boot.rst), ELF and arm64 Image.
    """
    if not (head[0x202:0x206] == b"HdrS" or head[:4] == b"\x7fELF" or head[56:60] == b"ARM\x64"):
        raise Refused("is not a kernel: it must be a bzImage, an ELF file or an arm64 Image")
