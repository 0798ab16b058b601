"""A guest that OVMF boots from the EFI system partition of an added disk.

The disk contains a unified kernel image at the removable medium's path (UEFI 2.10, 3.5.1.1), where
Debian's installer has its boot loader: systemd's EFI stub, micro's kernel in a form that EFI can
start, micro's initramfs.
"""

import json
import struct
import subprocess
import uuid
import zlib

import pytest

from vtorque_linux_guest.image import kernel as debian

pytestmark = [pytest.mark.e2e, pytest.mark.full]

NAME = "efi-boot"
SECTOR, ENTRIES = 512, 128
FIRST, COUNT = 2048, 65536  # sectors of the only partition
TOTAL = FIRST + COUNT + 2048
ESP = uuid.UUID("c12a7328-f81f-11d2-ba4b-00a0c93ec93b")  # UEFI 2.10, table 5-7
# Memory addresses of the stub's parts: kernel and initramfs last, with room for the kernel.
PLACES = {"cmdline": 0x30000, "linux": 0x2000000, "initrd": 0x6000000}


def tool(*argv):
    """Run a tool that must not fail."""
    subprocess.run([str(word) for word in argv], check=True, capture_output=True, timeout=120)


def gpt(disk):
    """Write a GPT (UEFI 2.10, 5.3) with an EFI system partition, and its copy at the end."""
    ids = (ESP.bytes_le, uuid.uuid4().bytes_le, FIRST, FIRST + COUNT - 1)
    table = struct.pack("<16s16sQQ", *ids).ljust(128 * ENTRIES, b"\0")
    identity = uuid.uuid4().bytes_le

    def header(here, there, entries):
        words = (
            b"EFI PART", 0x10000, 92, 0, 0, here, there, 34, TOTAL - 34, identity, entries,
            ENTRIES, 128, zlib.crc32(table),
        )  # fmt: skip
        text = struct.pack("<8sIIIIQQQQ16sQIII", *words)
        return text[:16] + struct.pack("<I", zlib.crc32(text)) + text[20:]

    with disk.open("r+b") as file:
        file.seek(446)  # the protective MBR
        file.write(struct.pack("<B3sB3sII", 0, b"", 0xEE, b"", 1, TOTAL - 1))
        for at, content in (
            (510, b"\x55\xaa"),
            (SECTOR, header(1, TOTAL - 1, 2).ljust(SECTOR, b"\0") + table),
            ((TOTAL - 33) * SECTOR, table + header(TOTAL - 1, 1, TOTAL - 33)),
        ):
            file.seek(at)
            file.write(content)


def unified_kernel(scratch, cmdline, initrd):
    """Return a program that EFI starts: kernel, initramfs and command line in one file."""
    found = debian.fetch_kernel(scratch, lambda _step: None, None)
    debian.unpack(*debian.fetch(["systemd-boot-efi"], scratch), scratch / "stub")
    (scratch / "cmdline").write_text(cmdline)
    parts = {
        "cmdline": scratch / "cmdline",
        "linux": found.root / "boot" / f"vmlinuz-{found.release}",
        "initrd": initrd,
    }
    program = scratch / "BOOTX64.EFI"
    sections = [
        word
        for name, file in parts.items()
        for word in (
            *("--add-section", f".{name}={file}"),
            *("--change-section-vma", f".{name}={PLACES[name]:#x}"),
        )
    ]
    stub = scratch / "stub/usr/lib/systemd/boot/efi/linuxx64.efi.stub"
    tool("objcopy", *sections, stub, program)
    return program


@pytest.fixture
def disk(node, scratch):
    """Return a raw disk with an EFI system partition and nothing else to boot."""
    micro = json.loads(node.root("vmgr", "images", "show", "micro").stdout)
    files = node.state / "images/micro" / micro["version"]
    program = unified_kernel(scratch, micro["cmdline"], files / micro["initrd"])
    path = scratch / "efi.raw"
    with path.open("wb") as file:
        file.truncate(TOTAL * SECTOR)
    gpt(path)
    partition = f"{path}@@{FIRST * SECTOR}"
    tool("mformat", "-i", partition, "-T", COUNT, "-h", 64, "-s", 32, "::")
    tool("mmd", "-i", partition, "::/EFI", "::/EFI/BOOT")
    tool("mcopy", "-i", partition, program, "::/EFI/BOOT/BOOTX64.EFI")
    return path


def test_guest_boots_by_uefi(clean, disk):
    node, known = clean, ("--guest-type", "linux", "--distro", "tiny", "--arch", "x86_64")
    node.root("vmgr", "images", "add", str(disk), NAME, *known, "--label", "init=micro")
    try:
        image = json.loads(node.root("vmgr", "images", "show", NAME).stdout)
        assert (image["kernel"], image["labels"]["firmware"]) == (None, "efi")
        script = "#!/bin/sh\ntest -e /sys/firmware/efi/systab && echo by UEFI\nexit 7\n"
        result = node.job(script, "-vm", f"img={NAME},ram=256M")
        assert (result.code, result.out) == (7, b"by UEFI\n"), result.err
    finally:
        node.root("vmgr", "images", "remove", NAME, "--now", check=False)
