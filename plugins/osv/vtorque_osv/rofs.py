"""Write OSv's read-only file system, ROFS, version 1.

The layout is in blocks of 512 bytes, with little-endian numbers (OSv: fs/rofs/rofs.hh and
scripts/gen-rofs-img.py):

1. A superblock of eight u64.
2. The data of the files, each from the start of a block.
3. Without gaps: all directory entries (u64 inode number, u16 length, name), all symbolic links
   (u16 length, path), all inodes (u64 mode, number, offset, count).
4. Zeros up to the end of the block.

Inode numbers start at 1, the root directory. An inode's offset and count depend on its type:

- file: first block, size in bytes;
- directory: first entry, number of entries;
- symbolic link: number of the link, 1.

Owners, permissions and times are not stored: OSv shows all files as readable, executable, and owned
by root.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from vtorque_core.api import Refused

BLOCK = 512
MAGIC = 0xDEADBEAD
VERSION = 1
DIRECTORY, FILE, LINK = 0x4000, 0x8000, 0xA000
MAX_NAME = 255  # NAME_MAX of OSv (include/api/limits.h)
MAX_PATH = 4095  # PATH_MAX of OSv less its NUL
MAX_ENTRIES = 1_000_000
_CHUNK = 1 << 20

_SUPERBLOCK = struct.Struct("<8Q")
_ENTRY = struct.Struct("<QH")
_LENGTH = struct.Struct("<H")
_INODE = struct.Struct("<4Q")


@dataclass
class RofsNode:
    """A directory (``children``), a link (``target``) or a file.

    A file's content is ``data``, or the content of ``source``, a regular file of the host.
    """

    mode: int
    children: dict[bytes, RofsNode] = field(default_factory=dict)
    target: bytes = b""
    data: bytes = b""
    source: Path | None = None


class RofsTree:
    """The file tree to write, with absolute guest paths."""

    def __init__(self) -> None:
        self.root = RofsNode(DIRECTORY)
        self._entries = 0

    def directory(self, path: str) -> RofsNode:
        """Create a directory and its parents, if missing. Raises Refused."""
        node = self.root
        for part in _parts(path):
            found = node.children.get(part)
            if found is None:
                found = self._put(node, part, RofsNode(DIRECTORY))
            if found.mode != DIRECTORY:
                raise Refused(f"{path}: a parent of this path is a file or link in the image")
            node = found
        return node

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link, which replaces an existing file. Raises Refused."""
        raw = os.fsencode(target)
        if not raw or len(raw) > MAX_PATH or b"\0" in raw:
            raise Refused(f"{path}: a link's target must have 1 to {MAX_PATH} bytes")
        self._leaf(path, RofsNode(LINK, target=raw))

    def file(self, path: str, data: bytes | Path) -> None:
        """Add or replace a file, from bytes or a host file."""
        if isinstance(data, Path):
            self._leaf(path, RofsNode(FILE, source=data))
        else:
            self._leaf(path, RofsNode(FILE, data=data))

    def add(self, path: str, source: Path) -> None:
        """Add a file, link or directory tree of the host; links are not followed.

        Raises Refused for other types, such as devices.
        """
        mode = source.lstat().st_mode
        if stat.S_ISLNK(mode):
            self.link(path, str(source.readlink()))
        elif stat.S_ISREG(mode):
            self.file(path, source)
        elif stat.S_ISDIR(mode):
            self.directory(path)
            for child in sorted(source.iterdir()):
                self.add(f"{path.rstrip('/')}/{child.name}", child)
        else:
            raise Refused(f"{source}: is not a file, directory or link")

    def sources(self) -> Iterator[Path]:
        """Yield the host files that the image contains."""
        return (node.source for node in _number_nodes(self.root) if node.source is not None)

    def names(self, path: str) -> Iterator[str]:
        """Yield the names in a directory, or nothing if it does not exist."""
        node: RofsNode | None = self.root
        for part in _parts(path):
            node = node.children.get(part) if node is not None else None
        return (os.fsdecode(name) for name in (node.children if node is not None else ()))

    def has(self, path: str) -> bool:
        """Return whether the path is in the tree, without following links."""
        node: RofsNode | None = self.root
        for part in _parts(path):
            node = node.children.get(part) if node is not None else None
        return node is not None

    def _leaf(self, path: str, node: RofsNode) -> None:
        *parents, name = _parts(path) or (b"",)
        if not name:
            raise Refused("/ of the image must be a directory")
        above = self.directory("/" + "/".join(os.fsdecode(part) for part in parents))
        there = above.children.get(name)
        if there is not None and there.mode == DIRECTORY:
            raise Refused(f"{path}: is already a directory in the image")
        self._put(above, name, node)

    def _put(self, above: RofsNode, name: bytes, node: RofsNode) -> RofsNode:
        if name not in above.children:
            self._entries += 1
            if self._entries > MAX_ENTRIES:
                raise Refused(f"more than {MAX_ENTRIES} files in the image")
        above.children[name] = node
        return node


def _parts(path: str) -> tuple[bytes, ...]:
    pure = PurePosixPath(path)
    parts = tuple(os.fsencode(part) for part in pure.parts[1:])
    bad = not pure.is_absolute() or b".." in parts or any(b"\0" in part for part in parts)
    if bad or len(os.fsencode(path)) > MAX_PATH or any(len(part) > MAX_NAME for part in parts):
        raise Refused(
            f"{path!r}: must be an absolute path without '..', of at most {MAX_PATH} bytes, with "
            f"names of at most {MAX_NAME} bytes"
        )
    return parts


def write(tree: RofsTree, out: BinaryIO) -> int:
    """Write the file system at the position of the seekable ``out``; return its size in bytes.

    The output is reproducible. Raises OSError, or Refused if a source is no longer a regular file.
    """
    begin = out.tell()
    out.write(bytes(BLOCK))
    numbered = list(_number_nodes(tree.root))
    blocks = _write_data(out, numbered)
    entries, links, inodes = _tables(numbered, blocks)
    first = (out.tell() - begin) // BLOCK
    info = b"".join([*entries, *links, *inodes])
    info += bytes(-len(info) % BLOCK)
    out.write(info)
    end = out.tell()
    out.seek(begin)
    counts = (len(entries), len(links), len(inodes))
    out.write(_SUPERBLOCK.pack(MAGIC, VERSION, BLOCK, first, len(info) // BLOCK, *counts))
    out.seek(end)
    return end - begin


def _number_nodes(root: RofsNode) -> Iterator[RofsNode]:
    """Yield all nodes, the root first. The children of each directory follow one another."""
    waiting = [root]
    yield root
    while waiting:
        node = waiting.pop()
        children = [node.children[name] for name in sorted(node.children)]
        yield from children
        waiting += [child for child in children if child.mode == DIRECTORY]


def _write_data(out: BinaryIO, nodes: list[RofsNode]) -> Mapping[int, tuple[int, int]]:
    """Write the files' data; return first block and size of each file by the ``id`` of its node."""
    block = 1
    found = {}
    for node in nodes:
        if node.mode == FILE:
            size = copy(node, out.write)
            found[id(node)] = (block, size)
            out.write(bytes(-size % BLOCK))
            block += -(-size // BLOCK)
    return found


def copy(node: RofsNode, put: Callable[[bytes], object]) -> int:
    """Pass a file's content to ``put``; return its size. Raises OSError and Refused."""
    if node.source is None:
        put(node.data)
        return len(node.data)
    size = 0
    descriptor = os.open(node.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Refused(f"{node.source}: is not a regular file")
        while part := file.read(_CHUNK):
            put(part)
            size += len(part)
    return size


def _tables(
    nodes: list[RofsNode], blocks: Mapping[int, tuple[int, int]]
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    number = {id(node): at for at, node in enumerate(nodes, start=1)}
    entries: list[bytes] = []
    links: list[bytes] = []
    inodes = []
    for node in nodes:
        if node.mode == DIRECTORY:
            offset, count = len(entries), len(node.children)
            for name in sorted(node.children):
                entries.append(_ENTRY.pack(number[id(node.children[name])], len(name)) + name)
        elif node.mode == LINK:
            offset, count = len(links), 1
            links.append(_LENGTH.pack(len(node.target)) + node.target)
        else:
            offset, count = blocks[id(node)]
        inodes.append(_INODE.pack(node.mode, number[id(node)], offset, count))
    return entries, links, inodes
