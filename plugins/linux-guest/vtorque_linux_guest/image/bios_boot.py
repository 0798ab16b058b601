"""A root disk that boots by BIOS, as on a computer: with Debian's kernel and GRUB on the disk.

GRUB's files are built in the image by its own packages. No program of the build machine reads them.
"""

from __future__ import annotations

import struct
from dataclasses import replace

from vtorque_core.api import Refused
from vtorque_linux_guest.image.filetree import FileTree
from vtorque_linux_guest.image.recipe import LinuxRecipe
from vtorque_linux_guest.image.root_disk import LABEL

START = 1 << 20
"""Byte at which the only partition begins. GRUB is in the sectors before it."""
PACKAGES = ("linux-image-cloud-amd64", "initramfs-tools", "grub-pc-bin")
_SECTOR = 512
_BOOT, _CORE = "usr/lib/grub/i386-pc/boot.img", "boot/grub/core.img"
# (hd0,msdos1): BIOS numbers the disk from which it boots first. net.ifnames=0: the seed's
# network-config calls the NICs eth0, ... (systemd.link(5)).
_COMMAND = f"""
mkdir -p /boot/grub
cat >/boot/grub/grub.cfg <<'END'
linux /vmlinuz root=LABEL={LABEL} rw console=ttyS0 quiet net.ifnames=0
initrd /initrd.img
boot
END
grub-mkimage -O i386-pc -p '(hd0,msdos1)/boot/grub' -o /{_CORE} \\
  biosdisk part_msdos ext2 normal linux
"""


def with_boot_loader(recipe: LinuxRecipe) -> LinuxRecipe:
    """Return the recipe with the packages and the command that put kernel and GRUB on the disk."""
    return replace(
        recipe, packages=(*recipe.packages, *PACKAGES), commands=(*recipe.commands, _COMMAND)
    )


def boot_sectors(tree: FileTree, size: int) -> bytes:
    """Return the first :data:`START` bytes of a disk with one partition of ``size`` MiB.

    Sector 0 has GRUB's boot.img and the partition table. boot.img loads the rest of GRUB from
    sector 1 on (GRUB manual, "Images"). Raises Refused if the tree does not contain GRUB.
    """
    found = [tree.find(path) for path in (_BOOT, _CORE)]
    boot, core = (b"" if node is None else node.read(START) for node in found)
    if len(boot) != _SECTOR or not core or len(core) > START - _SECTOR:
        raise Refused(f"the packages do not contain GRUB for BIOS ({_BOOT}, {_CORE})")
    # Entry of a Linux partition; no CHS addresses, because GRUB and Linux use LBA.
    entry = (0x80, b"", 0x83, b"", START // _SECTOR, (size << 20) // _SECTOR)
    table = struct.pack("<B3sB3sII", *entry).ljust(64, b"\0")
    return (boot[:446] + table + b"\x55\xaa" + core).ljust(START, b"\0")
