"""A kind of what is acquired: a disk in a file, formatted, for a guest of a job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from vtorque_core.api.acquired import unjournalled
from vtorque_core.api.job_files import OneFile
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.run_tool import run_tool


@dataclass(frozen=True)
class DiskFile(OneFile):
    """A raw disk with an empty file system, in a file; give it to the guest as a ``Disk`` element.

    Below a trusted directory (:mod:`vtorque_core.base.safefs`); it must not exist yet. It takes no
    room before it is written to: claim what it may take.

    Args:
        path: of the file, 0600; ``uid``: who opens it, ``guest.qemu_uid``.
        size_mib: of the disk.
        file_system: what is on it; empty: nothing.
        owner: uid and gid of its top directory.
        label: of the file system, at most 16 characters.
    """

    kind = "disk-file"
    path: str
    size_mib: int = unjournalled(0)
    file_system: Literal["", "ext4"] = unjournalled("ext4")
    uid: int = unjournalled(-1)
    owner: tuple[int, int] = unjournalled((0, 0))
    label: str = unjournalled("")

    def create(self) -> None:
        """Make and format it with mke2fs(8). Raises HostFault with its words, or: it exists."""
        if self.size_mib < 1:
            raise HostFault(f"{self.path}: a disk of {self.size_mib} MiB is none")
        size = self.size_mib << 20
        with safefs.naming(f"cannot create {self.path}"):
            safefs.write_new(
                self.path, b"", mode=0o600, uid=self.uid, ready=lambda fd: os.ftruncate(fd, size)
            )
        if self.file_system:
            root = f"root_owner={self.owner[0]}:{self.owner[1]},nodiscard"
            label = ("-L", self.label) if self.label else ()
            run_tool("mke2fs", "-q", "-F", "-t", self.file_system, "-E", root, *label, self.path)
