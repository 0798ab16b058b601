"""Kinds of what is acquired: a file and a directory of a job."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.api.acquired import CoreResource, unjournalled
from vtorque_core.base import safefs


class OneFile(CoreResource):
    """Base of resources that are one file, ``path``, and no more: its removal releases them."""

    volatile = False
    path: str

    def release(self) -> None:
        """Remove the file; missing is fine."""
        with safefs.naming(f"cannot remove {self.path}"):
            safefs.remove_file(self.path)


@dataclass(frozen=True)
class File(OneFile):
    """A file below a trusted directory (:mod:`vtorque_core.base.safefs`); it must not exist yet.

    With ``replace`` it may exist and is exchanged in one step, so that readers see old or new.
    ``uid``/``gid`` -1: as created. ``reader`` may read it, and run it where ``mode`` lets its
    owner; it stays root's, so that nobody can make it larger and fill what holds it.
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
        """Write it. Raises HostFault: it exists, the disk is full, the directory is not safe."""
        write = safefs.replace if self.replace else safefs.write_new
        with safefs.naming(f"cannot create {self.path}"):
            write(
                self.path, self.content, mode=self.mode, uid=self.uid, gid=self.gid, ready=self._let
            )

    def _let(self, descriptor: int) -> None:
        if self.reader >= 0:
            own = self.mode >> 6
            safefs.let(descriptor, [self.reader], own, own & 5)

    def release(self) -> None:
        """Remove it, and what a killed writer has left beside it; missing is fine."""
        if self.replace:
            with safefs.naming(f"cannot remove {self.path}"):
                safefs.remove_file(safefs.beside(self.path))
        super().release()


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
        with safefs.naming(f"cannot create {self.path}"):
            safefs.make_directory(self.path, mode=self.mode, uid=self.uid, gid=self.gid)

    def release(self) -> None:
        """Remove it with its content; missing is fine."""
        with safefs.naming(f"cannot remove {self.path}"):
            safefs.remove_tree(self.path)
