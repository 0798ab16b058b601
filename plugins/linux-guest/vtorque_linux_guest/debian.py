"""The Debian image: systemd, cloud-init and sshd on a disk, booted with the cloud kernel directly.

Runs as root in ``vmgr images build <name> debian``; takes one to two minutes. Packages come from
the machine's own apt sources where they have the wanted suite, else from mmdebstrap's default.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from vtorque_core.api import size_mib
from vtorque_core.api_image import BuiltImage
from vtorque_core.api_node import Refused, run_tool
from vtorque_linux_guest import micro
from vtorque_linux_guest.cloudinit import UNIT, agent_unit, start_script
from vtorque_linux_guest.initramfs import Tree, add_modules
from vtorque_linux_guest.kernel import (
    Kernel,
    architecture,
    fetch,
    fetch_kernel,
    need_tools,
    unpack,
    vmlinux,
)

SUITE = "bookworm"
SIZE_MIB = 8192  # of the root disk; it takes the space of what is in it
MIN_RAM_MIB = 256
BOOTSTRAP_TIMEOUT = 1200.0  # seconds
DISK_TIMEOUT = 300.0  # seconds
LABEL = "vtroot"

# net.ifnames=0: the seed's network-config calls the NICs eth0, ... (systemd.link(5)).
CMDLINE = f"{micro.CMDLINE} net.ifnames=0 rw"

# ext4 is built into Debian's cloud kernel and then left out; the generic one has it as a module,
# and what it asks the kernel for by name: crc32c.
INITRD_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")

PACKAGES = (
    *("systemd-sysv", "udev", "kmod", "dbus", "cloud-init", "openssh-server", "iproute2"),
    *("systemd-resolved", "systemd-timesyncd", "ca-certificates", "procps", "less"),
)

# Never of use in a guest that lives for one job: waiting for networks, timers, login prompts.
MASKED = (
    *("systemd-networkd-wait-online.service", "systemd-firstboot.service", "getty@tty1.service"),
    *("serial-getty@ttyS0.service", "apt-daily.timer", "apt-daily-upgrade.timer", "fstrim.timer"),
    *("dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service"),
    *("systemd-random-seed.service", "systemd-pstore.service", "systemd-update-utmp.service"),
    *("systemd-update-utmp-runlevel.service", "systemd-binfmt.service", "modprobe@drm.service"),
    *("modprobe@configfs.service", "modprobe@dm_mod.service", "modprobe@loop.service"),
)
# cloud-init starts it when the seed names time servers; the clock is the host's until then.
DISABLED = ("systemd-timesyncd.service",)
ENABLED = ("systemd-networkd.service", "systemd-resolved.service", "vtorque-agent.service")

_FILES = {
    "etc/fstab": "# The initramfs mounts the root disk.\n",
    "etc/hostname": "localhost\n",
    # Empty: systemd makes a new one in each guest (machine-id(5)).
    "etc/machine-id": "",
    # Only what the seed asks for; its modules and the data source are all that runs.
    "etc/cloud/cloud.cfg.d/90-vtorque.cfg": (
        "datasource_list: [NoCloud, None]\n"
        "cloud_init_modules: [seed_random, write-files, set_hostname, update_hostname,"
        " users-groups, ssh]\n"
        "cloud_config_modules: [set-passwords, ntp, runcmd]\n"
        "cloud_final_modules: [scripts-user, final-message]\n"
        # Should the seed bring no host key: an RSA key takes many seconds under emulation.
        "ssh_genkeytypes: [ed25519]\n"
    ),
    "etc/ssh/sshd_config.d/10-vtorque.conf": "PermitRootLogin no\nPasswordAuthentication no\n",
    "etc/systemd/journald.conf.d/10-vtorque.conf": "[Journal]\nStorage=volatile\n",
}


@dataclass(frozen=True)
class Options:
    """What ``-o`` says: Debian suite, more packages, size of the root disk in MiB, kernel."""

    suite: str
    packages: tuple[str, ...]
    size: int
    kernel: str = "cloud"


class DebianBuilder:
    """Builds the Debian image; see :class:`vtorque_core.api_image.Builder`."""

    def build(
        self, arguments: Mapping[str, str], staging: Path, progress: Callable[[str], None]
    ) -> BuiltImage:
        """Build kernel, initramfs and root disk into ``staging``.

        Arguments: ``suite=bookworm``, ``packages=a,b`` (more packages), ``size=8G`` (of the root
        disk), ``kernel=generic`` (all drivers, not only those of clouds). Raises Refused and
        HostFault.
        """
        options = parse_options(arguments)
        need_tools("mmdebstrap", "mke2fs", "qemu-img", "apt-get", "dpkg-deb")
        _, arch = architecture()
        work = staging / "work"
        work.mkdir(mode=0o700)
        kernel = fetch_kernel(work, progress, None, options.kernel)
        (staging / "vmlinux").write_bytes(vmlinux(kernel))
        (staging / "initrd").write_bytes(_initrd(kernel, work))
        root = work / "root"
        progress(f"installing Debian {options.suite}: about a minute")
        _bootstrap(root, options)
        progress("configuring")
        _configure(root, kernel, work)
        progress("writing the root disk")
        _disk(root, work / "root.raw", staging / "root.qcow2", options.size)
        shutil.rmtree(work)
        return BuiltImage(
            guest_type="linux",
            distro="debian",
            arch=arch,
            min_ram_mib=MIN_RAM_MIB,
            disk="root.qcow2",
            disk_format="qcow2",
            kernel="vmlinux",
            initrd="initrd",
            cmdline=CMDLINE,
            labels={
                "init": "cloud-init",
                "family": "debian",
                "agent": "builtin",
                "suite": options.suite,
                "kernel": f"{kernel.package} {kernel.version}",
            },
        )


def parse_options(arguments: Mapping[str, str]) -> Options:
    """Return the builder's options. Raises Refused for an unknown one or a bad value."""
    unknown = sorted(set(arguments) - {"suite", "packages", "size", "kernel"})
    if unknown:
        raise Refused(f"debian has no option {unknown[0]}; it has suite, packages, size and kernel")
    kernel = arguments.get("kernel", "cloud")
    if kernel not in {"cloud", "generic"}:
        raise Refused(f"kernel={kernel!r}: must be cloud or generic")
    suite = arguments.get("suite", SUITE)
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", suite, re.ASCII):
        raise Refused(f"suite={suite!r}: is not the code name of a Debian release")
    packages = tuple(p for p in arguments.get("packages", "").split(",") if p)
    for package in packages:
        # Debian policy 5.6.1
        if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]{1,127}", package, re.ASCII):
            raise Refused(f"packages: {package!r} is not the name of a Debian package")
    try:
        size = size_mib(arguments["size"]) if "size" in arguments else SIZE_MIB
    except ValueError as error:
        raise Refused(f"size={arguments['size']!r}: {error}") from None
    if not 1024 <= size <= 1 << 20:
        raise Refused(f"size={arguments['size']}: must be between 1G and 1T")
    return Options(suite, packages, size, kernel)


def apt_sources(suite: str) -> list[str]:
    """Return the machine's own apt sources of a Debian release, in one-line style.

    With its updates and security fixes; empty if the machine has none of that release.
    """
    line = "$(ORIGIN)|$(CODENAME)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)"
    shown = run_tool("apt-get", "indextargets", "--format", line, "Created-By: Packages")
    wanted = {suite, f"{suite}-updates", f"{suite}-security"}
    found = []
    for origin, codename, uri, release, component in (x.split("|") for x in shown.splitlines()):
        if origin == "Debian" and codename in wanted:
            found.append(f"deb {uri} {release} {component}")
    return sorted(set(found)) if any(f" {suite} " in f for f in found) else []


def _bootstrap(root: Path, options: Options) -> None:
    include = ",".join([*PACKAGES, *options.packages])
    run_tool(
        *("mmdebstrap", "--quiet", "--mode=root", "--format=directory", "--variant=apt"),
        *(f"--include={include}", "--components=main"),
        # Nobody reads these in a batch job; a quarter of the size.
        *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*"),
        *("--dpkgopt=path-exclude=/usr/share/locale/*", "--", options.suite, str(root)),
        *apt_sources(options.suite),
        timeout=BOOTSTRAP_TIMEOUT,
    )


def _configure(root: Path, kernel: Kernel, work: Path) -> None:
    for path, content in _FILES.items():
        _write(root / path, content.encode(), 0o644)
    _write(root / UNIT.lstrip("/"), agent_unit().encode(), 0o644)
    _write(root / "usr/lib/vtorque/vtorque-start", start_script().encode(), 0o755)
    _write(root / micro.AGENT, micro.agent(work), 0o755)
    modules = root / "usr/lib/modules" / kernel.release
    shutil.copytree(kernel.modules, modules)
    for made in (*root.glob("etc/ssh/ssh_host_*"), root / "var/lib/systemd/random-seed"):
        made.unlink(missing_ok=True)
    # In the image itself: its tools know its release, and the machine may not have them.
    run_tool("chroot", str(root), "depmod", kernel.release)
    run_tool("chroot", str(root), "systemctl", "--quiet", "mask", *MASKED)
    run_tool("chroot", str(root), "systemctl", "--quiet", "disable", *DISABLED)
    run_tool("chroot", str(root), "systemctl", "--quiet", "enable", *ENABLED)
    run_tool("chroot", str(root), "systemctl", "--quiet", "set-default", "multi-user.target")


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file of the image anew: an absolute link in it would lead to the machine's own."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(mode)


def _disk(root: Path, raw: Path, disk: Path, size: int) -> None:
    """Make an ext4 file system of ``size`` MiB from a directory, without mounting it.

    No journal: a root disk is thrown away with its guest. No lazy initialisation: the guest would
    write what is left out here to its overlay.
    """
    run_tool(
        *("mke2fs", "-q", "-t", "ext4", "-d", str(root), "-L", LABEL, "-m", "0"),
        *("-O", "^has_journal", "-E", "lazy_itable_init=0", str(raw), f"{size}M"),
        timeout=DISK_TIMEOUT,
    )
    shutil.rmtree(root)
    run_tool(
        *("qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(disk)),
        timeout=DISK_TIMEOUT,
    )


def _initrd(kernel: Kernel, work: Path) -> bytes:
    """Return an initramfs of busybox and the modules of the root disk, nothing else."""
    tree = Tree()
    for path in ("dev", "proc", "sys", "root"):
        tree.directory(path)
    programs = work / "programs"
    programs.mkdir()
    unpack(fetch(["busybox-static"], work)[0], programs)
    tree.file("bin/busybox", (programs / "bin/busybox").read_bytes(), 0o755)
    for applet in ("modprobe", "mount", "poweroff", "sleep", "switch_root"):
        tree.link(f"sbin/{applet}", "/bin/busybox")
    loaded = add_modules(tree, kernel, INITRD_MODULES)
    init = files("vtorque_linux_guest").joinpath("debian_init").read_text("utf-8")
    tree.file("init", init.replace("@MODULES@", " ".join(loaded)).encode(), 0o755)
    return tree.compressed()
