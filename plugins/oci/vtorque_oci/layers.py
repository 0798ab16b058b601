"""Lay the layers of a container over each other, as OCI image-spec 1.1, layer.md, says.

In memory: see :mod:`vtorque_linux_guest.image.filetree`. No name in a layer is ever a path of this
machine, so neither ``..`` nor a link can lead out of the image.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from io import BufferedReader
from typing import IO

from vtorque_core.api import Refused
from vtorque_linux_guest.image.filetree import FileTree, Node, add_member, is_device
from vtorque_linux_guest.image.tar_reader import Budget, members

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"


def apply(
    tree: FileTree, file: IO[bytes], most: int, keep: Callable[[str], bool], budget: Budget
) -> None:
    """Put a layer over what is in the tree. ``keep``: extended attributes that are kept.

    ``budget``: of all layers of the image. Whiteouts hide what lower layers have, wherever in the
    layer they stand. Raises Refused.
    """
    listed = [member for member in members(file, most, budget) if not is_device(member)]
    added = []
    for member in listed:
        directory, _, name = member.path.rpartition("/")
        if not name.startswith(_WHITEOUT):
            added.append(member)
        elif name == _OPAQUE:
            tree.clear(directory)
        elif not name.startswith(".wh..wh."):  # others are aufs's own
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in ("", ".", ".."):
                raise Refused(f"{member.path[:200]!r} hides nothing that can be named")
            tree.remove(f"{directory}/{hidden}")
    for member in added:
        add_member(tree, file, member, keep)


def check_digest(file: BufferedReader, expect: str | None) -> None:
    """Refuse a layer whose content is not what the configuration says."""
    if expect is None:
        return
    file.seek(0)
    found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expect:
        raise Refused(
            f"a layer has sha256 {found[:16]}..., its configuration says {expect[:16]}..."
        )


def without_privilege(tree: FileTree) -> int:
    """Take setuid and setgid bits and capabilities from programs; return from how many.

    A container's user may have made them: they would be root in the guest.
    """
    count = 0
    for _, node in tree.walk():
        if node.is_file and (_special(node) or "security.capability" in node.xattrs):
            node.mode &= ~(stat.S_ISUID | stat.S_ISGID)
            node.xattrs.pop("security.capability", None)
            count += 1
    return count


def _special(node: Node) -> bool:
    return bool(node.mode & (stat.S_ISUID | stat.S_ISGID))
