"""The first sectors of a disk that BIOS boots, without booting it."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from vtorque_core.api import Refused
from vtorque_linux_guest.image.bios_boot import PACKAGES, START, boot_sectors, with_boot_loader
from vtorque_linux_guest.image.filetree import FileTree
from vtorque_linux_guest.image.recipe import LinuxRecipe
from vtorque_linux_guest.image.root_disk import write_disk

BOOT, CORE = b"boot".ljust(510, b"b") + b"\x55\xaa", b"core" * 1000
PLACES = ("usr/lib/grub/i386-pc/boot.img", "boot/grub/core.img")


def grub(boot: bytes = BOOT, core: bytes = CORE) -> FileTree:
    tree = FileTree()
    for path, content in zip(PLACES, (boot, core), strict=True):
        tree.file(path, content)
    return tree


def test_disk_has_grub_then_a_partition_with_the_files(tmp_path: Path) -> None:
    tree, disk = grub(), tmp_path / "root.qcow2"
    write_disk(tree, tmp_path, disk, 16, boot_sectors(tree, 16))
    raw = tmp_path / "again.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", disk, raw], check=True, timeout=60)
    data = raw.read_bytes()
    assert len(data) == START + (16 << 20)
    assert data[:446] == BOOT[:446]
    assert data[510 : 512 + len(CORE)] == b"\x55\xaa" + CORE
    first, kind, start, count = struct.unpack("<B3xB3xII", data[446:462])
    assert (first, kind, start * 512, count * 512) == (0x80, 0x83, START, 16 << 20)
    assert data[462:510] == bytes(48)
    assert data[START + 1024 + 0x38 :][:2] == b"\x53\xef"  # ext4's magic number


@pytest.mark.parametrize(
    "tree", [FileTree(), grub(boot=b"short"), grub(core=b""), grub(core=bytes(START))]
)
def test_image_without_grub_is_refused(tree: FileTree) -> None:
    with pytest.raises(Refused, match="do not contain GRUB for BIOS"):
        boot_sectors(tree, 16)


def test_recipe_gets_packages_and_command_of_the_boot_loader() -> None:
    recipe = with_boot_loader(LinuxRecipe("debian", "trixie", ("sudo",), commands=("make",)))
    assert recipe.packages == ("sudo", *PACKAGES)
    first, command = recipe.commands
    assert first == "make"
    script = ["sh", "-n", "-c", command]
    assert subprocess.run(script, check=True, timeout=60, capture_output=True).stderr == b""
    assert "root=LABEL=vtroot" in command
