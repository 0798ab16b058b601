"""Extended attributes of ext4, stored in the inode or in a separate block.

Format: the kernel's Documentation/filesystems/ext4/attributes.rst.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from vtorque_core.api import Refused

_MAGIC = 0xEA020000
_PREFIXES = {"user.": 1, "trusted.": 4, "security.": 6}
_MASK = 0xFFFFFFFF


class NoRoom(Exception):
    """The attributes do not fit into the inode."""


def can_store(name: str) -> bool:
    """Return whether an attribute can be stored unchanged; ``system.*`` (ACLs) cannot."""
    return name.startswith(tuple(_PREFIXES))


def pack_in_inode(attributes: Mapping[str, bytes], room: int) -> bytes:
    """Return the attributes as bytes that follow an inode's fields.

    Raises NoRoom if they exceed ``room``.
    """
    if not attributes:
        return b""
    return struct.pack("<I", _MAGIC) + _pack_entries(attributes, room - 4, 0)[0]


def attribute_block(attributes: Mapping[str, bytes], block: int) -> bytes:
    """Return a block of ``block`` bytes with attributes. Raises Refused if they do not fit."""
    head = 32
    try:
        packed, hashes = _pack_entries(attributes, block - head, head)
    except NoRoom:
        raise Refused(f"the extended attributes of a file have more than {block} bytes") from None
    total = 0
    for each in hashes:
        total = ((total << 16) & _MASK) ^ (total >> 16) ^ each
    return struct.pack("<IIIII12x", _MAGIC, 1, 1, total, 0) + packed


def _pack_entries(attributes: Mapping[str, bytes], room: int, base: int) -> tuple[bytes, list[int]]:
    """Return the attributes as ``room`` bytes, and the hashes of the attributes' entries.

    The bytes begin with the entries and end with the values. Each entry contains the offset of its
    value in the bytes, plus ``base``.
    """
    entries, values, hashes = b"", b"", []
    for index, name, value in sorted(_parts(attributes), key=lambda p: (p[0], len(p[1]), p[1])):
        values = value + bytes(-len(value) % 4) + values
        if len(entries) + len(values) > room:
            raise NoRoom
        offset = base + room - len(values) if value else 0
        hashed = _hash(name, value)
        hashes.append(hashed)
        head = struct.pack("<BBHIII", len(name), index, offset, 0, len(value), hashed)
        entries += head + name + bytes(-len(name) % 4)
    gap = room - len(entries) - len(values)
    if gap < 4:  # four zero bytes end the entries
        raise NoRoom
    return entries + bytes(gap) + values, hashes


def _parts(attributes: Mapping[str, bytes]) -> list[tuple[int, bytes, bytes]]:
    found = []
    for name, value in attributes.items():
        prefix = next(p for p in _PREFIXES if name.startswith(p))
        rest = name.removeprefix(prefix).encode("utf-8", "surrogateescape")
        if not 0 < len(rest) <= 255:
            raise Refused(f"the extended attribute {name[:100]!r} has a name that cannot be stored")
        found.append((_PREFIXES[prefix], rest, value))
    return found


def _hash(name: bytes, value: bytes) -> int:
    total = 0
    for byte in name:
        total = ((total << 5) & _MASK) ^ (total >> 27) ^ byte
    padded = value + bytes(-len(value) % 4)
    for (word,) in struct.iter_unpack("<I", padded):
        total = ((total << 16) & _MASK) ^ (total >> 16) ^ word
    return total
