"""The value of ``img`` that ``vsub`` submits for a user's own disk, which contains a kernel.

The value names the disk's file and its size, ctime and inode number, so that a node detects a file
that was changed or replaced after the submission. Code in a guest that shares the file's directory
could reset the mtime, but not the ctime (inode(7)).
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import Refused, show_mib
from vtorque_core.api.qcow2 import HEADER, check_qcow2
from vtorque_core.api.vm_options import IMG, disk_path

_VALUE = re.compile(r"(/.+)#(\d{1,20}):(-?\d{1,20}):(\d{1,20})", re.ASCII)
_RENAME = "rename the file, so that its name ends with .qcow2"


@dataclass(frozen=True)
class SubmittedDisk:
    """A disk file as it was at the submission: absolute path, bytes, ctime in ns, inode."""

    path: str
    size: int
    ctime_ns: int
    inode: int

    @classmethod
    def from_status(cls, path: str, status: os.stat_result) -> SubmittedDisk:
        """Return the file at ``path``, which has this status."""
        return cls(path, status.st_size, status.st_ctime_ns, status.st_ino)

    @property
    def value(self) -> str:
        """The value of ``img`` to submit."""
        return f"{self.path}#{self.size}:{self.ctime_ns}:{self.inode}"


def parse_value(value: str) -> SubmittedDisk:
    """Parse the untrusted value of ``img`` in a job request for a user's own disk.

    The format is that of :attr:`SubmittedDisk.value`. Raises Refused.
    """
    found = _VALUE.fullmatch(value)
    if found is None:
        raise Refused("is not a disk that vsub has submitted", key=IMG.key, value=value)
    try:
        return SubmittedDisk(disk_path(found[1]), int(found[2]), int(found[3]), int(found[4]))
    except ValueError as error:
        raise Refused(str(error), key=IMG.key, value=value) from None


def examine(written: str, most: int) -> SubmittedDisk:
    """Return the disk file that the caller names. Privileges: the user, on the submit host.

    Checks early what the node checks again: :mod:`vtorque_core.resources.user_disk` and
    :mod:`vtorque_own_images.own_disk`. ``most`` is the limit of the size in MiB. Raises Refused.
    """
    try:
        path = Path(written).expanduser().resolve(strict=True)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Refused("is not a regular file")
            if status.st_uid != os.geteuid():
                raise Refused(f"belongs to uid {status.st_uid}, not to you (uid {os.geteuid()})")
            head = os.pread(file.fileno(), HEADER, 0)
        is_qcow2 = path.suffix == ".qcow2"
        if not is_qcow2 and head.startswith(b"QFI\xfb"):
            raise Refused("is a qcow2 file whose name ends with .raw", fix=_RENAME)
        size = check_qcow2(head, status.st_size) if is_qcow2 else status.st_size
        if problem := size_problem(max(size, status.st_size), most):
            raise Refused(problem)
        found = SubmittedDisk.from_status(str(path), status)
        return parse_value(found.value)
    except OSError as error:
        raise Refused(str(error.strerror), key=IMG.key, value=written) from None
    except RuntimeError:
        raise Refused("names the home of an unknown user", key=IMG.key, value=written) from None
    except Refused as error:
        first = error.refusals[0]
        raise Refused(first.message, key=IMG.key, value=written, fix=first.fix) from None


def size_problem(size: int, most: int) -> str:
    """Return an empty string if a disk has 1 byte to ``most`` MiB, otherwise a message."""
    if 0 < size <= most << 20:
        return ""
    return f"has {size} bytes; the limit is {show_mib(most)} ([plugin.own-images] max_size)"
