"""Core kinds that are names in a file system: file, tree, overlay, shm, setting, mount."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from vtorque_core import image_tool, safefs
from vtorque_core.api_node import NOBODY, Resource, run_tool, unjournalled
from vtorque_core.errors import HostFault, Refused
from vtorque_core.image_formats import check_qcow2
from vtorque_core.trust import effective_root
from vtorque_core.units import show_mib

_UMOUNT_TIMEOUT = 25.0  # seconds; below the 30 that teardown gives one release by default
_TABLES = 2 << 20  # bytes: a qcow2's header and first tables; the others take 10 bytes for 64 KiB


class CoreResource(Resource):
    """A kind that needs no plugin.

    ``blocking``: its release can hang, so a child runs it. ``settle``: seconds after the record
    during which it may still appear although its creator was killed, since another process does
    the work (libvirtd, mount(8)): release looks again until then.
    """

    blocking: ClassVar[bool] = False
    settle: ClassVar[float] = 0.0


@contextlib.contextmanager
def _named(path: str, verb: str) -> Iterator[None]:
    """Turn an OSError into a HostFault that names the path."""
    try:
        yield
    except OSError as error:
        raise HostFault(f"cannot {verb} {path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class File(CoreResource):
    """A file below a trusted directory (:mod:`vtorque_core.safefs`); it must not exist yet.

    With ``replace`` it may exist and is exchanged in one step, so that readers see old or new.
    ``uid``/``gid`` -1: as created.
    """

    kind = "file"
    volatile = False
    path: str
    mode: int = 0o600
    uid: int = -1
    gid: int = -1
    replace: bool = False
    content: bytes = unjournalled(b"")

    def create(self) -> None:
        """Write it. Raises HostFault: it exists, the disk is full, the directory is not safe."""
        write = safefs.replace if self.replace else safefs.write_new
        with _named(self.path, "create"):
            write(self.path, self.content, mode=self.mode, uid=self.uid, gid=self.gid)

    def release(self) -> None:
        """Remove it; missing is fine."""
        with _named(self.path, "remove"):
            if self.replace:
                safefs.remove_file(safefs.beside(self.path))
            safefs.remove_file(self.path)


@dataclass(frozen=True)
class Tree(CoreResource):
    """A directory and, when released, all in it: no link followed, no mount entered."""

    kind = "tree"
    volatile = False
    path: str
    mode: int = 0o711
    uid: int = -1
    gid: int = -1

    def create(self) -> None:
        """Make the directory. Raises HostFault: it exists, its parent is missing or not safe."""
        with _named(self.path, "create"):
            safefs.make_directory(self.path, mode=self.mode, uid=self.uid, gid=self.gid)

    def release(self) -> None:
        """Remove it with its content; missing is fine."""
        with _named(self.path, "remove"):
            safefs.remove_tree(self.path)


@contextlib.contextmanager
def _image(path: str) -> Iterator[int]:
    """Open an image's disk to read it. Raises HostFault."""
    if not Path(path).is_absolute():
        raise HostFault(f"{path!r} is not an absolute path")
    with _named(path, "open"):
        image = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(image).st_mode):
            raise HostFault(f"{path} is not a regular file")
        yield image
    except Refused as error:
        raise HostFault(f"{path} {error}") from None
    finally:
        os.close(image)


def _size(image: int, declared: str) -> int:
    """Return the bytes that a guest sees of a disk, whole sectors. Raises Refused."""
    length = os.fstat(image).st_size
    if declared == "qcow2":
        header = os.pread(image, 112, 0)
        if not header.startswith(b"QFI\xfb"):
            raise Refused("is not in qcow2 format")
        check_qcow2(header, length)
        length = int.from_bytes(header[24:32], "big")
    return -(-length // 512) * 512


@dataclass(frozen=True)
class Overlay(CoreResource):
    """A qcow2 layer over a read-only image; takes the same time whatever the image's size.

    ``backing`` is a root-owned file of ``backing_format``, never probed. ``size_mib`` 0: as the
    image. ``path`` is made 0600 and belongs to ``uid``: QEMU's user (libvirt changes no owner).
    """

    kind = "overlay"
    volatile = False
    path: str
    backing: str
    backing_format: Literal["raw", "qcow2"]
    size_mib: int = 0
    uid: int = -1

    def create(self) -> None:
        """Run qemu-img(1), which does not open the image: root parses nobody's disk but its size.

        Raises HostFault with its words, for an image that it cannot be, or if the file exists.
        """
        with _image(self.backing) as image:
            seen = _size(image, self.backing_format)
        with _named(self.path, "create"):
            safefs.write_new(self.path, b"", mode=0o600, uid=self.uid)
        layer = ("-u", "-f", "qcow2", "-F", self.backing_format, "-b", self.backing)
        size = str(self.size_mib << 20 or seen)
        run_tool("qemu-img", "create", "-q", *layer, self.path, size)

    def release(self) -> None:
        """Remove the layer; the image is not touched."""
        with _named(self.path, "remove"):
            safefs.remove_file(self.path)


@dataclass(frozen=True)
class DiskCopy(CoreResource):
    """A qcow2 file with all of an image's disk, which then is not read any more.

    ``source``, of ``source_format``, is root-owned and stands alone. ``path``, ``uid``: as an
    overlay's. It takes the disk's data now and grows to what the guest sees of it, like a layer.
    ``seconds`` that it may take.
    """

    kind = "disk-copy"
    volatile = False
    path: str
    source: str
    source_format: Literal["raw", "qcow2"]
    uid: int = -1
    seconds: float = unjournalled(300.0)

    def create(self) -> None:
        """Run qemu-img(1), not as root. Raises HostFault with its words, or if the file exists."""
        with _image(self.source) as image:
            most = _size(image, self.source_format)
            most += most // 1024 + _TABLES
            with _named(self.path, "create"):
                safefs.write_new(self.path, b"", mode=0o600)
                copy = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if effective_root():
                    os.fchown(copy, NOBODY, -1)
                formats = ("-f", self.source_format, "-O", "qcow2")
                files = (image_tool.path_of(image), image_tool.path_of(copy))
                image_tool.run(
                    *("qemu-img", "convert", "-q", *formats, *files),
                    files=(image, copy), most=most, seconds=self.seconds,
                )  # fmt: skip
                if effective_root():
                    os.fchown(copy, max(self.uid, 0), -1)
            finally:
                os.close(copy)

    def release(self) -> None:
        """Remove the copy; the image is not touched."""
        with _named(self.path, "remove"):
            safefs.remove_file(self.path)


@dataclass(frozen=True)
class Shm(CoreResource):
    """Shared memory ``/dev/shm/<name>`` of ``size`` bytes (shm_overview(7)).

    All of it is taken at once: who maps it must not be killed because /dev/shm is full (SIGBUS).
    ``spare``: bytes of /dev/shm that stay free for other programs; ``where`` that is set.
    """

    kind = "shm"
    name: str
    size: int = 0
    mode: int = 0o600
    uid: int = -1
    gid: int = -1
    spare: int = unjournalled(0)
    where: str = unjournalled("")

    @property
    def path(self) -> str:
        """Its file. Raises HostFault for a name with a slash."""
        if "/" in self.name or self.name in ("", ".", ".."):
            raise HostFault(f"{self.name!r} is not a name of shared memory")
        return f"/dev/shm/{self.name}"  # noqa: S108 - this is what the kind is

    @staticmethod
    def room(spare: int = 0) -> int:
        """Return how many bytes can be taken now so that ``spare`` are left."""
        shm = os.statvfs("/dev/shm")  # noqa: S108
        free = shm.f_bavail if shm.f_blocks else sys.maxsize  # tmpfs(5), size=0: without a limit
        return max(0, free * shm.f_frsize - spare)

    def create(self) -> None:
        """Make it, filled with zeros. Raises HostFault: it exists, /dev/shm has no room for it."""
        room = self.room(self.spare)
        if self.size > room:
            raise HostFault(
                f"{show_mib(self.size >> 20)} of shared memory: /dev/shm has {show_mib(room >> 20)}"
                f" for it, and {show_mib(self.spare >> 20)} for other programs"
                f"{f' ({self.where})' if self.where else ''}"
            )
        with _named(self.path, "create"):
            safefs.write_new(
                self.path, b"", mode=self.mode, uid=self.uid, gid=self.gid, size=self.size
            )

    def release(self) -> None:
        """Remove it; who has it open keeps it until they end."""
        with _named(self.path, "remove"):
            safefs.remove_file(self.path)


@dataclass(frozen=True)
class Setting(CoreResource):
    """A value in /proc/sys or /sys, set back if it still is what we set.

    Two jobs must not set the same file: claim it (``PoolClaim``) first.
    """

    kind = "setting"
    path: str
    old: str
    new: str

    @classmethod
    def of(cls, path: str, new: str) -> Setting:
        """Return the setting with the file's present value as ``old``."""
        return cls(path, _current(path), new)

    def create(self) -> None:
        """Write ``new``."""
        _set(self.path, self.new)

    def release(self) -> None:
        """Write ``old`` unless somebody has changed it since, or the file is gone."""
        if Path(self.path).exists() and _current(self.path) == self.new:
            _set(self.path, self.old)


def _current(path: str) -> str:
    """Return the value; of a list such as ``always [madvise] never`` the chosen one."""
    with _named(path, "read"):
        text = Path(path).read_text(encoding="utf-8").strip()
    chosen = [word[1:-1] for word in text.split() if word.startswith("[") and word.endswith("]")]
    return chosen[0] if len(chosen) == 1 else text


def _set(path: str, value: str) -> None:
    with _named(path, "set"), safefs.parent_of(path) as (directory, name):
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=directory)
        try:
            # Not emptied first: a kill in between would leave neither the old value nor the new.
            size = os.write(descriptor, value.encode())
            with contextlib.suppress(OSError):  # of /proc and /sys not all can be cut
                os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Mount(CoreResource):
    """A mount on an existing empty directory of vTorque's own (mount(8))."""

    kind = "mount"
    blocking = True
    settle = 2.0
    source: str
    target: str
    fstype: str = ""
    options: tuple[str, ...] = ()

    def create(self) -> None:
        """Mount it. Raises HostFault, also if something is mounted there."""
        if safefs.is_mount_point(self.target):
            raise HostFault(f"{self.target}: something is mounted there already")
        kind = ("-t", self.fstype) if self.fstype else ()
        options = ("-o", ",".join(self.options)) if self.options else ()
        run_tool("mount", *kind, *options, "--", self.source, self.target)

    def release(self) -> None:
        """Unmount it; nothing mounted is fine, in use is a HostFault."""
        if safefs.is_mount_point(self.target):
            run_tool("umount", "--", self.target, timeout=_UMOUNT_TIMEOUT)
