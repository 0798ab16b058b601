"""The job's shared memory on a node: a file in /dev/shm."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault, let_users, show_mib
from vtorque_core.api.acquired import Resource, unjournalled


@dataclass(frozen=True)
class Shm(Resource):
    """Shared memory ``/dev/shm/<name>`` of ``size`` bytes (shm_overview(7)).

    All of it is taken at once: who maps it must not be killed because /dev/shm is full (SIGBUS).
    ``others``: users who may map it beside ``uid``. ``spare``: bytes of /dev/shm that stay free for
    other programs; ``where`` that is set.
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
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self.size)
                os.fchown(descriptor, self.uid, self.gid)
                os.fchmod(descriptor, self.mode)
                let_users(descriptor, self.others, 6, 6)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise HostFault(f"cannot create {self.path}: {error.strerror or error}") from error

    def release(self) -> None:
        """Remove it; who has it open keeps it until they end."""
        try:
            Path(self.path).unlink(missing_ok=True)
        except OSError as error:
            raise HostFault(f"cannot remove {self.path}: {error.strerror}") from error
