"""A disk that BIOS boots: Debian in its default form, without vTorque's agent, and GRUB."""

import struct
import subprocess
from pathlib import Path

from vtorque_linux_guest.image.distribution import BASE, apt_sources

START = 1 << 20  # bytes: start of the only partition
SIZE = 2 << 30  # bytes of the partition
LABEL = "ownroot"
PACKAGES = ("linux-image-cloud-amd64", "initramfs-tools", "sudo", "grub-pc-bin", "grub-common")
MODULES = ("biosdisk", "part_msdos", "ext2", "normal", "linux")
GRUB = f"""linux /vmlinuz root=LABEL={LABEL} rw console=ttyS0 net.ifnames=0
initrd /initrd.img
boot
"""


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
    prefix = ("-O", "i386-pc", "-p", "(hd0,msdos1)/boot/grub")
    _run("chroot", root, "grub-mkimage", *prefix, "-o", "/core.img", *MODULES)
    core = (root / "core.img").read_bytes()
    assert len(core) < START - 512
    boot = bytearray((root / "usr/lib/grub/i386-pc/boot.img").read_bytes())
    # The partition table: one Linux partition. boot.img loads the core from sector 1 by default.
    part = struct.pack("<B3sB3sII", 0x80, b"", 0x83, b"", START // 512, SIZE // 512)
    boot[446:510] = part.ljust(64, b"\0")
    with raw.open("wb") as file:
        file.truncate(START + SIZE)
        file.write(boot[:510] + b"\x55\xaa" + core)
    options = ("-t", "ext4", "-L", LABEL, "-E", f"offset={START}")
    _run("mke2fs", "-q", *options, "-d", root, raw, SIZE >> 10)
    _run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, disk)
    raw.unlink()
    _run("rm", "-rf", "--one-file-system", root)
    return disk


def _run(*argv: object) -> None:
    subprocess.run(
        [str(word) for word in argv], check=True, capture_output=True, timeout=1200, cwd="/"
    )
