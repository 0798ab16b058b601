"""The job's shared memory on a node: a file in /dev/shm."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault, closing, let_users, name_errors, show_mib
from vtorque_core.api.acquired import Resource, unjournalled


@dataclass(frozen=True)
class Shm(Resource):
    """Shared memory ``/dev/shm/<name>`` of ``size`` bytes (shm_overview(7)).

    The memory is allocated at creation. Otherwise a process that maps the file would be killed
    (SIGBUS) if /dev/shm were full.

    Attributes:
        others: Users besides ``uid`` who may map it.
        spare: Bytes of /dev/shm to keep free for other programs.
        where: Name of the setting for ``spare``, for messages.
    """

    kind = "shm"
    name: str
    size: int = 0
    mode: int = 0o600
    uid: int = -1
    gid: int = -1
    others: tuple[int, ...] = unjournalled(())
    spare: int = unjournalled(0)
    where: str = unjournalled("")

    @property
    def path(self) -> str:
        """The path of the file. Raises HostFault for an invalid name."""
        if "/" in self.name or self.name in ("", ".", ".."):
            raise HostFault(f"{self.name!r} is not a valid name of shared memory")
        return f"/dev/shm/{self.name}"  # noqa: S108 - this is what the kind is

    @staticmethod
    def room(spare: int = 0) -> int:
        """Return the number of bytes that can be allocated now, with ``spare`` bytes left free."""
        shm = os.statvfs("/dev/shm")  # noqa: S108
        free = shm.f_bavail if shm.f_blocks else sys.maxsize  # tmpfs(5), size=0: no limit
        return max(0, free * shm.f_frsize - spare)

    def create(self) -> None:
        """Create the file, filled with zeros.

        Raises HostFault if it exists or /dev/shm lacks space.
        """
        room = self.room(self.spare)
        if self.size > room:
            raise HostFault(
                f"{show_mib(self.size >> 20)} of shared memory do not fit: /dev/shm has "
                f"{show_mib(room >> 20)} free for guests, and {show_mib(self.spare >> 20)} are "
                f"reserved for other programs{(f' ({self.where})' if self.where else '')}"
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            name_errors(f"cannot create {self.path}"),
            closing(os.open(self.path, flags, 0o600)) as descriptor,
        ):
            os.posix_fallocate(descriptor, 0, self.size)
            os.fchown(descriptor, self.uid, self.gid)
            os.fchmod(descriptor, self.mode)
            let_users(descriptor, self.others, 6, 6)

    def release(self) -> None:
        """Remove the file."""
        with name_errors(f"cannot remove {self.path}"):
            Path(self.path).unlink(missing_ok=True)
