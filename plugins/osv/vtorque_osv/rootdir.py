"""Write an image's tree to a host directory, which virtiofs serves as a guest's root file system.

OSv mounts the directory read-only and sees the host's owners and modes. All files are
world-readable, because the job's user reads them. Guests may be running from a directory, so each
build writes a new directory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from vtorque_core.api import Refused
from vtorque_osv.rofs import DIRECTORY, LINK, RofsNode, RofsTree, copy

_EXECUTE = 0o111


def write(tree: RofsTree, target: Path) -> None:
    """Create the directory ``target`` with the tree, atomically.

    Privileges: root.

    Raises:
        Refused: ``target`` exists, or users other than root can write to one of its parents.
        OSError: a file cannot be read or written.
    """
    target = target.absolute()
    if os.path.lexists(target):
        raise Refused(
            f"root_directory {target}: exists, and guests may be using it: name a new directory"
        )
    for above in target.parents:
        status = above.lstat()
        others = status.st_mode & 0o022 and not status.st_mode & 0o1000
        if others or status.st_uid not in (0, os.geteuid()):
            raise Refused(f"root_directory {target}: users other than root can write to {above}")
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _fill(tree.root, fresh)
        fresh.chmod(0o755)
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _fill(node: RofsNode, directory: Path) -> None:
    for name, child in sorted(node.children.items()):
        path = directory / os.fsdecode(name)
        if child.mode == DIRECTORY:
            path.mkdir()
            _fill(child, path)
            path.chmod(0o755)
        elif child.mode == LINK:
            path.symlink_to(os.fsdecode(child.target))
        else:
            with path.open("xb") as file:
                copy(child, file.write)
            runs = child.source is not None and child.source.stat().st_mode & _EXECUTE
            path.chmod(0o755 if runs else 0o644)
