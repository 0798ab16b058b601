"""The image builder ``disk``: make an image from an untrusted disk. Privileges: root.

The builder first copies the user's file, because the user could change it after the checks.
Confined tools then work on the copy (:mod:`vtorque_core.api.confined_tool`). The result is a
standalone qcow2. Unlike a raw disk, a qcow2 has no holes that tools would have to read and hash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Refused, VtorqueError, count, name_errors, printable
from vtorque_core.api.confined_tool import path_of, run
from vtorque_core.api.image_builder import Building, BuiltImage
from vtorque_disk_image import probe
from vtorque_disk_image.copying import copy, create_file, free_bytes, open_source
from vtorque_disk_image.formats import FORMATS, check, check_kernel, check_size, detect

NAME = "disk"
BOOT = ("auto", "kernel", "disk")
_DISK, _KERNEL, _INITRD = "disk.qcow2", "kernel", "initrd"
_MIN_RAM_MIB = 256
_MOST_KERNEL = 512 << 20  # bytes
_SLACK = 64 << 20  # bytes by which a qcow2 may exceed the size that qemu-img measures
_LEAKED = 3  # exit code of qemu-img check: leaked clusters, which are harmless
_LABEL = "label."
FIRMWARE = ("bios", "efi")
_CHOICES = {"format": FORMATS, "boot": BOOT, "firmware": FIRMWARE}


@dataclass(frozen=True)
class ImageDescription:
    """The user's description of an image.

    For an empty or None field, the builder detects the value, or keeps the image's previous value.

    Args:
        file: a disk in one of ``FORMATS``, or an ELF kernel that needs no disk.
        boot: how guests boot. ``kernel`` boots the disk's kernel directly. ``disk`` uses the disk's
            boot loader. ``auto`` is ``kernel`` if the disk has a kernel, otherwise ``disk``.
        kernel, initrd: files to boot instead of those on the disk.
        labels: labels of the image. The label ``firmware`` (``bios`` or ``efi``) is for guests
            that use the disk's boot loader.
    """

    file: Path
    guest_type: str = ""
    distro: str = ""
    arch: str = ""
    min_ram_mib: int = 0
    format: str = ""
    boot: str = "auto"
    kernel: Path | None = None
    initrd: Path | None = None
    cmdline: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def parse_wishes(arguments: Mapping[str, str]) -> ImageDescription:
    """Parse the ``-o KEY=VALUE`` options of the builder. Raises Refused."""
    facts: dict[str, Any] = {}
    labels = {}
    for key, value in arguments.items():
        if key.startswith(_LABEL) and key != _LABEL:
            labels[key.removeprefix(_LABEL)] = value
        elif key in ("file", "kernel", "initrd"):
            facts[key] = Path(value)
        elif key == "min_ram":
            with name_errors(f"min_ram={printable(value)}", ValueError, fault=Refused):
                facts["min_ram_mib"] = count(value)
        elif key in ("guest_type", "distro", "arch", "cmdline", *_CHOICES):
            facts[key] = value
            if value not in _CHOICES.get(key, (value,)):
                raise Refused(
                    f"{key}={printable(value)}: must be one of {', '.join(_CHOICES[key])}"
                )
        else:
            raise Refused(f"the image builder {NAME} has no option {printable(key)}")
    if "file" not in facts:
        raise Refused("the disk is missing: add -o file=FILE")
    if "firmware" in facts:
        labels["firmware"] = facts.pop("firmware")
    return ImageDescription(**facts, labels=labels)


class DiskBuilder:
    """A builder of images from disks, see :class:`vtorque_core.api.image_builder.Builder`."""

    def build(self, arguments: Mapping[str, str], staging: Path, progress: Building) -> BuiltImage:
        """Build an image from ``file``; for the arguments see :class:`ImageDescription`.

        Raises Refused for an unsuitable file, HostFault if the pool is full.
        """
        return _Build(staging, parse_wishes(arguments), progress).build()


@dataclass
class _Build:
    stage: Path
    wishes: ImageDescription
    progress: Building
    found: probe.DiskFacts = field(default_factory=probe.DiskFacts)

    def build(self) -> BuiltImage:
        wishes = self.wishes
        disk = self._take(wishes.file)
        if wishes.initrd is not None and wishes.kernel is None and disk is not None:
            raise Refused("--initrd needs --kernel")
        for path, target in ((wishes.kernel, _KERNEL), (wishes.initrd, _INITRD)):
            if path is not None:
                self._copy_boot_file(path, target)
        kernel = _KERNEL if (self.stage / _KERNEL).exists() else None
        if kernel is not None:
            head = _head(self.stage / kernel)
            self.found.arch = probe.kernel_arch(head) or self.found.arch
        if kernel is None and self.found.firmware == "efi":
            self.found.labels["firmware"] = "efi"
        built = BuiltImage(
            guest_type=wishes.guest_type or ("linux" if self.found.distro else ""),
            distro=wishes.distro or self.found.distro,
            arch=wishes.arch or self.found.arch,
            min_ram_mib=wishes.min_ram_mib,
            disk=disk,
            disk_format="qcow2",
            kernel=kernel,
            initrd=_INITRD if (self.stage / _INITRD).exists() else None,
            cmdline=self.found.cmdline if wishes.cmdline is None else wishes.cmdline,
            labels={**self.found.labels, **wishes.labels},
        )
        self.progress.notes.extend(self.found.notes)
        return self._complete(built)

    def _complete(self, built: BuiltImage) -> BuiltImage:
        """Return ``built``, with unknown values taken from the image's previous version.

        Raises Refused if a value remains unknown.
        """
        before = self.progress.before
        facts = {key: getattr(built, key) for key in ("guest_type", "distro", "arch")}
        if before is not None:
            facts = {key: value or getattr(before, key) for key, value in facts.items()}
            built = replace(built, labels={**before.labels, **built.labels})
            if built.kernel and self.wishes.cmdline is None and not built.cmdline:
                built = replace(built, cmdline=before.cmdline)
        missing = [f"--{key.replace('_', '-')}" for key, value in facts.items() if not value]
        if missing:
            notes = "; ".join(self.found.notes) or "the operating system is unknown"
            raise Refused(f"{notes}: add {', '.join(missing)}")
        family = probe.FAMILIES.get(facts["distro"].lower())  # if the disk was not inspected
        if family and facts["guest_type"] == "linux":
            built = replace(built, labels={"family": family, **built.labels})
        least = built.min_ram_mib or (before.min_ram_mib if before else _MIN_RAM_MIB)
        return replace(built, min_ram_mib=least, **facts)

    def _take(self, file: Path) -> str | None:
        """Copy, check and convert the file; return the new disk's name, or None for a kernel."""
        self.progress(f"copying {file.name!r}")
        with open_source(file) as source:
            kind = self.wishes.format or detect(source.descriptor)
            if kind == "elf":
                if self.wishes.kernel is not None:
                    raise Refused("is itself a kernel, so --kernel cannot be used")
                self._copy_boot_file(file, _KERNEL)
                return None
            check(source.descriptor, kind, self.progress.max_disk)  # before the copy
            with create_file(self.stage / "copy") as mine:
                copy(source, mine, self.stage.parent, self.progress.told)
                check(mine, kind, self.progress.max_disk)
                if kind == "raw":
                    self._inspect_raw(mine)
                else:
                    self._convert_disk(mine, kind)
        for name in ("copy", "raw"):
            (self.stage / name).unlink(missing_ok=True)
        return _DISK

    def _convert_disk(self, disk: int, kind: str) -> None:
        """Convert the disk to raw, inspect the raw disk, and convert the raw disk to qcow2."""
        size = self._info(disk, kind)
        self.progress(f"checking the {kind}")
        argv = ("qemu-img", "check", "-q", "-f", kind, path_of(disk))
        run(*argv, files=(disk,), most=0, good=(0, _LEAKED))
        needed = self._measure(disk, kind)
        if 2 * needed > (free := free_bytes(self.stage.parent)):
            raise HostFault(
                f"{self.stage.parent} has {free >> 20} MiB free, but {2 * needed >> 20} MiB are "
                "needed"
            )
        with create_file(self.stage / "raw") as raw:
            self._convert(disk, kind, raw, "raw", size)
            self._inspect_raw(raw)

    def _inspect_raw(self, raw: int) -> None:
        size = os.fstat(raw).st_size
        check_size(size, self.progress.max_disk)
        self.progress("looking for an operating system")
        self.found, start = probe.inspect_disk(raw, size)
        if self.wishes.kernel is None and self.wishes.boot != "disk":
            self._extract_kernel(raw, start)
        else:
            self.found.cmdline = ""
        with create_file(self.stage / _DISK) as disk:
            self._convert(raw, "raw", disk, "qcow2", self._measure(raw, "raw") + _SLACK)

    def _extract_kernel(self, raw: int, start: int | None) -> None:
        if start is None or not self.found.kernel:
            if self.wishes.boot == "kernel":
                raise Refused("; ".join(self.found.notes) + ": add --kernel or --boot disk")
            return
        probe.extract(raw, start, self.found.kernel, self.stage / _KERNEL)
        try:
            check_kernel(_head(self.stage / _KERNEL))
        except Refused:
            (self.stage / _KERNEL).unlink()
            self.found.cmdline = ""
            self.found.notes.append(
                f"{self.found.kernel} is not a kernel: the image boots with its boot loader"
            )
            return
        probe.extract(raw, start, self.found.initrd, self.stage / _INITRD)

    def _info(self, disk: int, kind: str) -> int:
        argv = ("qemu-img", "info", "--output=json", "-f", kind, path_of(disk))
        info = _json(run(*argv, files=(disk,), most=0))
        if any("backing" in key for key in info) or info.get("encrypted"):
            raise Refused("refers to another file or is encrypted")
        size = int(info.get("virtual-size", 0))
        check_size(size, self.progress.max_disk)
        return size

    def _measure(self, disk: int, kind: str) -> int:
        """Return how many bytes this disk would occupy as a qcow2."""
        argv = ("qemu-img", "measure", "--output=json", "-O", "qcow2", "-f", kind, path_of(disk))
        return int(_json(run(*argv, files=(disk,), most=0))["required"])

    def _convert(self, disk: int, kind: str, to: int, into: str, most: int) -> None:
        self.progress(f"converting {kind} to {into}")
        argv = ("qemu-img", "convert", "-p", "-f", kind, "-O", into, path_of(disk), path_of(to))
        run(*argv, files=(disk, to), most=most, told=self.progress.told)

    def _copy_boot_file(self, path: Path, target: str) -> None:
        with open_source(path) as source, create_file(self.stage / target) as mine:
            if source.size > _MOST_KERNEL:
                raise Refused(f"is larger than {_MOST_KERNEL >> 20} MiB, the limit for kernels")
            copy(source, mine, self.stage.parent, self.progress.told)
            if target == _KERNEL:
                check_kernel(os.pread(mine, 4096, 0))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise VtorqueError(f"invalid JSON from qemu-img: {text[:80]!r}") from None
    return found if isinstance(found, dict) else {}
