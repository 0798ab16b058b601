"""The file tree of an image under construction, in memory. File contents stay on disk.

Paths of tar files and recipes are resolved only in this tree, never on the build machine.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO

from vtorque_core.api import Refused
from vtorque_linux_guest.image.tar_reader import MAX_ENTRIES, MAX_PATH, Member, members

MAX_LINKS = 40  # the kernel's limit, too (path_resolution(7))
MAX_STEPS = 50_000_000  # path components that are resolved for one image: takes half a minute


class _NoPath(Refused):
    """Error for a path that cannot be resolved in the image."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of an open file, such as the content of a member of a tar file."""

    file: IO[bytes]
    offset: int
    size: int


@dataclass(slots=True)
class TreeNode:
    """A file of the image. ``mode`` includes the file type; ``mtime`` is in seconds since 1970.

    A symbolic link's content is its target. All hard links of a file share one object.
    """

    mode: int
    content: bytes | Slice = b""
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    xattrs: dict[str, bytes] = field(default_factory=dict)
    children: dict[str, TreeNode] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Size of the content in bytes."""
        return self.content.size if isinstance(self.content, Slice) else len(self.content)

    @property
    def is_directory(self) -> bool:
        """True for a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """True for a regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_link(self) -> bool:
        """True for a symbolic link."""
        return stat.S_ISLNK(self.mode)

    def read(self, most: int = 1 << 30) -> bytes:
        """Return the content. Raises Refused if it is longer than ``most`` bytes."""
        if self.size > most:
            raise Refused(f"a file has {self.size} bytes, and the limit is {most}")
        if isinstance(self.content, bytes):
            return self.content
        self.content.file.seek(self.content.offset)
        return self.content.file.read(self.content.size)


def directory(mode: int = 0o755) -> TreeNode:
    """Return an empty directory owned by root."""
    return TreeNode(stat.S_IFDIR | mode)


class FileTree:
    """All files of an image. Paths and links are resolved relative to the image's root."""

    def __init__(self) -> None:
        self.root = directory()
        self._names = 0
        self._steps = 0

    def find(self, path: str, *, follow: bool = True) -> TreeNode | None:
        """Return the node of a path, or None.

        With ``follow``, resolve the last component if it is a link.
        """
        for _ in range(MAX_LINKS):
            try:
                parent, name = self._locate(path, make=False)
            except (_NoPath, LookupError):
                return None
            if name == "":
                return parent
            node = parent.children.get(name)
            if node is None or not node.is_link or not follow:
                return node
            path = self._link_target(path, node)
        return None

    def put(self, path: str, node: TreeNode) -> None:
        """Add a node and its missing parents.

        A directory that replaces a directory keeps the entries of the old directory. Raises Refused
        if a parent is not a directory.
        """
        parent, name = self._locate(path, make=True)
        if name == "":
            if not node.is_directory:
                raise Refused(f"{path!r}: the root of the image must be a directory")
            node.children = self.root.children
            self.root = node
            return
        old = parent.children.get(name)
        if old is not None and old.is_directory and node.is_directory:
            node.children = old.children
        parent.children[name] = node
        if old is None:
            self._count()

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Add a regular file owned by root."""
        self.put(path, TreeNode(stat.S_IFREG | mode, content))

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self.put(path, TreeNode(stat.S_IFLNK | 0o777, target.encode("utf-8", "surrogateescape")))

    def directory(self, path: str, mode: int = 0o755) -> None:
        """Add a directory unless it exists."""
        found = self.find(path)
        if found is None or not found.is_directory:
            self.put(path, directory(mode))

    def remove(self, path: str) -> None:
        """Remove a file or a directory tree, if it exists."""
        try:
            parent, name = self._locate(path, make=False)
        except (_NoPath, LookupError):
            return
        parent.children.pop(name, None)

    def clear(self, path: str) -> None:
        """Remove all entries of a directory, if it exists."""
        found = self.find(path, follow=False)
        if found is not None:
            found.children.clear()

    def protect(self, path: str) -> None:
        """Make a directory and all its parents writable only by root.

        Creates a missing directory. Raises Refused if a parent is not a directory.
        """
        way = [self.root]
        self._locate(f"{path}/x", make=True, way=way)
        for node in way:
            node.uid, node.mode = 0, node.mode & ~0o022

    def walk(self) -> Iterator[tuple[str, TreeNode]]:
        """Yield each path and its node, sorted, directories before their entries."""
        yield "", self.root
        waiting = [("", iter(sorted(self.root.children.items())))]
        while waiting:
            base, rest = waiting[-1]
            name, node = next(rest, ("", None))
            if node is None:
                waiting.pop()
                continue
            yield f"{base}{name}", node
            if node.children:
                waiting.append((f"{base}{name}/", iter(sorted(node.children.items()))))

    def _count(self) -> None:
        self._names += 1
        if self._names > 2 * MAX_ENTRIES:
            self._names = sum(1 for _ in self.walk())
            if self._names > MAX_ENTRIES:
                raise Refused(f"the image has more than {MAX_ENTRIES} files")

    def _link_target(self, path: str, link: TreeNode) -> str:
        target = link.read(MAX_PATH).decode("utf-8", "surrogateescape")
        return target if target.startswith("/") else f"{path.rpartition('/')[0]}/{target}"

    def _locate(
        self, path: str, *, make: bool, way: list[TreeNode] | None = None
    ) -> tuple[TreeNode, str]:
        """Return the directory that contains a path, and the path's last component.

        Resolves paths as in a chroot: ``..`` of the root is the root. Appends each directory on the
        path to ``way``. Raises LookupError for a missing directory unless ``make`` is true, Refused
        if a parent is not a directory or the path has too many symbolic links.
        """
        words = self._words(path)
        above: list[tuple[TreeNode, int]] = []
        at, links, length = self.root, 0, 0
        while words:
            name = words.pop()
            if name == "..":
                at, length = above.pop() if above else (self.root, 0)
                continue
            node = at.children.get(name)
            if make and node is None and length + len(name) > MAX_PATH:
                raise _NoPath(f"{path[:200]!r} resolves to a path of more than {MAX_PATH} bytes")
            if not words:
                return at, name
            if node is None:
                if not make:
                    raise LookupError(path)
                node = at.children[name] = directory()
                self._count()
            if node.is_link:
                links += 1
                if links > MAX_LINKS:
                    raise _NoPath(f"{path[:200]!r}: too many symbolic links")
                target = node.read(MAX_PATH).decode("utf-8", "surrogateescape")
                if target.startswith("/"):
                    at, above, length = self.root, [], 0
                words += self._words(target)
                continue
            if not node.is_directory:
                raise _NoPath(f"{path[:200]!r}: {name!r} is not a directory")
            above.append((at, length))
            at, length = node, length + len(name) + 1
            if way is not None:
                way.append(at)
        return at, ""

    def _words(self, path: str) -> list[str]:
        """Return the components of a path, last first.

        Raises Refused if more than MAX_STEPS components are resolved for one image.
        """
        words = [word for word in reversed(path.split("/")) if word not in ("", ".")]
        self._steps += 1 + len(path) // 32 + len(words)
        if self._steps > MAX_STEPS:
            raise Refused(
                f"resolving the image's names and symbolic links takes more than {MAX_STEPS} steps"
            )
        return words


def is_device(member: Member) -> bool:
    """Return whether a tar file's member is a device or in /dev, which the guest's kernel fills."""
    return member.path.startswith("dev/") or member.kind == "device"


def add_member(
    tree: FileTree, file: IO[bytes], member: Member, keep: Callable[[str], bool]
) -> None:
    """Add a tar file's member to the tree. ``keep`` selects the extended attributes to keep.

    Raises Refused for a hard link to a missing file or a directory.
    """
    path, to = member.path, member.target
    if member.kind == "hard link":
        if to.startswith("/") or ".." in to.split("/"):
            raise Refused(f"{path!r} is a hard link with an absolute path or '..'")
        target = tree.find(to, follow=False)
        if target is None or target.is_directory:
            raise Refused(f"{path!r} is a hard link to {to[:200]!r}, which is not a file")
        tree.put(path, target)
        return
    mode = member.mode
    content: bytes | Slice = b""
    if member.kind == "directory":
        mode |= stat.S_IFDIR
    elif member.kind == "link":
        mode, content = stat.S_IFLNK | 0o777, to.encode("utf-8", "surrogateescape")
    elif member.kind == "fifo":
        mode |= stat.S_IFIFO
    else:
        mode |= stat.S_IFREG
        content = Slice(file, member.offset, member.size) if member.size else b""
    xattrs = {name: value for name, value in (member.xattrs or {}).items() if keep(name)}
    tree.put(path, TreeNode(mode, content, member.uid, member.gid, member.mtime, xattrs))


def read_tar(file: IO[bytes], most: int, keep: Callable[[str], bool]) -> FileTree:
    """Return the file tree of a tar file of a whole system, without devices and contents of /dev.

    ``most`` limits the size of all contents in bytes. ``keep`` selects the extended attributes to
    keep. Raises Refused.
    """
    tree = FileTree()
    for member in members(file, most):
        if not is_device(member):
            add_member(tree, file, member, keep)
    return tree
