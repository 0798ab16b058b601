"""Merge the layers of a container in memory (OCI image-spec 1.1, layer.md).

No name in a layer is used as a path of this machine, so neither ``..`` nor a link can escape from
the image.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from io import BufferedReader
from typing import IO

from vtorque_core.api import Refused
from vtorque_linux_guest.image.filetree import FileTree, TreeNode, add_member, is_device
from vtorque_linux_guest.image.tar_reader import Budget, members

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"


def apply(
    tree: FileTree, file: IO[bytes], most: int, keep: Callable[[str], bool], budget: Budget
) -> None:
    """Apply a layer to the tree. Raises Refused.

    ``keep`` selects the extended attributes to keep. ``budget`` limits all layers of the image
    together. A whiteout at any position in the layer hides files of lower layers.
    """
    listed = [member for member in members(file, most, budget) if not is_device(member)]
    added = []
    for member in listed:
        directory, _, name = member.path.rpartition("/")
        if not name.startswith(_WHITEOUT):
            added.append(member)
        elif name == _OPAQUE:
            tree.clear(directory)
        elif not name.startswith(".wh..wh."):  # other such names are internal to aufs
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in ("", ".", ".."):
                raise Refused(f"the whiteout {member.path[:200]!r} does not name a file")
            tree.remove(f"{directory}/{hidden}")
    for member in added:
        add_member(tree, file, member, keep)


def check_digest(file: BufferedReader, expect: str | None) -> None:
    """Raise Refused if a layer has another SHA-256 than ``expect``. With None, do nothing."""
    if expect is None:
        return
    file.seek(0)
    found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expect:
        raise Refused(
            f"a layer has sha256 {found[:16]}..., but the configuration requires {expect[:16]}..."
        )


def strip_privileges(tree: FileTree) -> int:
    """Remove setuid and setgid bits and capabilities; return the number of changed programs.

    An ordinary user may have set them in the container, but in the guest they would give root
    privileges.
    """
    count = 0
    for _, node in tree.walk():
        if node.is_file and (_special(node) or "security.capability" in node.xattrs):
            node.mode &= ~(stat.S_ISUID | stat.S_ISGID)
            node.xattrs.pop("security.capability", None)
            count += 1
    return count


def _special(node: TreeNode) -> bool:
    return bool(node.mode & (stat.S_ISUID | stat.S_ISGID))
