"""Write an ext4 file system from a file tree, reproducibly and without privileges.

``mke2fs -d`` before 1.47.1 is not reproducible, because it uses the directory order and change
times of the build machine. It also needs root for the owners of files.

The layout follows the kernel's Documentation/filesystems/ext4. Every block group has its own
bitmaps and inode table. There is no journal, because the root disk is discarded with its guest.
There are no checksums or htrees; the guest's kernel adds htrees itself.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vtorque_core.api import HostFault, Refused, name_errors
from vtorque_linux_guest.image.ext4_xattr import NoRoom, attribute_block, pack_in_inode
from vtorque_linux_guest.image.filetree import FileTree, Slice, TreeNode, directory

BLOCK = 4096  # bytes
GROUP = 8 * BLOCK  # blocks: as many as one block of bitmap has bits
_INODE = 256  # bytes
_BASE = 128  # bytes of an inode in ext2
_EXTRA = 32  # bytes of further fields; extended attributes follow
_PER_BLOCK = BLOCK // _INODE
_RATIO = 16384  # bytes of disk for each inode (mke2fs.conf(5))
_DESCRIPTOR = 32
_ROOT, _FIRST = 2, 11  # inode numbers: 1 to 10 are reserved, lost+found is 11
_EXTENTS_FL = 0x80000
_MAX_EXTENT = 32768  # blocks
_MAX_LINKS = 65000  # above that a directory's count is 1 (dir_nlink)
_FAST_LINK = 60  # bytes of a link target that fit in the inode
_UUID = bytes.fromhex("766f72717565400080007674726f6f74")  # an arbitrary UUID of version 4
_COMPAT = 0x8 | 0x20  # ext_attr, dir_index
_INCOMPAT = 0x2 | 0x40  # filetype, extents
_RO_COMPAT = 0x1 | 0x2 | 0x20 | 0x40  # sparse_super, large_file, dir_nlink, extra_isize
_FILE_TYPES = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFIFO: 5, stat.S_IFLNK: 7}


@dataclass(frozen=True)
class _Extent:
    """A run of ``count`` blocks: from block ``logical`` of the file, at ``physical`` on disk."""

    logical: int
    physical: int
    count: int


@dataclass
class _Disk:
    """The size of a file system and of its block groups, and the allocation of blocks.

    ``taken`` is the number of allocated blocks in each group; they are the group's first blocks.
    """

    descriptor: int
    blocks: int
    inodes_per_group: int
    taken: list[int] = field(default_factory=list)
    group: int = 0

    @property
    def groups(self) -> int:
        return -(-self.blocks // GROUP)

    @property
    def table(self) -> int:
        """Number of blocks of one group's inode table."""
        return self.inodes_per_group // _PER_BLOCK

    @property
    def descriptors(self) -> int:
        """Number of blocks of all group descriptors."""
        return -(-self.groups * _DESCRIPTOR // BLOCK)

    def head(self, group: int) -> int:
        """Return how many blocks a group uses for copies of superblock and group descriptors."""
        return 1 + self.descriptors if _has_copy(group) else 0

    def overhead(self, group: int) -> int:
        """Return the number of metadata blocks of a group."""
        return self.head(group) + 2 + self.table

    def length(self, group: int) -> int:
        return min(GROUP, self.blocks - group * GROUP)

    def take(self, count: int) -> list[_Extent]:
        """Allocate free blocks in order. Raises Refused if there are not enough."""
        found: list[_Extent] = []
        logical = 0
        while logical < count:
            if self.group >= self.groups:
                raise Refused(
                    f"the files need more than the {self.blocks * BLOCK >> 20} MiB of the root "
                    "disk: increase size"
                )
            taken = self.taken[self.group]
            free = self.length(self.group) - taken
            if free == 0:
                self.group += 1
                continue
            run = min(free, count - logical, _MAX_EXTENT)
            found.append(_Extent(logical, self.group * GROUP + taken, run))
            self.taken[self.group] += run
            logical += run
        return found

    def write(self, block: int, data: bytes) -> None:
        os.pwrite(self.descriptor, data, block * BLOCK)


def _has_copy(group: int) -> bool:
    """Return whether a group has a copy of the superblock: groups 0, 1, powers of 3, 5 and 7."""
    if group <= 1:
        return True
    for base in (3, 5, 7):
        power = base
        while power < group:
            power *= base
        if power == group:
            return True
    return False


def write_ext4(tree: FileTree, path: Path, size: int, label: str) -> None:
    """Write the tree as a file system of ``size`` MiB into a new sparse file.

    See :func:`fill_ext4`.
    """
    with path.open("xb") as file:
        fill_ext4(tree, file.fileno(), size, label)


def fill_ext4(tree: FileTree, descriptor: int, size: int, label: str) -> None:
    """Write the tree as a file system of ``size`` MiB into an open, empty file.

    ``label`` has at most 16 bytes. Raises Refused if the files do not fit, HostFault if the
    machine's disk is full.
    """
    lost = tree.root.children.get("lost+found")
    if lost is None or not lost.is_directory:
        tree.root.children["lost+found"] = directory(0o700)
        tree.root.children["lost+found"].mtime = tree.root.mtime
    numbers, order = _number(tree.root)
    with name_errors("root disk", stage="root disk"):
        disk = _plan(descriptor, size, max(numbers.values()))
        os.ftruncate(descriptor, disk.blocks * BLOCK)
        _write(disk, order, numbers, label)


def _number(root: TreeNode) -> tuple[dict[int, int], list[tuple[TreeNode, TreeNode]]]:
    """Return inode numbers by each node's id(), and (node, parent) pairs in inode order."""
    numbers = {id(root): _ROOT, id(root.children["lost+found"]): _FIRST}
    order = [(root, root)]
    at, following = 0, _FIRST + 1
    while at < len(order):  # breadth first: a directory's files are close to each other
        parent = order[at][0]
        at += 1
        for name in sorted(parent.children):
            node = parent.children[name]
            if id(node) not in numbers:
                numbers[id(node)] = following
                following += 1
            elif node is not root.children["lost+found"]:
                continue  # a hard link
            order.append((node, parent))
    return numbers, order


def _plan(descriptor: int, size: int, highest: int) -> _Disk:
    blocks = size * (1 << 20) // BLOCK
    groups = -(-blocks // GROUP)
    wanted = max(GROUP * BLOCK // _RATIO, -(-highest * 5 // (groups * 4)))
    per_group = -(-wanted // _PER_BLOCK) * _PER_BLOCK
    if per_group > 8 * BLOCK:
        raise Refused(f"{highest} files are too many for a root disk of {size} MiB")
    disk = _Disk(descriptor, blocks, per_group)
    last = groups - 1
    if last and disk.length(last) < disk.overhead(last) + 64:
        disk.blocks = last * GROUP  # the rest is too small to be a group
    disk.taken = [disk.overhead(group) for group in range(disk.groups)]
    return disk


def _write(
    disk: _Disk, order: Sequence[tuple[TreeNode, TreeNode]], numbers: dict[int, int], label: str
) -> None:
    links = _links(order, numbers)
    directories = [0] * disk.groups
    table: dict[int, bytes] = {}
    for node, parent in order:
        number = numbers[id(node)]
        if node.is_directory:
            data: bytes | Slice = _entries(node, number, numbers[id(parent)], numbers)
            directories[(number - 1) // disk.inodes_per_group] += 1
        else:
            data = node.content
        table[number] = _inode(disk, node, data, links[number])
    highest = max(table)
    for first in range(1, highest + 1, _PER_BLOCK):
        batch = b"".join(table.get(n, bytes(_INODE)) for n in range(first, first + _PER_BLOCK))
        group, index = divmod(first - 1, disk.inodes_per_group)
        where = group * GROUP + disk.head(group) + 2 + index // _PER_BLOCK
        disk.write(where, batch)
    _write_groups(disk, highest, directories, label, order[0][0].mtime)


def _links(order: Sequence[tuple[TreeNode, TreeNode]], numbers: dict[int, int]) -> dict[int, int]:
    links = dict.fromkeys(numbers.values(), 0)
    links[_ROOT] = 1
    for node, _ in order:
        links[numbers[id(node)]] += 1 if node.is_directory else 0
        for child in node.children.values():
            links[numbers[id(child)]] += 1
            if child.is_directory:
                links[numbers[id(node)]] += 1
    return links


def _entries(node: TreeNode, number: int, parent: int, numbers: dict[int, int]) -> bytes:
    """Return the blocks of a directory. No entry crosses the end of a block."""
    found: list[tuple[bytes, int, int]] = [(b".", number, 2), (b"..", parent, 2)]
    for name in sorted(node.children):
        child = node.children[name]
        kind = _FILE_TYPES[stat.S_IFMT(child.mode)]
        found.append((name.encode("utf-8", "surrogateescape"), numbers[id(child)], kind))
    blocks: list[bytes] = []
    current: list[tuple[bytes, int, int]] = []
    used = 0
    for entry in found:
        length = _entry_length(entry[0])
        if used + length > BLOCK:
            blocks.append(_entry_block(current))
            current, used = [], 0
        current.append(entry)
        used += length
    blocks.append(_entry_block(current))
    return b"".join(blocks)


def _entry_length(name: bytes) -> int:
    return (8 + len(name) + 3) & ~3


def _entry_block(entries: Sequence[tuple[bytes, int, int]]) -> bytes:
    out, left = [], BLOCK
    for at, (name, number, kind) in enumerate(entries):
        length = left if at == len(entries) - 1 else _entry_length(name)
        head = struct.pack("<IHBB", number, length, len(name), kind)
        out.append((head + name).ljust(length, b"\0"))
        left -= length
    return b"".join(out)


def _inode(disk: _Disk, node: TreeNode, data: bytes | Slice, links: int) -> bytes:
    size = data.size if isinstance(data, Slice) else len(data)
    flags, blocks = 0, 0
    if node.is_link and size < _FAST_LINK:
        assert isinstance(data, bytes)  # noqa: S101 - links are never slices
        body = data.ljust(60, b"\0")
    elif node.is_link or node.is_file or node.is_directory:
        extents = disk.take(-(-size // BLOCK))
        _copy(disk, extents, data, size)
        flags, blocks = _EXTENTS_FL, sum(extent.count for extent in extents)
        body, index = _extent_tree(disk, extents)
        blocks += index
    else:
        body = bytes(60)
    outside = 0
    try:
        attributes = pack_in_inode(node.xattrs, _INODE - _BASE - _EXTRA)
    except NoRoom:
        attributes = b""
        (extent,) = disk.take(1)
        outside = extent.physical
        blocks += 1
        disk.write(outside, attribute_block(node.xattrs, BLOCK))
    count = links if links < _MAX_LINKS or not node.is_directory else 1
    if count > _MAX_LINKS:
        raise Refused(f"a file has {links} hard links, and the limit is {_MAX_LINKS}")
    time = node.mtime
    return struct.pack(
        "<HHIIIIIHHIII60sIIIIHHHHHHHHIIIIIII",
        *(node.mode, node.uid & 0xFFFF, size & 0xFFFFFFFF, time, time, time, 0),
        *(node.gid & 0xFFFF, count, blocks * (BLOCK // 512), flags, 0, body),
        *(0, outside, size >> 32, 0, 0, 0, node.uid >> 16, node.gid >> 16, 0, 0),
        *(_EXTRA, 0, 0, 0, 0, time, 0, 0, 0),
    ) + attributes.ljust(_INODE - _BASE - _EXTRA, b"\0")


def _extent_tree(disk: _Disk, extents: Sequence[_Extent]) -> tuple[bytes, int]:
    """Return an inode's extent tree (60 bytes) and the number of its index blocks."""
    if len(extents) <= 4:
        leaves = b"".join(_leaf(extent) for extent in extents)
        return (_extent_head(len(extents), 4, 0) + leaves).ljust(60, b"\0"), 0
    most = (BLOCK - 12) // 12
    parts = [extents[at : at + most] for at in range(0, len(extents), most)]
    if len(parts) > 4:
        raise Refused("a file is too large for the root disk: increase size")
    index = b""
    for part in parts:
        (where,) = disk.take(1)
        leaves = b"".join(_leaf(extent) for extent in part)
        disk.write(where.physical, _extent_head(len(part), most, 0) + leaves)
        index += struct.pack("<IIHH", part[0].logical, where.physical, 0, 0)
    return (_extent_head(len(parts), 4, 1) + index).ljust(60, b"\0"), len(parts)


def _extent_head(entries: int, most: int, depth: int) -> bytes:
    return struct.pack("<HHHHI", 0xF30A, entries, most, depth, 0)


def _leaf(extent: _Extent) -> bytes:
    return struct.pack("<IHHI", extent.logical, extent.count, 0, extent.physical)


def _copy(disk: _Disk, extents: Sequence[_Extent], data: bytes | Slice, size: int) -> None:
    for extent in extents:
        start = extent.logical * BLOCK
        length = min(extent.count * BLOCK, size - start)
        if isinstance(data, bytes):
            disk.write(extent.physical, data[start : start + length])
        else:
            where = data.offset + start
            _copy_range(data.file.fileno(), disk.descriptor, where, extent.physical * BLOCK, length)


def _copy_range(source: int, target: int, at: int, to: int, length: int) -> None:
    done = 0
    while done < length:
        try:
            count = os.copy_file_range(source, target, length - done, at + done, to + done)
        except OSError:  # not on these file systems: copy_file_range(2)
            part = os.pread(source, min(length - done, 1 << 20), at + done)
            count = os.pwrite(target, part, to + done)
        if count == 0:
            raise HostFault("a file shrank while it was read", stage="root disk")
        done += count


def _write_groups(
    disk: _Disk, highest: int, directories: Sequence[int], label: str, time: int
) -> None:
    descriptors, free_blocks, free_inodes = [], 0, 0
    for group in range(disk.groups):
        start, taken, length = group * GROUP, disk.taken[group], disk.length(group)
        used = min(max(highest - group * disk.inodes_per_group, 0), disk.inodes_per_group)
        where = start + disk.head(group)
        disk.write(where, _bitmap(taken, length))
        disk.write(where + 1, _bitmap(used, disk.inodes_per_group))
        blocks, inodes = length - taken, disk.inodes_per_group - used
        free_blocks += blocks
        free_inodes += inodes
        numbers = (where, where + 1, where + 2, blocks, inodes, directories[group])
        descriptors.append(struct.pack("<IIIHHHHIHHHH", *numbers, *(0,) * 6))
    table = b"".join(descriptors)
    for group in range(disk.groups):
        if _has_copy(group):
            block = _superblock(disk, group, free_blocks, free_inodes, label, time)
            os.pwrite(disk.descriptor, block, group * GROUP * BLOCK + (0 if group else 1024))
            disk.write(group * GROUP + 1, table)


def _bitmap(used: int, length: int) -> bytes:
    """Return a bitmap block that has 0 only in the bits from ``used`` to ``length`` - 1."""
    bits = (1 << used) - 1 | ((1 << 8 * BLOCK) - (1 << length))
    return bits.to_bytes(BLOCK, "little")


def _superblock(
    disk: _Disk, group: int, free_blocks: int, free_inodes: int, label: str, time: int
) -> bytes:
    out = bytearray(1024)

    def put(at: int, form: str, *values: int) -> None:
        struct.pack_into(f"<{form}", out, at, *values)

    inodes = disk.inodes_per_group * disk.groups
    put(0x0, "IIIII", inodes, disk.blocks, 0, free_blocks, free_inodes)
    put(0x14, "IIIIII", 0, 2, 2, GROUP, GROUP, disk.inodes_per_group)  # 2: log2(BLOCK / 1024)
    put(0x2C, "II", 0, time)
    put(0x34, "HHHHHH", 0, 0xFFFF, 0xEF53, 1, 1, 0)  # no check by count; clean; continue
    put(0x40, "IIII", time, 0, 0, 1)  # no check by time; creator Linux; dynamic revision
    put(0x54, "IHHIII", _FIRST, _INODE, group, _COMPAT, _INCOMPAT, _RO_COMPAT)
    out[0x68:0x78] = _UUID
    out[0x78:0x88] = label.encode().ljust(16, b"\0")[:16]
    out[0xEC:0xFC] = _UUID  # the seed of directory hashes
    put(0xFC, "B", 1)  # half MD4
    put(0x100, "I", 0x8 | 0x4)  # default mount options: acl, user_xattr
    put(0x108, "I", time)
    put(0x15C, "HH", _EXTRA, _EXTRA)
    put(0x160, "I", 0x1)  # signed directory hash, as of x86
    return bytes(out)
