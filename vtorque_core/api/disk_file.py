"""Resource: a formatted disk in a file, for a guest of a job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from vtorque_core.api.acquired import unjournalled
from vtorque_core.api.job_files import FileResource
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.run_tool import run_tool


@dataclass(frozen=True)
class DiskFile(FileResource):
    """A new sparse raw disk with an empty file system; attach it with a ``Disk`` element.

    The file must be in a trusted directory (:mod:`vtorque_core.base.safefs`). ``vtorque_plan`` must
    claim the disk's full size.

    Attributes:
        uid: the file's owner: ``qemu_uid`` of the guest.
        owner: uid and gid of the file system's top directory.
        label: at most 16 characters.
    """

    kind = "disk-file"
    path: str
    size_mib: int = unjournalled(0)
    file_system: Literal["", "ext4"] = unjournalled("ext4")
    uid: int = unjournalled(-1)
    owner: tuple[int, int] = unjournalled((0, 0))
    label: str = unjournalled("")

    def create(self) -> None:
        """Create the file, and format it with mke2fs(8). Raises HostFault if a step fails."""
        if self.size_mib < 1:
            raise HostFault(f"{self.path}: invalid disk size {self.size_mib} MiB")
        size = self.size_mib << 20
        with safefs.name_errors(f"cannot create {self.path}"):
            safefs.write_new(
                self.path, b"", mode=0o600, uid=self.uid, ready=lambda fd: os.ftruncate(fd, size)
            )
        if self.file_system:
            root = f"root_owner={self.owner[0]}:{self.owner[1]},nodiscard"
            label = ("-L", self.label) if self.label else ()
            run_tool("mke2fs", "-q", "-F", "-t", self.file_system, "-E", root, *label, self.path)
