"""Resources: a guest's root disk (overlay or copy of an image), and a tmpfs for it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vtorque_core.api import confined_tool
from vtorque_core.api.acquired import RELEASE_TIME, CoreResource, unjournalled
from vtorque_core.api.job_files import FileResource
from vtorque_core.api.qcow2 import HEADER, check_qcow2
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.base.run_tool import NOBODY, run_tool
from vtorque_core.base.trust import effective_root

_TABLES = 2 << 20  # bytes: a qcow2's header and first tables; the others take 10 bytes for 64 KiB


@contextlib.contextmanager
def _image(path: str) -> Iterator[int]:
    if not Path(path).is_absolute():
        raise HostFault(f"{path!r} is not an absolute path")
    with safefs.name_errors(f"cannot open {path}"):
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
    length = os.fstat(image).st_size
    if declared == "qcow2":
        length = check_qcow2(os.pread(image, HEADER, 0), length)
    return -(-length // 512) * 512


@dataclass(frozen=True)
class Overlay(FileResource):
    """A qcow2 overlay on a read-only image, created in constant time.

    Attributes:
        path: new file (0600) of ``uid``, QEMU's user.
        backing: root-owned file, whose format is never probed.
        size_mib: virtual size; 0: the image's size.
    """

    kind = "overlay"
    path: str
    backing: str
    backing_format: Literal["raw", "qcow2"]
    size_mib: int = 0
    uid: int = -1

    def create(self) -> None:
        """Create the overlay by qemu-img(1), which does not open the image (``-u``)."""
        with _image(self.backing) as image:
            seen = _size(image, self.backing_format)
        with safefs.name_errors(f"cannot create {self.path}"):
            safefs.write_new(self.path, b"", mode=0o600, uid=self.uid)
        layer = ("-u", "-f", "qcow2", "-F", self.backing_format, "-b", self.backing)
        size = str(self.size_mib << 20 or seen)
        run_tool("qemu-img", "create", "-q", *layer, self.path, size)


@dataclass(frozen=True)
class DiskCopy(FileResource):
    """A qcow2 file with a complete copy of an image's disk.

    ``source`` is a root-owned file without backing file.
    """

    kind = "disk-copy"
    path: str
    source: str
    source_format: Literal["raw", "qcow2"]
    uid: int = -1
    seconds: float = unjournalled(300.0)

    def create(self) -> None:
        """Copy the image by qemu-img(1), which runs as nobody."""
        with _image(self.source) as image:
            most = _size(image, self.source_format)
            most += most // 1024 + _TABLES
            with safefs.name_errors(f"cannot create {self.path}"):
                safefs.write_new(self.path, b"", mode=0o600)
                copy = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            with safefs.closing(copy):
                if effective_root():
                    os.fchown(copy, NOBODY, -1)
                formats = ("-f", self.source_format, "-O", "qcow2")
                files = (confined_tool.path_of(image), confined_tool.path_of(copy))
                confined_tool.run(
                    *("qemu-img", "convert", "-q", *formats, *files),
                    files=(image, copy), most=most, seconds=self.seconds,
                )  # fmt: skip
                if effective_root():
                    os.fchown(copy, max(self.uid, 0), -1)


@dataclass(frozen=True)
class MountResource(CoreResource):
    kind = "mount"
    needs_root = True
    blocking = True
    retry_seconds = 2.0
    source: str
    target: str
    fstype: str = ""
    options: tuple[str, ...] = ()

    def create(self) -> None:
        if safefs.is_mount_point(self.target):
            raise HostFault(f"{self.target} is already a mount point")
        kind = ("-t", self.fstype) if self.fstype else ()
        options = ("-o", ",".join(self.options)) if self.options else ()
        run_tool("mount", *kind, *options, "--", self.source, self.target)

    def release(self) -> None:
        if safefs.is_mount_point(self.target):
            run_tool("umount", "--", self.target, timeout=RELEASE_TIME)
