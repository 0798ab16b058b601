"""The initramfs of images with a root disk: it mounts the disk and runs the disk's init."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from vtorque_linux_guest.image import micro_builder
from vtorque_linux_guest.image.initramfs import InitramfsTree, add_modules
from vtorque_linux_guest.image.kernel import KernelPackage, fetch, program, unpack

# net.ifnames=0: the seed's network-config calls the NICs eth0, ... (systemd.link(5)).
CMDLINE = f"{micro_builder.CMDLINE} net.ifnames=0 rw"

# ext4 is built into Debian's cloud kernel, so it is omitted there. In the generic kernel it is a
# module, which requests crc32c by name.
INITRD_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")


def disk_initramfs(
    kernel: KernelPackage,
    work: Path,
    init: str,
    modules: Sequence[str],
    debs: Path | None = None,
    script: str = "",
) -> bytes:
    """Return an initramfs that mounts the root disk and runs ``init``, a path on this disk.

    The initramfs contains only busybox, the modules and a script. ``script`` replaces the default
    script and may contain the placeholders ``@MODULES@`` and ``@INIT@``. Raises HostFault.
    """
    tree = InitramfsTree()
    for path in ("dev", "proc", "sys", "root", "mnt"):
        tree.directory(path)
    tree.file("bin/busybox", busybox(work, debs).read_bytes(), 0o755)
    for applet in ("modprobe", "mount", "poweroff", "sleep", "switch_root"):
        tree.link(f"sbin/{applet}", "/bin/busybox")
    loaded = add_modules(tree, kernel, modules)
    text = script or files("vtorque_linux_guest.guest").joinpath("disk_init").read_text("utf-8")
    text = text.replace("@MODULES@", " ".join(loaded)).replace("@INIT@", init)
    tree.file("init", text.encode(), 0o755)
    return tree.compressed()


def busybox(work: Path, debs: Path | None = None) -> Path:
    """Unpack Debian's static busybox and return its path. Raises HostFault."""
    programs = work / "programs"
    if not programs.exists():
        programs.mkdir()
        unpack(fetch(["busybox-static"], work, debs)[0], programs)
    return program(programs, "busybox")
