"""Parse the header of a qcow2 file (docs/interop/qcow2.txt of QEMU).

Imports nothing of vTorque, because the program that starts a user's daemon needs it quickly.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = b"QFI\xfb"
HEADER = 104  # bytes of version 3; version 2 has 72
_CORRUPT, _EXTERNAL_DATA = 1 << 1, 1 << 2  # incompatible_features


class Qcow2Header(NamedTuple):
    """Header fields. ``table`` is the offset of the first-level table, in bytes."""

    version: int
    backing: int
    cluster_bits: int
    size: int
    encryption: int
    entries: int
    table: int
    features: int = 0

    @property
    def referred(self) -> str:
        """The kind of other file that the image needs; empty: none."""
        if self.backing:
            return "a backing file"
        return "an external data file" if self.features & _EXTERNAL_DATA else ""

    @property
    def is_corrupt(self) -> bool:
        return bool(self.features & _CORRUPT)


def parse_header(header: bytes) -> Qcow2Header:
    """Parse the first ``HEADER`` bytes of a file. Raises ValueError if they are not valid."""
    if not header.startswith(MAGIC):
        raise ValueError("is not in qcow2 format")
    if len(header) < 72:
        raise ValueError("is a truncated qcow2")
    version, backing, _length, *fields = struct.unpack_from(">IQIIQIIQ", header, 4)
    if version not in (2, 3):
        raise ValueError(f"is a qcow of version {version}; versions 2 and 3 are supported")
    if version == 3:
        if len(header) < HEADER:
            raise ValueError("is a truncated qcow2")
        fields += struct.unpack_from(">Q", header, 72)
    return Qcow2Header(version, backing, *fields)
