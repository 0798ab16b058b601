"""Inspect a raw disk: partitions, and distribution and kernel of an ext4 root file system.

The result is a hint, not a proof. Unreadable content (XFS, LVM, encryption) is reported to the
user. Nothing is mounted: debugfs(8) reads the file system, confined by
:mod:`vtorque_core.api.confined_tool`.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vtorque_core.api import Refused
from vtorque_core.api.confined_tool import path_of, run
from vtorque_disk_image.copying import create_file
from vtorque_disk_image.formats import check_kernel

_SECTOR = 512
_SECONDS = 60.0  # for one call of debugfs
_MOST_KERNEL = 512 << 20  # bytes of a kernel or an initramfs
_MOST_TEXT = 1 << 20
_ESP = uuid.UUID("c12a7328-f81f-11d2-ba4b-00a0c93ec93b").bytes_le  # UEFI 2.10, 5.3.3
_BIOS_BOOT = uuid.UUID("21686148-6449-6e6f-744e-656564454649").bytes_le  # GRUB's: gptfdisk, ef02
_GPT = 0xEE  # type of the protective MBR's entry: UEFI 2.10, 5.2.3
_KERNEL = re.compile(r"(?:vmlinuz|vmlinux|Image)-([A-Za-z0-9][A-Za-z0-9._+~-]{0,150})", re.ASCII)
_INITRD = ("initrd.img-{}", "initramfs-{}.img", "initrd-{}", "initramfs-{}")
_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,60}", re.ASCII)
# e_machine of elf(5), and the output of uname -m
_MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 243: "riscv64", 22: "s390x"}
FAMILIES = {  # keys: ID and ID_LIKE of os-release(5), and common names in --distro
    **dict.fromkeys(("debian", "ubuntu"), "debian"),
    **dict.fromkeys(("rhel", "redhat", "rocky", "almalinux", "centos", "fedora"), "redhat"),
    **dict.fromkeys(("ol", "oracle"), "redhat"),
}
_PROGRAMS = ("/usr/bin/env", "/bin/busybox", "/usr/lib/systemd/systemd", "/bin/bash")
# Content that is not inspected: name, offset of the magic number, magic number, offset and length
# of the label.
_MARKS = (
    ("XFS", 0, b"XFSB", 108, 12),
    ("Btrfs", 65600, b"_BHRfS_M", 65835, 256),
    ("LVM", 512, b"LABELONE", 0, 0),
    ("LVM", 0, b"LABELONE", 0, 0),
    ("LVM", 1024, b"LABELONE", 0, 0),
    ("LVM", 1536, b"LABELONE", 0, 0),
    ("encrypted (LUKS)", 0, b"LUKS\xba\xbe", 0, 0),
    ("software RAID", 4096, b"\xfc\x4e\x2b\xa9", 4128, 32),
    ("F2FS", 1024, b"\x10\x20\xf5\xf2", 0, 0),
    ("squashfs", 0, b"hsqs", 0, 0),
    ("ISO 9660", 32769, b"CD001", 32808, 32),
    ("swap", 4086, b"SWAPSPACE2", 1052, 16),
    ("FAT", 82, b"FAT32   ", 71, 11),
    ("FAT", 54, b"FAT16   ", 43, 11),
    ("FAT", 54, b"FAT12   ", 43, 11),
    ("NTFS", 3, b"NTFS    ", 0, 0),
)


@dataclass(frozen=True)
class Partition:
    """A partition: start and size in bytes. ``kind`` is its type in the GPT; empty for an MBR."""

    start: int
    size: int
    kind: bytes = b""


@dataclass
class DiskFacts:
    """The detected properties of a disk. ``notes`` tell the user what could not be read."""

    distro: str = ""
    arch: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    kernel: str = ""
    initrd: str = ""
    cmdline: str = ""
    firmware: str = ""
    notes: list[str] = field(default_factory=list)


def partitions(descriptor: int, size: int) -> list[Partition]:
    """Return the partitions of a raw disk, or the whole disk if it has none.

    Supports MBR (four primary entries) and GPT (UEFI 2.10, 5.3). Raises Refused if a partition ends
    beyond the disk, because the file is then truncated.
    """
    head = os.pread(descriptor, 2 * _SECTOR, 0)
    found = []
    # As in Linux, block/partitions/msdos.c: boot indicators other than 0 and 0x80 are code of a
    # boot sector, not a partition table.
    if head[510:512] == b"\x55\xaa" and all(head[at] in (0, 0x80) for at in range(446, 510, 16)):
        for at in range(446, 510, 16):
            kind, first, count = head[at + 4], *struct.unpack_from("<II", head, at + 8)
            if kind == _GPT:
                found = list(_gpt(descriptor))
                break
            if kind and count:
                found.append(Partition(first * _SECTOR, count * _SECTOR))
    for part in found:
        if part.start + part.size > size:
            end = (part.start + part.size) >> 20
            raise Refused(
                f"is truncated: a partition ends at {end} MiB, but the disk has {size >> 20} MiB"
            )
    return found or [Partition(0, size)]


def _gpt(descriptor: int) -> Iterator[Partition]:
    header = os.pread(descriptor, 92, _SECTOR)
    if header[:8] != b"EFI PART":
        raise Refused(
            "has an invalid partition table: the boot sector announces a GPT, which is missing"
        )
    at, count, length = struct.unpack_from("<QII", header, 72)
    if not 128 <= length <= 4096 or count > 1024 or at > 1 << 40:
        raise Refused("has an invalid partition table: a GPT with impossible sizes")
    table = os.pread(descriptor, count * length, at * _SECTOR)
    for offset in range(0, len(table) - length + 1, length):
        kind = table[offset : offset + 16]
        first, last = struct.unpack_from("<QQ", table, offset + 32)
        if kind != bytes(16) and last >= first:
            yield Partition(first * _SECTOR, (last - first + 1) * _SECTOR, kind)


def _firmware(parts: list[Partition]) -> str:
    """Return ``efi`` if an EFI partition exists but no BIOS boot partition; otherwise ``bios``."""
    kinds = {part.kind for part in parts}
    return "efi" if _ESP in kinds and _BIOS_BOOT not in kinds else "bios"


def inspect_disk(descriptor: int, size: int) -> tuple[DiskFacts, int | None]:
    """Return the properties of a raw disk, and the offset of its root file system in bytes.

    The offset is None if no readable root file system was found. Raises Refused for a truncated
    disk.
    """
    found = DiskFacts()
    parts = partitions(descriptor, size)
    found.firmware = _firmware(parts)
    readable = [p.start for p in parts if _ext(descriptor, p.start) is not None]
    for start in readable:
        disk = _Ext(descriptor, start)
        release = disk.text("/usr/lib/os-release") or disk.text("/etc/os-release")
        if release:
            _facts(found, disk, release)
            return found, start
    whole = parts == [Partition(0, size)]
    seen = [
        what if whole else f"{what} (partition {number})"
        for number, part in enumerate(parts, 1)
        if (what := _content(descriptor, part.start))
    ]
    found.notes.append(
        f"no known operating system was found: {', '.join(seen) or 'no known file system'}"
    )
    return found, None


def _content(descriptor: int, start: int) -> str:
    """Return the type and label of a partition's content, such as a file system; empty if unknown.

    Magic numbers and labels are as in blkid(8) (util-linux, libblkid/src/superblocks).
    """
    if _ext(descriptor, start) is not None:
        return "ext4 without os-release" + _label(descriptor, start + 1024 + 120, 16)
    for name, at, mark, label, length in _MARKS:
        if os.pread(descriptor, len(mark), start + at) == mark:
            return name + (_label(descriptor, start + label, length) if length else "")
    return ""


def _label(descriptor: int, at: int, length: int) -> str:
    text = os.pread(descriptor, length, at).split(b"\0")[0].decode("ascii", "replace").strip()
    return f" {text!r}" if text else ""


def _facts(found: DiskFacts, disk: _Ext, release: str) -> None:
    values = _os_release(release)
    name = values.get("ID", "").lower()
    found.distro = name if _ID.fullmatch(name) else ""
    like = (name, *values.get("ID_LIKE", "").lower().split())
    family = next((FAMILIES[word] for word in like if word in FAMILIES), "")
    if family:
        found.labels["family"] = family
    if disk.exists("/usr/bin/cloud-init"):
        found.labels["init"] = "cloud-init"
    else:
        found.notes.append("no cloud-init: a Linux guest needs cloud-init or vTorque's agent")
    found.arch = next((arch for p in _PROGRAMS if (arch := _machine(disk.data(p)))), "")
    boot = set(disk.names("/boot"))
    kernels = {m[1]: name for name in boot if (m := _KERNEL.fullmatch(name))}
    for version in sorted(kernels, key=_order, reverse=True):
        initrd = next((n for each in _INITRD if (n := each.format(version)) in boot), "")
        if initrd:
            found.kernel, found.initrd = f"/boot/{kernels[version]}", f"/boot/{initrd}"
            found.cmdline = f"root=UUID={disk.uuid} rw"  # /etc/fstab may not name the root
            return
    found.notes.append("no kernel with an initramfs in /boot: the image boots with its boot loader")


def extract(descriptor: int, start: int, path: str, target: Path) -> None:
    """Write a file of the ext4 file system at offset ``start`` to ``target``. Raises Refused."""
    with create_file(target) as out:
        _Ext(descriptor, start).dump(path, out)
        if os.fstat(out).st_size == 0:
            raise Refused(f"cannot read {path} in the disk")


def _ext(descriptor: int, start: int) -> str | None:
    """Return the UUID of an ext2/3/4 file system (superblock at 1024: ext4(5)), or None."""
    block = os.pread(descriptor, 120, start + 1024)
    if len(block) < 120 or block[56:58] != b"\x53\xef":
        return None
    return str(uuid.UUID(bytes=block[104:120]))


class _Ext:
    def __init__(self, descriptor: int, start: int) -> None:
        self.descriptor = descriptor
        self.where = f"{path_of(descriptor)}?offset={start}"
        self.uuid = _ext(descriptor, start) or ""

    def _ask(self, request: str, *files: int, most: int = 0) -> str:
        argv = ("debugfs", "-c", "-R", request, self.where)
        files = (self.descriptor, *files)
        return run(*argv, files=files, most=most, seconds=_SECONDS)

    def text(self, path: str) -> str:
        try:
            return self._ask(f"cat {path}")[:_MOST_TEXT]
        except Refused:
            return ""

    def data(self, path: str) -> bytes:
        """Return the first 64 bytes of a file. Symbolic links to directories are followed."""
        return self.text(path)[:64].encode("utf-8", "surrogateescape")

    def exists(self, path: str) -> bool:
        return "Inode:" in self.text_of_stat(path)

    def text_of_stat(self, path: str) -> str:
        try:
            return self._ask(f"stat {path}")
        except Refused:
            return ""

    def names(self, path: str) -> list[str]:
        """Return the names in a directory (debugfs prints ``/inode/mode/uid/gid/name/size/``)."""
        try:
            rows = self._ask(f"ls -p {path}").splitlines()
        except Refused:
            return []
        return [parts[5] for row in rows if len(parts := row.split("/")) >= 7]

    def dump(self, path: str, target: int) -> None:
        self._ask(f"dump {path} {path_of(target)}", target, most=_MOST_KERNEL)


def _os_release(text: str) -> dict[str, str]:
    values = {}
    for line in text.splitlines()[:200]:
        key, equals, value = line.partition("=")
        try:
            words = shlex.split(value) if equals else []
        except ValueError:
            continue
        if words and key.isidentifier():
            values[key] = words[0]
    return values


def _machine(head: bytes) -> str:
    if head[:4] != b"\x7fELF" or len(head) < 20:
        return ""
    order = "<" if head[5] == 1 else ">"
    return _MACHINES.get(struct.unpack_from(f"{order}H", head, 18)[0], "")


def _order(version: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key by which 6.1.0-9 precedes 6.1.0-10."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.findall(r"[0-9]+|[^0-9]+", version)
    )


def kernel_arch(head: bytes) -> str:
    """Return the architecture of a kernel by its first bytes, or an empty string."""
    check_kernel(head)
    if head[0x202:0x206] == b"HdrS":
        return "x86_64"
    return "aarch64" if head[56:60] == b"ARM\x64" else _machine(head)
