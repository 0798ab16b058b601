"""The micro image: Debian's cloud kernel and an initramfs with busybox, bash and the agent.

It has no disk: a guest runs from memory and is ready in under 2 s, even under emulation. The build
is reproducible. Runs as root in ``vmgr images build <name> micro``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

from vtorque_core.api import Refused, run_tool
from vtorque_core.api.image_builder import BuiltImage
from vtorque_linux_guest.agent.build import built_agent
from vtorque_linux_guest.guest.agent_start import AGENT
from vtorque_linux_guest.image.initramfs import InitramfsTree, add_modules
from vtorque_linux_guest.image.kernel import (
    KernelPackage,
    architecture,
    debs_directory,
    fetch,
    fetch_kernel,
    program,
    unpack,
    vmlinux,
)

# Loaded at boot, in this order: first what the agent and the seed need.
BOOT_MODULES = (
    *("virtio_pci", "virtio_console", "virtio_blk", "isofs"),
    *("virtio_net", "virtiofs", "virtio_rng"),
)
# Included for jobs that request them.
MORE_MODULES = ("overlay",)

# See the kernel's admin-guide/kernel-parameters.rst. A panic reboots, and for libvirt a reboot ends
# the guest. The other words shorten an emulated boot: self-tests of ciphers take 0.3 s, patching
# the kernel for a single processor 0.2 s, and creating the thousands of files of tracefs 0.2 s.
# A kernel without these initcalls ignores their names.
CMDLINE = (
    "console=ttyS0 quiet panic=-1 cryptomgr.notests=1 noreplace-smp"
    " initcall_blacklist=tracer_init_tracefs,init_kprobe_trace"
)
MIN_RAM_MIB = 128

_STREAMS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
DEV_DIRECTORIES = ("pts", "shm", "virtio-ports")
"""Directories in /dev that udev and systemd create in a distribution."""
DEV_LINKS = {name: f"/proc/self/fd{end}" for name, end in _STREAMS.items()}
"""Links there, with their targets."""

_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "shadow": "root:*:::::::\nnobody:*:::::::\n",
    "shells": "/bin/sh\n/bin/bash\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
    "fstab": (
        "proc /proc proc nosuid,nodev,noexec 0 0\n"
        "sysfs /sys sysfs nosuid,nodev,noexec 0 0\n"
        "devpts /dev/pts devpts nosuid,noexec,gid=5,mode=0620,ptmxmode=0666 0 0\n"
        "tmpfs /dev/shm tmpfs nosuid,nodev,mode=1777 0 0\n"
        "tmpfs /run tmpfs nosuid,nodev,mode=0755 0 0\n"
    ),
    "profile": (
        "export PATH=/usr/local/bin:/usr/bin:/bin\n"
        "[ ! -O / ] || PATH=/usr/local/sbin:/usr/sbin:/sbin:$PATH\n"  # root; id is a process
        "for file in /etc/profile.d/*.sh; do\n"
        '    [ ! -r "$file" ] || . "$file"\n'
        "done\n"
        "unset file\n"
    ),
}


class MicroBuilder:
    """Builds the micro image; see :class:`vtorque_core.api.image_builder.Builder`."""

    def build(
        self, arguments: Mapping[str, str], staging: Path, progress: Callable[[str], None]
    ) -> BuiltImage:
        """Build kernel and initramfs into ``staging``. Raises Refused and HostFault.

        Options: ``modules=a,b``: additional kernel modules; ``debs=DIR``: use the packages in this
        directory and download nothing.
        """
        unknown = sorted(set(arguments) - {"modules", "debs"})
        if unknown:
            raise Refused(f"micro has no option {unknown[0]}; its options are modules and debs")
        modules = [m for m in arguments.get("modules", "").split(",") if m]
        debs = debs_directory(arguments)
        _, arch = architecture()
        with tempfile.TemporaryDirectory(prefix="vtorque-micro-") as name:
            scratch = Path(name)
            kernel = fetch_kernel(scratch, progress, debs)
            progress("extracting the kernel")
            (staging / "vmlinux").write_bytes(vmlinux(kernel))
            progress("building the initramfs")
            tree = _tree(kernel, scratch, debs, modules)
            (staging / "initrd").write_bytes(tree.compressed())
        return BuiltImage(
            guest_type="linux",
            distro="micro",
            arch=arch,
            min_ram_mib=MIN_RAM_MIB,
            kernel="vmlinux",
            initrd="initrd",
            cmdline=CMDLINE,
            labels={"init": "micro", "kernel": f"{kernel.package} {kernel.version}"},
        )


def _tree(
    kernel: KernelPackage, scratch: Path, debs: Path | None, modules: list[str]
) -> InitramfsTree:
    tree = InitramfsTree()
    for path in ("proc", "sys", "dev", "run", "mnt", "home", "etc/profile.d", "var/log"):
        tree.directory(path)
    tree.directory("root", 0o700)
    tree.directory("tmp", 0o1777)
    tree.directory("var/tmp", 0o1777)
    tree.link("var/run", "/run")
    for path in DEV_DIRECTORIES:
        tree.directory(f"lib/vtorque/dev/{path}")
    for link, target in DEV_LINKS.items():
        tree.link(f"lib/vtorque/dev/{link}", target)
    _add_programs(tree, scratch, debs)
    tree.file(AGENT.lstrip("/"), built_agent(scratch), 0o755)
    carried = [*BOOT_MODULES, *MORE_MODULES, *modules]
    add_modules(tree, kernel, carried)
    init = files("vtorque_linux_guest.guest").joinpath("micro_init").read_text("utf-8")
    tree.file("init", init.replace("@MODULES@", " ".join(BOOT_MODULES)).encode(), 0o755)
    for name, content in _ETC.items():
        tree.file(f"etc/{name}", content.encode(), 0o600 if name == "shadow" else 0o644)
    tree.file("etc/os-release", _os_release(kernel).encode())
    return tree


def _add_programs(tree: InitramfsTree, scratch: Path, debs: Path | None) -> None:
    unpacked = scratch / "programs"
    unpacked.mkdir()
    for deb in fetch(["busybox-static", "bash-static"], scratch, debs):
        unpack(deb, unpacked)
    busybox = program(unpacked, "busybox")
    for applet in run_tool(str(busybox), "--list-full").split():
        tree.link(applet, "/bin/busybox")
    tree.file("bin/busybox", busybox.read_bytes(), 0o755)
    tree.file("bin/bash", program(unpacked, "bash-static").read_bytes(), 0o755)


def _os_release(kernel: KernelPackage) -> str:
    return (
        "ID=vtorque-micro\nID_LIKE=debian\nNAME=vTorque-micro\n"
        f'PRETTY_NAME="vTorque micro guest ({kernel.package})"\n'
    )
