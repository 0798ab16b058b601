"""The image builder ``osv``: combine a loader, programs and their libraries into an image.

It runs as root in the staging directory, and executes none of the programs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from vtorque_core.api import HostFault, Refused
from vtorque_core.api.image_builder import BuiltImage
from vtorque_osv import check, cmdline, disk, elf, recipe, rofs, rootdir, script
from vtorque_osv.recipe import OsvRecipe

DISK = "disk.raw"
KERNEL = "loader.elf"
_LIB = "/usr/lib"
# File systems that OSv mounts, as in its own images (static/etc/fstab_rofs). Only /tmp is writable.
_ROOT = b"/dev/vblk0.1 /          rofs      defaults 0 0\n"
_FSTAB = b"""\
none         /dev       devfs     defaults 0 0
none         /proc      procfs    defaults 0 0
none         /sys       sysfs     defaults 0 0
none         /tmp       ramfs     defaults 0 0
"""
_DIRECTORIES = ("/dev", "/proc", "/sys", "/tmp")  # noqa: S108 - in the image


class OsvBuilder:
    """Builds OSv images, see :class:`vtorque_core.api.image_builder.Builder`."""

    def build(
        self, arguments: Mapping[str, str], staging: Path, progress: Callable[[str], None]
    ) -> BuiltImage:
        """Build an image; for its options see :func:`vtorque_osv.recipe.from_arguments`."""
        try:
            return _build(recipe.from_arguments(arguments), staging, progress)
        except OSError as error:
            message = f"{error.filename or 'the image'}: {error.strerror}"
            if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
                raise Refused(message) from None
            raise HostFault(message) from None


def _build(wanted: OsvRecipe, staging: Path, progress: Callable[[str], None]) -> BuiltImage:
    loader = elf.read(wanted.loader)
    arch = "x86_64" if loader is None else loader.arch
    progress("collecting files and libraries")
    tree = build_tree(wanted, arch)
    if wanted.root_share and loader is None:
        raise Refused("root_share: a loader.img boots from its own disk; use the ELF loader")
    progress("writing the file system")
    if wanted.root_directory is not None:
        rootdir.write(tree, wanted.root_directory)
    elif not wanted.root_share:
        disk.write_disk(tree, staging / DISK, wanted.loader if loader is None else None)
    kernel = None
    if loader is not None:
        kernel = KERNEL
        shutil.copyfile(wanted.loader, staging / KERNEL)
    root = "virtiofs" if wanted.root_share else "rofs"
    environ = [f"--env={name}={value}" for name, value in wanted.env.items()]
    return BuiltImage(
        guest_type="osv",
        distro="OSV",
        arch=arch,
        min_ram_mib=wanted.min_ram,
        disk=None if wanted.root_share else DISK,
        disk_format="raw",
        kernel=kernel,
        cmdline=" ".join(cmdline.escape_word(word) for word in (f"--rootfs={root}", *environ)),
        labels=_labels(wanted, tree),
    )


def build_tree(wanted: OsvRecipe, arch: str) -> rofs.RofsTree:
    """Return the image's files: the files of the recipe, their libraries, and OSv's own files.

    Raises Refused if a file is missing or cannot run, or if the program of a command is missing.
    """
    tree = rofs.RofsTree()
    for path in (*_DIRECTORIES, *wanted.mounts):
        tree.directory(path)
    tree.file("/etc/fstab", _FSTAB if wanted.root_share else _ROOT + _FSTAB)
    tree.file("/etc/hosts", b"127.0.0.1 localhost\n")
    tree.link("/etc/mnttab", "/proc/mounts")
    for path, source in wanted.files.items():
        tree.add(path, source.resolve() if source.is_file() else source)
    programs = [each for each in map(elf.read, tree.sources()) if each is not None]
    for program in programs:
        elf.check_program(program, arch)
    have = {name for name in tree.names(_LIB) if ".so" in name}
    for name, library in elf.libraries(programs, wanted.libdirs, have).items():
        tree.file(f"{_LIB}/{name}", library)
    for name, line in wanted.commands.items():
        first = script.parse(line.encode(), {})[0].words[0]
        there = wanted.root_share and wanted.root_directory is None  # maybe in the share
        if not there and not tree.has(first):
            raise Refused(f"commands.{name}: {first} is not among the image's files")
    return tree


def _labels(wanted: OsvRecipe, tree: rofs.RofsTree) -> dict[str, str]:
    labels = {f"{check.COMMAND}{name}": line for name, line in wanted.commands.items()}
    if wanted.root_share:
        labels[check.ROOT] = wanted.root_share
    if wanted.mounts:
        labels[check.MOUNTS] = ",".join(wanted.mounts)
    parts = {
        check.REST: (cmdline.REST_SERVER,),
        check.CLOUD_INIT: (cmdline.CLOUD_INIT,),
        check.NFS: ("/tools/mount-fs.so", "/usr/lib/libnfs.so"),
    }
    for label, paths in parts.items():
        if all(tree.has(path) for path in paths):
            labels[label] = "true"
    return labels
