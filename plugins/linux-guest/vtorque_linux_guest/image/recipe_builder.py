"""The image builder ``linux``: a systemd image from a recipe.

Runs as root in ``vmgr images build NAME linux -o recipe=FILE``, for one to two minutes. The
installation runs in a sandbox, without privileges on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from vtorque_core.api import HostFault, Refused, name_errors
from vtorque_core.api.image_builder import BuiltImage
from vtorque_linux_guest.agent.build import built_agent
from vtorque_linux_guest.image import bios_boot, distribution, recipe_files, systemd_root
from vtorque_linux_guest.image.disk_initramfs import CMDLINE, INITRD_MODULES, disk_initramfs
from vtorque_linux_guest.image.ext4_xattr import can_store
from vtorque_linux_guest.image.filetree import FileTree, read_tar
from vtorque_linux_guest.image.kernel import (
    architecture,
    extract_vmlinux,
    fetch_kernel,
    need_tools,
    vmlinux,
)
from vtorque_linux_guest.image.recipe import DISK, LinuxRecipe, read
from vtorque_linux_guest.image.root_disk import write_disk

MIN_RAM_MIB = {"debian": 256, "redhat": 512}

# For an initramfs built by the distribution. selinux=0: the image's files have no labels.
OWN_CMDLINE = f"{CMDLINE} root=/dev/disk/by-id/virtio-vtroot rootfstype=ext4 selinux=0"

_MAX_KERNEL = 512 << 20  # bytes of a kernel or an initramfs
_DISTRO = re.compile(r"^ID=[\"']?([a-z0-9][a-z0-9._-]{0,60})[\"']?$", re.MULTILINE)


class LinuxBuilder:
    """Builds an image from a recipe; see :class:`vtorque_core.api.image_builder.Builder`."""

    def build(
        self, arguments: Mapping[str, str], staging: Path, progress: Callable[[str], None]
    ) -> BuiltImage:
        """Build kernel, initramfs and root disk into ``staging``. Raises Refused and HostFault.

        Option: ``recipe=FILE``.
        """
        unknown = sorted(set(arguments) - {"recipe"})
        if unknown:
            raise Refused(f"linux has no option {unknown[0]}; its option is recipe")
        if "recipe" not in arguments:
            raise Refused("a recipe is missing: add -o recipe=FILE")
        return build_image(read(Path(arguments["recipe"])), staging, progress)


def build_image(recipe: LinuxRecipe, staging: Path, progress: Callable[[str], None]) -> BuiltImage:
    """Build a recipe's image into ``staging``. Raises Refused and HostFault."""
    if os.geteuid() != 0:
        raise Refused(
            "only root can build an image of a distribution, because its packages install files "
            "of many users. Without root, use micro or an image that was built elsewhere (vmgr "
            "images add)"
        )
    need_tools("qemu-img", "e2fsck", "setpriv")
    if recipe.kernel == DISK:
        recipe = bios_boot.with_boot_loader(recipe)
    _, arch = architecture()
    work = staging / "work"
    work.mkdir(mode=0o700)
    installed = work / "install"
    installed.mkdir()
    added = installed / "added.tar"
    recipe_files.pack(recipe.directory, recipe.files, added, recipe.size)
    started = int(time.time())
    kernel = None
    if recipe.kernel not in ("own", DISK):
        kernel = fetch_kernel(work, progress, None, recipe.kernel)
        (staging / "vmlinux").write_bytes(vmlinux(kernel))
        initrd = disk_initramfs(kernel, work, "/sbin/init", INITRD_MODULES)
        (staging / "initrd").write_bytes(initrd)
    packed = distribution.install(recipe, installed, kernel, progress)
    progress("configuring")
    agent = built_agent(work)
    labels = {"init": "cloud-init", "family": recipe.family, "agent": "builtin"}
    labels["suite"] = recipe.suite
    boot = b""
    with _open_output(packed) as file:
        tree = read_tar(file, recipe.size << 20, can_store)
        systemd_root.finish(tree, recipe.family, agent, started)
        if recipe.kernel == DISK:
            boot = bios_boot.boot_sectors(tree, recipe.size)
        elif kernel is not None:
            labels["kernel"] = f"{kernel.package} {kernel.version}"
        else:
            labels["kernel"] = _extract_kernel(tree, staging)
        distro = _distro(tree, recipe.family)
        progress("writing the root disk")
        write_disk(tree, work, staging / "root.qcow2", recipe.size, boot)
    shutil.rmtree(work)
    cmdline = OWN_CMDLINE if kernel is None else CMDLINE
    return BuiltImage(
        guest_type="linux",
        distro=distro,
        arch=arch,
        min_ram_mib=MIN_RAM_MIB[recipe.family],
        disk="root.qcow2",
        disk_format="qcow2",
        kernel=None if boot else "vmlinux",
        initrd=None if boot else "initrd",
        cmdline="" if boot else cmdline,
        labels=labels,
    )


def _open_output(packed: Path) -> BinaryIO:
    """Open a file from the sandbox, following no link. Raises HostFault if it is not regular."""
    with name_errors(packed.name, stage="packing"):
        descriptor = os.open(packed, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise HostFault(f"{packed.name} is not a file", stage="packing")
    return os.fdopen(descriptor, "rb")


def _distro(tree: FileTree, family: str) -> str:
    node = tree.find("etc/os-release") or tree.find("usr/lib/os-release")
    text = "" if node is None else node.read(1 << 16).decode("utf-8", "replace")
    found = _DISTRO.search(text)
    return family if found is None else found[1]


def _extract_kernel(tree: FileTree, staging: Path) -> str:
    """Copy the newest kernel in ``tree`` and its initramfs to ``staging``; return the release."""
    boot, base = tree.find("boot"), tree.find("usr/lib/modules") or tree.find("lib/modules")
    found: dict[str, bytes] = {}
    for name, node in {} if boot is None else boot.children.items():
        if name.startswith("vmlinuz-") and node.is_file:
            found[name.removeprefix("vmlinuz-")] = node.read(_MAX_KERNEL)
    for release, node in {} if base is None else base.children.items():
        image = node.children.get("vmlinuz")
        if image is not None and image.is_file:
            found.setdefault(release, image.read(_MAX_KERNEL))
    if not found:
        raise Refused('the packages do not contain a kernel: add one, or set kernel = "cloud"')
    release = max(found, key=_version_key)
    names = (f"initramfs-{release}.img", f"initrd.img-{release}", f"initrd-{release}")
    initrd = next((n for n in (tree.find(f"boot/{name}") for name in names) if n), None)
    if initrd is None or not initrd.is_file:
        raise Refused(
            f"the packages contain kernel {release} but no initramfs for it: add dracut or "
            'initramfs-tools, or set kernel = "cloud"'
        )
    try:
        image_data = extract_vmlinux(found[release])
    except HostFault:
        image_data = found[release]  # another format, which QEMU may support
    (staging / "vmlinux").write_bytes(image_data)
    (staging / "initrd").write_bytes(initrd.read(_MAX_KERNEL))
    return release


def _version_key(release: str) -> list[tuple[int, str]]:
    """Return a sort key for releases, by which 6.10 follows 6.9."""
    words = re.findall(r"\d+|[^\d]+", release)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]
