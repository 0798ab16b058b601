"""The image builder ``own``: kernel, initramfs and disk of the base image for users' own images.

The disk contains the directory ``equipment`` (init, agent, busybox, kernel modules) and the
directories of the guest's writable layer. The initramfs mounts the user's squashfs on the directory
``image``, and ``equipment`` over it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from importlib.resources import as_file, files
from pathlib import Path

from vtorque_core.api import Refused, name_errors, size_mib
from vtorque_core.api.image_builder import BuiltImage
from vtorque_linux_guest.agent.build import built_agent
from vtorque_linux_guest.image.disk_initramfs import CMDLINE, INITRD_MODULES, disk_initramfs
from vtorque_linux_guest.image.filetree import FileTree, directory
from vtorque_linux_guest.image.kernel import (
    architecture,
    debs_directory,
    fetch_kernel,
    need_tools,
    vmlinux,
)
from vtorque_linux_guest.image.micro_builder import BOOT_MODULES
from vtorque_linux_guest.image.root_disk import write_disk
from vtorque_oci import build
from vtorque_own_images.submitted_image import INSTALL_SUDO, SUDO_LABEL

SIZE_MIB = 8192
_EQUIPMENT, _UPPER, _WORK, _IMAGE = "equipment", "upper", "work", "image"
_KNOWN = ("size", "modules", "debs")
_MODULES = (*INITRD_MODULES, "squashfs", "overlay", *BOOT_MODULES)
# A container runtime provides these files. In an image, they may be links to files that only a
# service creates.
_EMPTY = ("etc/resolv.conf", "etc/hosts", "etc/hostname")
_DIRECTORIES = {"dev": 0o755, "proc": 0o755, "sys": 0o755, "run": 0o755, "root": 0o700}
_DIRECTORIES |= {"tmp": 0o1777, "var/tmp": 0o1777}


class BaseBuilder:
    """The builder of the base image; see :class:`vtorque_core.api.image_builder.Builder`."""

    def build(
        self, arguments: Mapping[str, str], staging: Path, progress: Callable[[str], None]
    ) -> BuiltImage:
        """Build kernel, initramfs and disk in ``staging``. Raises Refused, HostFault.

        Options in ``arguments``:

        - ``size``: size of the disk, which limits the files that a guest writes outside of shares.
        - ``modules=a,b``: additional kernel modules.
        - ``debs=DIR``: as for the builder ``micro``.
        """
        if unknown := sorted(set(arguments) - set(_KNOWN)):
            raise Refused(f"own has no option {unknown[0]}; its options are {', '.join(_KNOWN)}")
        need_tools("qemu-img", "e2fsck", "setpriv")
        asked = arguments.get("size", f"{SIZE_MIB}M")
        with name_errors(f"size={asked!r}", ValueError, fault=Refused):
            size = size_mib(asked)
        modules = tuple(m for m in arguments.get("modules", "").split(",") if m)
        debs = debs_directory(arguments)
        _, arch = architecture()
        work = staging / "work"
        work.mkdir(mode=0o700)
        kernel = fetch_kernel(work, progress, debs)
        (staging / "vmlinux").write_bytes(vmlinux(kernel))
        progress("building the initramfs")
        of_package = files("vtorque_own_images")
        script = of_package.joinpath("own_init").read_text("utf-8")
        initrd = disk_initramfs(kernel, work, build.INIT, _MODULES, debs, script)
        (staging / "initrd").write_bytes(initrd)
        progress("writing the disk")
        options = build.BuildOptions(source="", size=size, modules=modules, debs=debs)
        tree = FileTree()
        for name in (_EQUIPMENT, _UPPER, _WORK, _IMAGE):
            tree.put(name, directory())
        for name, mode in _DIRECTORIES.items():
            tree.put(f"{_EQUIPMENT}/{name}", directory(mode))
        for name in _EMPTY:
            tree.file(f"{_EQUIPMENT}/{name}", b"")
        for path, node in build.guest_files(kernel, work, options):
            tree.put(f"{_EQUIPMENT}/{_place(path)}", node)
        for path, content in (
            (build.INIT, of_package.joinpath("own_start").read_bytes()),
            (INSTALL_SUDO, of_package.joinpath("install_sudo").read_bytes()),
            (f"/{build.HOME}/sudo", _built_sudo(work)),
        ):
            tree.file(f"{_EQUIPMENT}{path}", content, 0o755)
        write_disk(tree, work, staging / "root.qcow2", size)
        shutil.rmtree(work)
        return BuiltImage(
            guest_type="linux",
            distro="container",
            arch=arch,
            min_ram_mib=build.MIN_RAM_MIB,
            disk="root.qcow2",
            disk_format="qcow2",
            kernel="vmlinux",
            initrd="initrd",
            cmdline=CMDLINE,
            labels={
                "init": "micro",
                "family": "container",
                "container": f"/{build.HOME}",
                "kernel": f"{kernel.package} {kernel.version}",
                SUDO_LABEL: "yes",
            },
        )


def _built_sudo(work: Path) -> bytes:
    with as_file(files("vtorque_own_images").joinpath("sudo.c")) as source:
        return built_agent(work, ("conf.c", str(source)))


def _place(path: str) -> str:
    """Return the path of a guest's file in the disk's directory ``equipment``.

    The initramfs mounts ``equipment`` over the user's image. ``path`` is the file's path in the
    images of ``vtorque_oci``. Each file keeps this path, with two exceptions:

    - ``/lib/modules``: in most containers, ``/lib`` is a link to ``/usr/lib``. A directory ``lib``
      in ``equipment`` would hide the link.
    - The init of ``vtorque_oci`` becomes ``container-init``, because this plugin's init
      (``own_start``) has the original path. ``own_start`` runs first, then ``container-init``.
    """
    if path == build.INIT:
        return f"{build.HOME}/container-init"
    return path.lstrip("/").replace("lib/modules/", f"{build.HOME}/modules/", 1)
