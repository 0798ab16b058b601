"""The image builder ``oci``: combine a container with the site's kernel and the guest agent.

``vmgr images build NAME oci -o source=...`` runs the builder as root. No program of the container
is run, and no file is unpacked on this machine: an unprivileged process reads the layers into a
tree in memory, and writes the tree to a disk (:mod:`vtorque_oci.unprivileged`).
"""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from io import BufferedReader
from pathlib import Path

from vtorque_core.api import Refused, name_errors, run_tool, size_mib
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.api.unprivileged_parser import helper_process
from vtorque_linux_guest.agent.build import built_agent
from vtorque_linux_guest.guest.agent_start import AGENT
from vtorque_linux_guest.image.disk_initramfs import (
    CMDLINE,
    INITRD_MODULES,
    busybox,
    disk_initramfs,
)
from vtorque_linux_guest.image.ext4 import fill_ext4
from vtorque_linux_guest.image.ext4_xattr import can_store
from vtorque_linux_guest.image.filetree import FileTree, TreeNode, directory
from vtorque_linux_guest.image.initramfs import MODULES, InitramfsTree, add_modules
from vtorque_linux_guest.image.kernel import (
    KernelPackage,
    architecture,
    debs_directory,
    fetch_kernel,
    need_tools,
    vmlinux,
)
from vtorque_linux_guest.image.micro_builder import (
    BOOT_MODULES,
    DEV_DIRECTORIES,
    DEV_LINKS,
    MORE_MODULES,
)
from vtorque_linux_guest.image.root_disk import LABEL, convert_disk
from vtorque_linux_guest.image.tar_reader import Budget
from vtorque_oci import layers, oci, sif, unprivileged
from vtorque_oci.blobs import open_source
from vtorque_oci.container import Container, settings

SIZE_MIB = 8192
MIN_RAM_MIB = 192
HOME = "usr/lib/vtorque"
INIT = f"/{HOME}/init"
# Mount points that every program may expect (hier(7)); most are file systems of the kernel.
_MOUNTED = ("dev", "proc", "sys", "run")
# Root and the kernel of the guest run or read the files in these directories. Kernel modules come
# only from the site.
_ROOTS = (HOME, MODULES, "sbin", "etc")
_OF_KERNEL = (MODULES, "sbin/request-key")  # request_key(2) runs it as root, for any user
# A container runtime provides these files. A link there may lead to a file that only a service
# creates.
_RUNTIMES = ("etc/resolv.conf", "etc/hosts", "etc/hostname")
_FSTAB = b"""\
devpts /dev/pts devpts nosuid,noexec,gid=5,mode=0620,ptmxmode=0666 0 0
tmpfs /dev/shm tmpfs nosuid,nodev,mode=1777 0 0
tmpfs /run tmpfs nosuid,nodev,mode=0755 0 0
"""
_OTHERS = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "etc": 0o755, "home": 0o755}


@dataclass(frozen=True)
class BuildOptions:
    """The ``-o`` options of the builder; ``size`` is in MiB.

    With ``run``, the container's entry point starts the job's script.
    """

    source: str
    tag: str = ""
    run: bool = False
    size: int = SIZE_MIB
    setuid: bool = False
    modules: tuple[str, ...] = ()
    debs: Path | None = None


class OciBuilder:
    """Builds an image from a container; see :class:`vtorque_core.api.image_builder.Builder`."""

    def build(
        self, arguments: Mapping[str, str], staging: Path, progress: Callable[[str], None]
    ) -> BuiltImage:
        """Build kernel, initramfs and root disk in ``staging``. Raises Refused, HostFault.

        For the arguments see doc/images.md.
        """
        options = parse_options(arguments)
        need_tools("qemu-img", "e2fsck", "setpriv")
        _, arch = architecture()
        work = staging / "work"
        work.mkdir(mode=0o700)
        progress("reading the container")
        container, from_sif = read_container(options, work, arch)
        progress("unpacking the layers")
        raw, kernels = work / "root.raw", list[KernelPackage]()
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path, _ in container.layers]
            disk = stack.enter_context(raw.open("xb"))
            equipment = stack.enter_context((work / "equipment").open("x+b"))

            def assemble(root: unprivileged.RootConnection) -> None:
                tree = _assemble(container, files, options, root.step)
                prefix = sif.add_environment(tree) if from_sif else ()
                prepare(tree, container, options, prefix)
                root.wait()
                equipment.seek(0)
                for path, node in pickle.load(equipment):  # noqa: S301 - root has written it
                    tree.put(path, node)
                root.step("writing the root disk")
                fill_ext4(tree, disk.fileno(), options.size, LABEL)

            def equip() -> None:
                kernels.append(fetch_kernel(work, progress, options.debs))
                _boot_files(kernels[0], work, staging, options)
                pickle.dump(list(guest_files(kernels[0], work, options)), equipment)
                equipment.flush()

            keep = {file.fileno() for file in (*files, disk, equipment)}
            unprivileged.run(assemble, keep, options.size << 20, progress, equip)
        convert_disk(raw, staging / "root.qcow2")
        shutil.rmtree(work)
        return BuiltImage(
            guest_type="linux",
            distro="container",
            arch=arch,
            min_ram_mib=MIN_RAM_MIB,
            disk="root.qcow2",
            disk_format="qcow2",
            kernel="vmlinux",
            initrd="initrd",
            cmdline=CMDLINE,
            labels=_labels(container, options, kernels[0]),
        )


def _assemble(
    container: Container,
    files: Sequence[BufferedReader],
    options: BuildOptions,
    progress: Callable[[str], None],
) -> FileTree:
    tree, budget = FileTree(), Budget()
    for file, (_, digest) in zip(files, container.layers, strict=True):
        layers.check_digest(file, digest)
        layers.apply(tree, file, options.size << 20, can_store, budget)
    if not options.setuid and (count := layers.strip_privileges(tree)):
        progress(
            f"setuid bits or capabilities of {count} programs were removed (keep them with "
            "setuid=keep)"
        )
    _check_entrypoint(tree, container, options)
    tree.remove(HOME)
    return tree


def parse_options(arguments: Mapping[str, str]) -> BuildOptions:
    """Parse the builder's options. Raises Refused for an unknown option or an invalid value."""
    known = ("source", "tag", "entrypoint", "size", "setuid", "modules", "debs")
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise Refused(f"oci has no option {unknown[0]}; its options are {', '.join(known)}")
    if not arguments.get("source"):
        raise Refused("source is missing: name a directory, a tar file or a SIF file")
    entrypoint = arguments.get("entrypoint", "ignore")
    if entrypoint not in ("ignore", "run"):
        raise Refused(f"entrypoint={entrypoint!r}: must be ignore or run")
    setuid = arguments.get("setuid", "drop")
    if setuid not in ("drop", "keep"):
        raise Refused(f"setuid={setuid!r}: must be drop or keep")
    asked = arguments.get("size", f"{SIZE_MIB}M")
    with name_errors(f"size={asked!r}", ValueError, fault=Refused):
        size = size_mib(asked)
    if not 64 <= size <= 1 << 20:
        raise Refused(f"size={asked}: must be between 64M and 1T")
    return BuildOptions(
        source=arguments["source"],
        tag=arguments.get("tag", ""),
        run=entrypoint == "run",
        size=size,
        setuid=setuid == "keep",
        modules=tuple(m for m in arguments.get("modules", "").split(",") if m),
        debs=debs_directory(arguments),
    )


def read_container(
    options: BuildOptions, work: Path, arch: str, *, private: bool = False
) -> tuple[Container, bool]:
    """Return the container, and whether it is a SIF (Apptainer image). Errors name the source.

    ``private`` is as in :func:`vtorque_oci.oci.read_image`.
    """
    most = min(options.size << 20, room(work))
    try:
        with helper_process(), open_source(options.source) as descriptor:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if is_file and sif.is_sif(os.pread(descriptor, 64, 0)):
                title = Path(options.source).name
                return sif.read_sif(descriptor, work, most, arch, title), True
            with oci.files_of(descriptor) as found:
                image = oci.read_image(found, work, most, arch, options.tag, private=private)
                return image, False
    except Refused as error:
        raise Refused(f"source {options.source[:200]}: {error}") from None


def room(work: Path) -> int:
    """Return the maximum size of the layers in bytes: a third of the free disk space.

    During the build, the content exists three times: as layers, on the raw disk and in the image.
    """
    status = os.statvfs(work)
    return status.f_bavail * status.f_frsize // 3


def _check_entrypoint(tree: FileTree, container: Container, options: BuildOptions) -> None:
    if not options.run:
        return
    if not container.entrypoint:
        raise Refused("entrypoint=run: the container has no entry point")
    program = container.entrypoint[0]
    if program.startswith("/") and tree.find(program) is None:
        raise Refused(f"entrypoint=run: the container's entry point {program[:200]} is missing")


def prepare(
    tree: FileTree, container: Container, options: BuildOptions, prefix: tuple[str, ...]
) -> None:
    """Add the agent's settings, the script ``entrypoint``, and directories that a guest needs."""
    for name in _MOUNTED:  # the initramfs would follow a link there
        tree.remove(name)
        tree.put(name, directory())
    for name, mode in _OTHERS.items():
        tree.directory(name, mode)
    for name in _OF_KERNEL:
        tree.remove(name)
    for name in _RUNTIMES:
        tree.remove(name)
        tree.file(name, b"")
    for name in _ROOTS:
        tree.protect(name)
    if tree.find("bin/sh") is None:
        tree.link("bin/sh", f"/{HOME}/bin/busybox")
    words = (*prefix, *(container.entrypoint if options.run else ()))
    tree.file(f"{HOME}/container", settings(container, words))
    if container.entrypoint or container.command:
        own = (*container.entrypoint, *container.command)
        script = (
            f"#!/{HOME}/bin/busybox sh\n"
            "# The container's own program; arguments replace those that it has by default.\n"
            f"[ $# -gt 0 ] || exec {shlex.join(own)}\n"
            f'exec {shlex.join(container.entrypoint)} "$@"\n'
        )
        tree.file(f"{HOME}/entrypoint", script.encode(), 0o755)


def _boot_files(kernel: KernelPackage, work: Path, staging: Path, options: BuildOptions) -> None:
    """Write the kernel, and an initramfs with all modules that the container's init needs."""
    (staging / "vmlinux").write_bytes(vmlinux(kernel))
    modules = tuple(dict.fromkeys([*INITRD_MODULES, *BOOT_MODULES]))
    (staging / "initrd").write_bytes(disk_initramfs(kernel, work, INIT, modules, options.debs))


def guest_files(
    kernel: KernelPackage, work: Path, options: BuildOptions
) -> Iterator[tuple[str, TreeNode]]:
    """Yield init, agent, busybox, and the kernel modules that a job may need, with their paths."""

    def program(content: bytes) -> TreeNode:
        return TreeNode(stat.S_IFREG | 0o755, content)

    def link(target: str) -> TreeNode:
        return TreeNode(stat.S_IFLNK | 0o777, target.encode())

    yield INIT, program(files("vtorque_oci").joinpath("container_init").read_bytes())
    for name in DEV_DIRECTORIES:
        yield f"{HOME}/dev/{name}", directory()
    for name, target in DEV_LINKS.items():
        yield f"{HOME}/dev/{name}", link(target)
    yield f"{HOME}/fstab", TreeNode(stat.S_IFREG | 0o644, _FSTAB)
    yield AGENT, program(built_agent(work))
    own = busybox(work, options.debs)
    yield f"{HOME}/bin/busybox", program(own.read_bytes())
    for applet in run_tool(str(own), "--list").split():
        if applet != "busybox":
            yield f"{HOME}/bin/{applet}", link("busybox")
    carried = InitramfsTree()
    wanted = (*INITRD_MODULES, *BOOT_MODULES, *MORE_MODULES, *options.modules)
    add_modules(carried, kernel, wanted)
    for path, (mode, content) in sorted(carried.entries.items()):
        if stat.S_ISREG(mode):
            yield path, TreeNode(stat.S_IFREG | 0o644, content)


def _labels(container: Container, options: BuildOptions, kernel: KernelPackage) -> dict[str, str]:
    shown = {
        "init": "micro",
        "family": "container",
        "container": f"/{HOME}",
        "entrypoint": "run" if options.run else "ignore",
        "kernel": f"{kernel.package} {kernel.version}",
    }
    title = "".join(c for c in container.title if c.isprintable())[:200]
    return {**shown, "source": title} if title else shown
