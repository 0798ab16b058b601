"""The root disk of a guest whose firmware boots a user's own disk. Runs as root.

A user process serves the disk's file read-only over NBD (:mod:`vtorque_core.resources.user_disk`).
Root does not open the file. Root creates an empty overlay as large as the NBD export, and QEMU gets
the export as the overlay's backing disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vtorque_core.api import Act, Refused, run_tool
from vtorque_core.api.acquired import unjournalled
from vtorque_core.api.children import run_in_child
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.job_files import File, FileResource
from vtorque_core.api.libvirt_domain import Disk
from vtorque_core.api.vm_options import IMG
from vtorque_own_images.job_filter import JobFilter
from vtorque_own_images.submitted_disk import SubmittedDisk, parse_value, size_problem

NAME, TARGET = "root", "vdz"
"""Name of the domain element, and libvirt's name of the disk."""
_SECONDS = 10.0  # for each answer of the user's process or file system
# The NBD protocol (https://github.com/NetworkBlockDevice/nbd, doc/proto.md): the server's greeting
# with its flags, and the client's flags FIXED_NEWSTYLE and NO_ZEROES with the option EXPORT_NAME
# of the default export. The server answers with the size in bytes and its flags.
_GREETING = struct.Struct("!8s8sH")
_OPEN = struct.pack("!I8sII", 3, b"IHAVEOPT", 1, 0)
_EXPORT = struct.Struct("!QH")
_DONT_SYNC, _BASIC_STATS = 0x4000, 0x7FF  # statx(2), linux/stat.h


@dataclass(frozen=True)
class OwnDisk(Disk):
    """A disk whose writable qcow2 file ``overlay`` has the user's file ``path`` as backing disk."""

    template: ClassVar[str] = "vtorque_own_images:domain/own_disk.xml.j2"
    forbids: ClassVar[frozenset[Act]] = frozenset({"save", "migrate"})  # survive saves no OwnDisk
    overlay: str = ""


@dataclass(frozen=True)
class OwnOverlay(FileResource):
    """The overlay of a guest that boots the user's own disk: a qcow2 file, empty at first.

    Attributes:
        uid: owner of the file, which is QEMU's user.
        run_dir: the guest's run directory. It contains the socket on which a process of the job's
            owner serves the disk. That process must run before :meth:`create`.
        disk: the user's disk file as it was at the submission.
        most: maximum size of the user's disk in MiB.
    """

    kind = "own-overlay"
    path: str
    uid: int = unjournalled(-1)
    run_dir: str = unjournalled("")
    disk: SubmittedDisk | None = unjournalled(None)
    most: int = unjournalled(0)

    def create(self) -> None:
        """Check the user's disk, and create an overlay of the disk's size.

        Raises:
            Refused: The disk is too large or was changed after the submission, or the user's
                process that serves the disk to QEMU does not answer.
        """
        assert self.disk is not None  # noqa: S101 - unjournalled
        stem = f"{self.run_dir}/disk-{NAME}"
        # In a child, because the user's file system can hang.
        wrong = run_in_child(lambda: self._require_unchanged(Path(f"{stem}.lock")), _SECONDS)
        try:
            size = 0 if wrong else export_size(f"{stem}.sock")
        except OSError as error:
            wrong = f"the process that serves it: {error.strerror or error}"
        wrong = wrong or size_problem(size, self.most)
        if wrong:
            raise Refused(wrong, key=IMG.key, value=self.disk.path)
        File(self.path, uid=self.uid).create()
        run_tool("qemu-img", "create", "-q", "-f", "qcow2", self.path, str(size))

    def _require_unchanged(self, lock: Path) -> None:
        from vtorque_core.live.suspend import served_file  # noqa: PLC0415 - few jobs need it

        assert self.disk is not None  # noqa: S101 - unjournalled
        status = served_file(lock, cached_status)
        if SubmittedDisk.from_status(self.disk.path, status) != self.disk:
            raise Refused("was changed or replaced after the submission: submit the job again")


def cached_status(path: Path) -> os.stat_result:
    """Return inode number, size and ctime of a file from the kernel's cache. Raises OSError.

    Root must not wait for the server of a user's file system (FUSE): SIGKILL does not end such a
    process, and it would keep the standard output of the batch system's hook.
    """
    found = ctypes.create_string_buffer(256)  # struct statx of linux/stat.h
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statx(-1, bytes(path), _DONT_SYNC, _BASIC_STATS, found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    inode, size, seconds, nanoseconds = struct.unpack_from("=32x2Q48xqI", found)
    ctime = {"st_ctime_ns": seconds * 10**9 + nanoseconds}
    return os.stat_result((0, inode, 0, 0, 0, 0, size, 0, 0, 0), ctime)


def element(guest: GuestPlan) -> OwnDisk:
    """Return the root disk of a guest that boots the user's own disk."""
    return OwnDisk(
        NAME, guest.image.source, "raw", readonly=True, serial="vtroot", boot=1, user_owned=True,
        overlay=str(guest.root_disk),
    )  # fmt: skip


def overlay(guest: GuestPlan, most: int) -> OwnOverlay:
    """Return the overlay of the disk that :func:`element` returns.

    ``most`` is the maximum size of the user's disk in MiB.
    """
    path, run_dir = str(guest.root_disk), str(guest.run_dir)
    return OwnOverlay(path, guest.qemu_uid, run_dir, parse_value(guest[IMG]), most)


def export_size(path: str) -> int:
    """Return the size in bytes of the disk that an NBD server exports on a Unix socket.

    Raises OSError if the server does not answer in time, or is no NBD server.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        server.settimeout(_SECONDS)
        server.connect(path)
        magic, option, _ = _GREETING.unpack(_receive(server, _GREETING.size))
        if magic + option != b"NBDMAGICIHAVEOPT":
            raise OSError("no NBD server")
        server.sendall(_OPEN)
        size, _ = _EXPORT.unpack(_receive(server, _EXPORT.size))
        return int(size)


def _receive(server: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (part := server.recv(count - len(found))):
            raise OSError("the server closed the connection")
        found += part
    return found


def resources() -> tuple[type[OwnOverlay], type[JobFilter]]:
    """Return the kinds of resources, for the hook ``vtorque_resources``."""
    return OwnOverlay, JobFilter
