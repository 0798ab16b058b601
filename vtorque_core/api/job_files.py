"""Resources: a file and a directory of a job."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.api.acquired import CoreResource, unjournalled
from vtorque_core.base import safefs


class FileResource(CoreResource):
    """Base of resources that consist of one file, ``path``."""

    volatile = False
    path: str

    def release(self) -> None:
        """Remove the file if it exists."""
        with safefs.name_errors(f"cannot remove {self.path}"):
            safefs.remove_file(self.path)


@dataclass(frozen=True)
class File(FileResource):
    """A new file in a trusted directory (:mod:`vtorque_core.base.safefs`).

    Attributes:
        uid, gid: owner and group; -1: those of this process.
        reader: uid of a user who may read the file, and execute it if the owner may.
        replace: the file may exist, and is replaced atomically.
    """

    kind = "file"
    path: str
    mode: int = 0o600
    uid: int = -1
    gid: int = -1
    reader: int = unjournalled(-1)
    replace: bool = False
    content: bytes = unjournalled(b"")

    def create(self) -> None:
        """Write the file. Raises HostFault if it exists or the disk is full."""
        write = safefs.replace if self.replace else safefs.write_new
        with safefs.name_errors(f"cannot create {self.path}"):
            write(
                self.path, self.content,
                mode=self.mode, uid=self.uid, gid=self.gid, ready=self._grant,
            )  # fmt: skip

    def _grant(self, descriptor: int) -> None:
        if self.reader >= 0:
            own = self.mode >> 6
            safefs.set_acl(descriptor, [self.reader], own, own & 5)

    def release(self) -> None:
        """Remove the file and any temporary file of a killed writer."""
        if self.replace:
            with safefs.name_errors(f"cannot remove {self.path}"):
                safefs.remove_file(safefs.temporary_name(self.path))
        super().release()


@dataclass(frozen=True)
class Tree(CoreResource):
    """A directory. The release removes its contents, without following links or crossing mounts."""

    kind = "tree"
    volatile = False
    path: str
    mode: int = 0o711
    uid: int = -1
    gid: int = -1

    def create(self) -> None:
        """Create the directory. Raises HostFault if it exists."""
        with safefs.name_errors(f"cannot create {self.path}"):
            safefs.make_directory(self.path, mode=self.mode, uid=self.uid, gid=self.gid)

    def release(self) -> None:
        """Remove the directory and its contents if it exists."""
        with safefs.name_errors(f"cannot remove {self.path}"):
            safefs.remove_tree(self.path)
