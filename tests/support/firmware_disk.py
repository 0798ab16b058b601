"""A disk that BIOS and UEFI boot: Debian in its default form, without vTorque's agent, and GRUB."""

import struct
import subprocess
from pathlib import Path

from vtorque_linux_guest.image.distribution import BASE, apt_sources

SECTOR = 512
START = 1 << 20  # bytes: start of the first partition
SIZE = 2 << 30  # bytes of the partition
ESP = 16 << 20  # bytes of the second partition, which UEFI reads
LABEL = "ownroot"
PACKAGES = (
    *("linux-image-cloud-amd64", "initramfs-tools", "sudo"),
    *("grub-pc-bin", "grub-efi-amd64-bin", "grub-common"),
)
MODULES = ("part_msdos", "ext2", "normal", "linux")
GRUB = f"""linux /vmlinuz root=LABEL={LABEL} rw console=ttyS0 net.ifnames=0
initrd /initrd.img
boot
"""
FIND = f"search --no-floppy --label {LABEL} --set=root\nset prefix=($root)/boot/grub\n"


def debian_disk(scratch: Path) -> Path:
    """Install Debian 12 in ``scratch``, which needs root and minutes; return the qcow2 file."""
    root, raw, disk = scratch / "root", scratch / "debian.raw", scratch / "debian.qcow2"
    names = ",".join((*BASE["debian"], *PACKAGES))
    network = '--customize-hook=systemctl --root="$1" enable systemd-networkd'
    _run(
        *("mmdebstrap", "--quiet", "--mode=root", "--variant=apt", f"--include={names}"),
        *(network, "bookworm", root, *apt_sources("bookworm")),
    )
    (root / "boot/grub").mkdir(exist_ok=True)
    (root / "boot/grub/grub.cfg").write_text(GRUB)
    (root / "find.cfg").write_text(FIND)
    make = ("chroot", root, "grub-mkimage")
    prefix = ("-p", "(hd0,msdos1)/boot/grub", "-o", "/core.img")
    _run(*make, "-O", "i386-pc", *prefix, "biosdisk", *MODULES)
    config = ("-c", "/find.cfg", "-p", "/boot/grub", "-o", "/BOOTX64.EFI")
    _run(*make, "-O", "x86_64-efi", *config, "search", "search_label", *MODULES)
    core = (root / "core.img").read_bytes()
    assert len(core) < START - SECTOR
    boot = bytearray((root / "usr/lib/grub/i386-pc/boot.img").read_bytes())
    # boot.img loads the core from sector 1 by default.
    boot[446:510] = (_entry(0x83, START, SIZE) + _entry(0xEF, START + SIZE, ESP)).ljust(64, b"\0")
    with raw.open("wb") as file:
        file.truncate(START + SIZE + ESP)
        file.write(boot[:510] + b"\x55\xaa" + core)
    esp = f"{raw}@@{START + SIZE}"
    _run("mformat", "-i", esp, "-T", ESP // SECTOR, "-h", 64, "-s", 32, "::")
    _run("mmd", "-i", esp, "::/EFI", "::/EFI/BOOT")
    _run("mcopy", "-i", esp, root / "BOOTX64.EFI", "::/EFI/BOOT/BOOTX64.EFI")
    options = ("-t", "ext4", "-L", LABEL, "-E", f"offset={START}")
    _run("mke2fs", "-q", *options, "-d", root, raw, SIZE >> 10)
    _run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, disk)
    raw.unlink()
    _run("rm", "-rf", "--one-file-system", root)
    return disk


def _entry(kind: int, start: int, size: int) -> bytes:
    """Return an entry of the partition table, without CHS addresses."""
    active = 0x80 if kind == 0x83 else 0
    return struct.pack("<B3sB3sII", active, b"", kind, b"", start // SECTOR, size // SECTOR)


def _run(*argv: object) -> None:
    subprocess.run(
        [str(word) for word in argv], check=True, capture_output=True, timeout=1200, cwd="/"
    )
