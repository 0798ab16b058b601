"""Put somebody's disk into the pool: ``vmgr images add`` and ``update``. As root.

The file is copied first, so that what is checked is what is used, and nothing is done with the
original but reading it. Tools then work on the copy, confined (:mod:`image_tool`). The result is
always a qcow2 of its own: a large empty disk costs what its data costs, to convert and to hash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from vtorque_core import image_probe, images
from vtorque_core.api import Image
from vtorque_core.api_image import BuiltImage
from vtorque_core.errors import HostFault, Refused, VtorqueError
from vtorque_core.image_formats import check, check_kernel, check_size, detect
from vtorque_core.image_pool import unknown
from vtorque_core.image_sidecar import Sidecar, names
from vtorque_core.image_store import free_bytes
from vtorque_core.image_tool import copy, fresh, opened, path_of, run
from vtorque_core.names import Paths

_DISK, _KERNEL, _INITRD = "disk.qcow2", "kernel", "initrd"
_MIN_RAM_MIB = 256
_MOST_KERNEL = 512 << 20  # bytes
_SLACK = 64 << 20  # bytes that a qcow2 may be larger than qemu-img measures
_LEAKED = 3  # exit code of qemu-img check: unused clusters, no harm


class Progress(Protocol):
    """Who is told how far it is."""

    def step(self, text: str) -> None:
        """A new step begins."""
        ...

    def told(self, done: int, total: int) -> None:
        """So much of the step is done."""
        ...


@dataclass(frozen=True)
class Wishes:
    """What who adds an image says of it; empty or None: found out, or as it was.

    Args:
        format: one of image_formats.FORMATS.
        boot: ``kernel``: the disk's own kernel is taken out and started directly; ``disk``: by
            its boot loader; ``auto``: by its kernel if there is one.
        kernel, initrd: files to start it with instead.
    """

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


@dataclass(frozen=True)
class Added:
    """The image as it is in the pool now, and what could not be found out about it."""

    image: Image
    notes: tuple[str, ...]


def add(
    pool: Path,
    name: str,
    file: Path,
    wishes: Wishes,
    progress: Progress,
    *,
    paths: Paths | None = None,
    keep: float = 0.0,
    most: int = 2 << 40,
    update: bool = False,
    sign: images.Sign = images.unsigned,
) -> Added:
    """Make ``file`` image ``name``. See :func:`vtorque_core.images.commit` for paths and keep.

    Args:
        pool, name: where, and as what.
        file: a disk in qcow2, vmdk, vhdx or raw format, or an ELF kernel that needs no disk.
        wishes: what is said of it.
        progress: is told.
        paths, keep: as in commit.
        most: bytes of the largest disk allowed.
        sign: as in commit.
        update: the image is there and gets a new version; what is not said is as before.

    Raises Refused for a file that is not fit, HostFault if the pool has no room.
    """
    images.check_name(name)
    images.check_pool(pool)
    before = _before(pool, name, update)
    try:
        with images.staging(pool, paths) as stage:
            work = _Work(pool, stage, wishes, progress, most)
            built = work.built(file, before)
            progress.step("checking and hashing")
            told = progress.told
            image = images.commit(
                pool,
                name,
                stage,
                built,
                "add",
                paths=paths,
                keep=keep,
                told=told,
                sign=sign,
            )
            return Added(image, tuple(work.found.notes))
    except OSError as error:
        raise HostFault(f"image {name}: {error.strerror or error}", stage="add") from None


def _before(pool: Path, name: str, update: bool) -> Sidecar | None:
    if not update:
        if name in names(pool):
            raise Refused(f"there is an image {name}: vmgr images update {name} FILE replaces it")
        return None
    if name not in names(pool):
        raise unknown(pool, name)
    try:
        return images.describe(pool, name)
    except Refused:
        return None  # broken: an update mends it


@dataclass
class _Work:
    """The making of one image in its staging directory."""

    pool: Path
    stage: Path
    wishes: Wishes
    progress: Progress
    most: int
    found: image_probe.Found = field(default_factory=image_probe.Found)

    def built(self, file: Path, before: Sidecar | None) -> BuiltImage:
        wishes = self.wishes
        disk = self._take(file)
        if wishes.initrd is not None and wishes.kernel is None and disk is not None:
            raise Refused("an initrd needs a kernel: say --kernel, too")
        for path, target in ((wishes.kernel, _KERNEL), (wishes.initrd, _INITRD)):
            if path is not None:
                self._copy_in(path, target)
        kernel = _KERNEL if (self.stage / _KERNEL).exists() else None
        if kernel is not None:
            head = _head(self.stage / kernel)
            self.found.arch = image_probe.kernel_arch(head) or self.found.arch
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
        return self._complete(built, before.built if before else None)

    def _complete(self, built: BuiltImage, before: BuiltImage | None) -> BuiltImage:
        """Fill in what is not known from the version before; refuse what stays open."""
        facts = {key: getattr(built, key) for key in ("guest_type", "distro", "arch")}
        if before is not None:
            facts = {key: value or getattr(before, key) for key, value in facts.items()}
            built = replace(built, labels={**before.labels, **built.labels})
            if built.kernel and self.wishes.cmdline is None and not built.cmdline:
                built = replace(built, cmdline=before.cmdline)
        missing = [f"--{key.replace('_', '-')}" for key, value in facts.items() if not value]
        if missing:
            notes = "; ".join(self.found.notes) or "nothing is known of its system"
            raise Refused(f"{notes}: say {', '.join(missing)}")
        least = built.min_ram_mib or (before.min_ram_mib if before else _MIN_RAM_MIB)
        return replace(built, min_ram_mib=least, **facts)

    def _take(self, file: Path) -> str | None:
        """Copy, check, look into and convert the file; return the disk's name, if it is one."""
        self.progress.step(f"copying {file.name!r}")
        with opened(file) as source:
            kind = self.wishes.format or detect(source.descriptor)
            if kind == "elf":
                if self.wishes.kernel is not None:
                    raise Refused("is a kernel itself, and --kernel names another")
                self._copy_in(file, _KERNEL)
                return None
            check(source.descriptor, kind, self.most)  # before it costs anything
            with fresh(self.stage / "copy") as mine:
                copy(source, mine, self.pool, self.progress.told)
                check(mine, kind, self.most)
                if kind == "raw":
                    self._from_raw(mine)
                else:
                    self._from_other(mine, kind)
        for name in ("copy", "raw"):
            (self.stage / name).unlink(missing_ok=True)
        return _DISK

    def _from_other(self, disk: int, kind: str) -> None:
        """Go through a raw disk, in which one can look."""
        size = self._info(disk, kind)
        self.progress.step(f"checking the {kind}")
        argv = ("qemu-img", "check", "-q", "-f", kind, path_of(disk))
        run(*argv, files=(disk,), most=0, good=(0, _LEAKED))
        needed = self._measure(disk, kind)
        if 2 * needed > (free := free_bytes(self.pool)):
            raise HostFault(
                f"{self.pool} has {free >> 20} MiB left; {2 * needed >> 20} MiB are needed"
            )
        with fresh(self.stage / "raw") as raw:
            self._convert(disk, kind, raw, "raw", size)
            self._from_raw(raw)

    def _from_raw(self, raw: int) -> None:
        size = os.fstat(raw).st_size
        check_size(size, self.most)
        self.progress.step("looking for a system in it")
        self.found, start = image_probe.look(raw, size)
        if self.wishes.kernel is None and self.wishes.boot != "disk":
            self._own_kernel(raw, start)
        else:
            self.found.cmdline = ""
        with fresh(self.stage / _DISK) as disk:
            self._convert(raw, "raw", disk, "qcow2", self._measure(raw, "raw") + _SLACK)

    def _own_kernel(self, raw: int, start: int | None) -> None:
        if start is None or not self.found.kernel:
            if self.wishes.boot == "kernel":
                raise Refused("; ".join(self.found.notes) + ": say --kernel or --boot disk")
            return
        image_probe.extract(raw, start, self.found.kernel, self.stage / _KERNEL)
        try:
            check_kernel(_head(self.stage / _KERNEL))
        except Refused:
            (self.stage / _KERNEL).unlink()
            self.found.cmdline = ""
            self.found.notes.append(f"{self.found.kernel} is no kernel: it boots from its disk")
            return
        image_probe.extract(raw, start, self.found.initrd, self.stage / _INITRD)

    def _info(self, disk: int, kind: str) -> int:
        """Return the size that a guest sees, in bytes, as qemu-img tells it."""
        argv = ("qemu-img", "info", "--output=json", "-f", kind, path_of(disk))
        info = _json(run(*argv, files=(disk,), most=0))
        if any("backing" in key for key in info) or info.get("encrypted"):
            raise Refused("refers to another file, or is encrypted")
        size = int(info.get("virtual-size", 0))
        check_size(size, self.most)
        return size

    def _measure(self, disk: int, kind: str) -> int:
        """Return how many bytes a qcow2 of the same content takes: an unpacked bomb is seen."""
        argv = ("qemu-img", "measure", "--output=json", "-O", "qcow2", "-f", kind, path_of(disk))
        return int(_json(run(*argv, files=(disk,), most=0))["required"])

    def _convert(self, disk: int, kind: str, to: int, into: str, most: int) -> None:
        self.progress.step(f"converting {kind} to {into}")
        argv = ("qemu-img", "convert", "-p", "-f", kind, "-O", into, path_of(disk), path_of(to))
        run(*argv, files=(disk, to), most=most, told=self.progress.told)

    def _copy_in(self, path: Path, target: str) -> None:
        with opened(path) as source, fresh(self.stage / target) as mine:
            if source.size > _MOST_KERNEL:
                raise Refused(f"is larger than {_MOST_KERNEL >> 20} MiB, the most that is taken")
            copy(source, mine, self.pool, self.progress.told)
            if target == _KERNEL:
                check_kernel(os.pread(mine, 4096, 0))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise VtorqueError(f"qemu-img said what is no JSON: {text[:80]!r}") from None
    return found if isinstance(found, dict) else {}
