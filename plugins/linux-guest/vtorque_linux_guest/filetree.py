"""The files of an image in the making, as a tree in memory; contents stay in the files they are in.

An image is put together here and nowhere else: nothing that a tar file or a recipe says is ever a
path of the building machine, so there is nothing to escape from. Pure but for reading tar files.
"""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, cast

from vtorque_core.api_node import Refused

MAX_ENTRIES = 500_000
MAX_HEADER = 1 << 20  # bytes of one extended header: pax(1) records and long names are read whole
MAX_NAME = 255  # bytes: ext4's limit and everybody's
MAX_LINKS = 40  # as the kernel's own (path_resolution(7))
MAX_TARGET = 4095  # bytes of a symbolic link: a page less its NUL
_LATEST = 0x7FFFFFFF  # seconds: what every ext4 can say
_XATTR = "SCHILY.xattr."  # how tar(1) and Go's archive/tar name them in pax headers


@dataclass(frozen=True)
class Slice:
    """A part of a file that stays open: the content of a member of a tar file."""

    file: IO[bytes]
    offset: int
    size: int


@dataclass
class Node:
    """A file of the image. ``mode`` with its type; ``mtime`` in seconds since 1970.

    A symbolic link's content is its target. A hard link is the same object under two names.
    """

    mode: int
    content: bytes | Slice = b""
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    xattrs: dict[str, bytes] = field(default_factory=dict)
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of its content."""
        return self.content.size if isinstance(self.content, Slice) else len(self.content)

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return stat.S_ISLNK(self.mode)

    def read(self, most: int = 1 << 30) -> bytes:
        """Return its content. Raises Refused if that is longer than ``most`` bytes."""
        if self.size > most:
            raise Refused(f"a file has {self.size} bytes; at most {most} are read")
        if isinstance(self.content, bytes):
            return self.content
        self.content.file.seek(self.content.offset)
        return self.content.file.read(self.content.size)


def directory(mode: int = 0o755) -> Node:
    """Return a directory of root's."""
    return Node(stat.S_IFDIR | mode)


class FileTree:
    """All files of an image. Paths are relative to its root; links are followed inside it."""

    def __init__(self) -> None:
        self.root = directory()

    def find(self, path: str, *, follow: bool = True) -> Node | None:
        """Return what is at a path, or None. ``follow``: the last part, too, if it is a link."""
        try:
            parent, name = self._locate(path, make=False)
        except (Refused, LookupError):
            return None
        if name == "":
            return parent
        node = parent.children.get(name)
        if node is not None and node.is_link and follow:
            return self.find(self._beside(path, node))
        return node

    def put(self, path: str, node: Node) -> None:
        """Put a file there, with the directories above it. A directory keeps what is in it.

        Raises Refused if a part of the path is no directory.
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

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Put a regular file of root's there."""
        self.put(path, Node(stat.S_IFREG | mode, content))

    def link(self, path: str, target: str) -> None:
        """Put a symbolic link there."""
        self.put(path, Node(stat.S_IFLNK | 0o777, target.encode("utf-8", "surrogateescape")))

    def directory(self, path: str, mode: int = 0o755) -> None:
        """Make sure that there is a directory; one that is there stays as it is."""
        found = self.find(path)
        if found is None or not found.is_directory:
            self.put(path, directory(mode))

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it; it may be missing."""
        try:
            parent, name = self._locate(path, make=False)
        except (Refused, LookupError):
            return
        parent.children.pop(name, None)

    def clear(self, path: str) -> None:
        """Remove all that is in a directory, which may be missing."""
        found = self.find(path, follow=False)
        if found is not None:
            found.children.clear()

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Yield each path and its node, sorted, directories before what is in them."""
        waiting = [("", self.root)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            base = f"{path}/" if path else ""
            names = sorted(node.children, reverse=True)
            waiting += [(f"{base}{name}", node.children[name]) for name in names]

    def _beside(self, path: str, link: Node) -> str:
        """Return the path that a link at ``path`` leads to."""
        target = link.read(MAX_TARGET).decode("utf-8", "surrogateescape")
        return target if target.startswith("/") else f"{path.rpartition('/')[0]}/{target}"

    def _locate(self, path: str, *, make: bool) -> tuple[Node, str]:
        """Return the directory that holds a path, and the path's last part in it.

        As the kernel does it in a chroot: ``..`` of the root is the root. Raises LookupError for a
        missing directory unless it is to be made, Refused for one that is none, and for a loop.
        """
        words = path.split("/")
        above: list[Node] = []
        at, links = self.root, 0
        while words:
            word = words.pop(0)
            if word in ("", "."):
                continue
            if word == "..":
                at = above.pop() if above else self.root
                continue
            if not any(w not in ("", ".") for w in words):
                return at, word
            node = at.children.get(word)
            if node is None:
                if not make:
                    raise LookupError(path)
                node = at.children[word] = directory()
            if node.is_link:
                links += 1
                if links > MAX_LINKS:
                    raise Refused(f"{path!r}: too many symbolic links")
                target = node.read(MAX_TARGET).decode("utf-8", "surrogateescape")
                if target.startswith("/"):
                    at, above = self.root, []
                words = [*target.split("/"), *words]
                continue
            if not node.is_directory:
                raise Refused(f"{path!r}: {word!r} is not a directory")
            above.append(at)
            at = node
        return at, ""


class Bounded:
    """A file that tarfile may read headers of, but none that would fill the memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        """Read; raises Refused for more than a header's size."""
        if not 0 <= size <= MAX_HEADER:
            raise Refused(f"a header of {size} bytes; at most {MAX_HEADER} are read")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of the file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """As of the file."""
        return self._file.tell()


@dataclass(frozen=True)
class Member:
    """One member of a tar file: its checked path, and what tarfile says of it."""

    path: str
    info: tarfile.TarInfo


def members(file: IO[bytes], most: int) -> list[Member]:
    """Return the members of a plain tar file, in its order, with checked names and sizes.

    ``most``: bytes that all contents together may have. Raises Refused for what is no tar file,
    is truncated, has absolute paths, ``..``, or kinds of files that an image cannot have.
    """
    size = file.seek(0, 2)
    file.seek(0)
    found: list[Member] = []
    total = 0
    try:
        with tarfile.open(fileobj=cast(IO[bytes], Bounded(file)), mode="r:") as archive:
            for info in archive:
                if len(found) >= MAX_ENTRIES:
                    raise Refused(f"has more than {MAX_ENTRIES} files")
                if info.isreg():
                    total += _content_size(info, size)
                    if total > most:
                        raise Refused(
                            f"has more than {most >> 20} MiB of files (the limit is the image's "
                            "size: -o size=)"
                        )
                found.append(Member(_checked(info), info))
                archive.members = []  # type: ignore[attr-defined]  # or tarfile keeps them a second time
    except (tarfile.TarError, UnicodeError, ValueError, OverflowError, EOFError) as error:
        raise Refused(f"is not a tar file, or a broken one: {error}") from None
    return found


def _content_size(info: tarfile.TarInfo, file_size: int) -> int:
    if info.issparse():
        raise Refused(f"{info.name!r} is a sparse member: make the tar file without --sparse")
    if info.size < 0 or info.offset_data + info.size > file_size:
        raise Refused(f"is truncated: {info.name!r} ends beyond its end")
    return info.size


def _checked(info: tarfile.TarInfo) -> str:
    """Return a member's path without ``.`` and empty parts. Raises Refused."""
    shown = repr(info.name[:200])
    if info.name.startswith("/"):
        raise Refused(f"{shown} is an absolute path")
    words = [word for word in info.name.split("/") if word not in ("", ".")]
    if ".." in words:
        raise Refused(f"{shown} has '..' in it")
    for word in words:
        if "\0" in word or len(word.encode("utf-8", "surrogateescape")) > MAX_NAME:
            raise Refused(f"{shown} has a name that no file can have")
    if info.ischr() or info.isblk():
        if words[:1] != ["dev"]:
            raise Refused(f"{shown} is a device: images have none outside /dev")
    elif not (info.isreg() or info.isdir() or info.issym() or info.islnk() or info.isfifo()):
        raise Refused(f"{shown} is of unknown type {info.type!r}")
    elif info.issym() and not 0 < len(_target(info)) <= MAX_TARGET:
        raise Refused(f"{shown} is a link to a path that is empty or too long")
    return "/".join(words)


def _target(info: tarfile.TarInfo) -> bytes:
    target = info.linkname.encode("utf-8", "surrogateescape")
    return b"" if b"\0" in target else target


def is_device(member: Member) -> bool:
    """Return whether a member is a device or lies in /dev, which the guest's kernel fills."""
    return member.path.startswith("dev/") or member.info.isdev()


def add_member(
    tree: FileTree, file: IO[bytes], member: Member, keep: Callable[[str], bool]
) -> None:
    """Put a member into the tree. ``keep`` says which extended attributes go with it.

    Raises Refused for a hard link to what is not there, or is a directory.
    """
    info, path = member.info, member.path
    if info.islnk():
        if info.linkname.startswith("/") or ".." in info.linkname.split("/"):
            raise Refused(f"{path!r} is a hard link with an absolute path or '..'")
        target = tree.find(info.linkname, follow=False)
        if target is None or target.is_directory:
            raise Refused(f"{path!r} is a hard link to {info.linkname[:200]!r}, which is no file")
        tree.put(path, target)
        return
    mode = info.mode & 0o7777
    content: bytes | Slice = b""
    if info.isdir():
        mode |= stat.S_IFDIR
    elif info.issym():
        mode, content = stat.S_IFLNK | 0o777, _target(info)
    elif info.isfifo():
        mode |= stat.S_IFIFO
    else:
        mode |= stat.S_IFREG
        content = Slice(file, info.offset_data, info.size) if info.size else b""
    for owner in (info.uid, info.gid):
        if not 0 <= owner < 0xFFFFFFFF:
            raise Refused(f"{path!r} belongs to {owner}, which is no id")
    mtime = min(max(int(info.mtime), 0), _LATEST)
    node = Node(mode, content, info.uid, info.gid, mtime, _xattrs(info.pax_headers, keep))
    tree.put(path, node)


def _xattrs(headers: Mapping[str, str], keep: Callable[[str], bool]) -> dict[str, bytes]:
    names = [key.removeprefix(_XATTR) for key in headers if key.startswith(_XATTR)]
    found = {name: headers[_XATTR + name] for name in names if keep(name)}
    return {name: value.encode("utf-8", "surrogateescape") for name, value in found.items()}


def read_tar(file: IO[bytes], most: int, keep: Callable[[str], bool]) -> FileTree:
    """Return the files of a tar file of a whole root directory; /dev is left empty."""
    tree = FileTree()
    for member in members(file, most):
        if not is_device(member):
            add_member(tree, file, member, keep)
    return tree
