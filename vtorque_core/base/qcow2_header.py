"""Check the header of a qcow2 file (docs/interop/qcow2.txt of QEMU).

Imports nothing of vTorque, so that daemons that run as a user start fast.
"""

from __future__ import annotations

import struct

MAGIC = b"QFI\xfb"
HEADER = 104  # bytes of version 3; version 2 has 72
_CORRUPT, _EXTERNAL_DATA, _KNOWN = 1 << 1, 1 << 2, 0b11111  # incompatible_features
_MOST_ENTRIES, _MOST_REFCOUNTS, _MOST_SNAPSHOTS = 4 << 20, 8 << 20, 65536  # QEMU's limits
_ALONE = "make it self-contained: qemu-img convert"


def check_header(header: bytes) -> tuple[int, int]:
    """Return the virtual size in bytes and the offset at which the L1 table ends.

    Raises ValueError if the image refers to another file, or is encrypted, corrupt or truncated.
    """
    if not header.startswith(MAGIC):
        raise ValueError("is not in qcow2 format")
    if len(header) < 72:
        raise ValueError("is a truncated qcow2")
    version, backing = struct.unpack_from(">IQ", header, 4)
    bits, size, encryption, entries, table = struct.unpack_from(">IQIIQ", header, 20)
    clusters, snapshots = struct.unpack_from(">II", header, 56)
    if version not in (2, 3):
        raise ValueError(f"is a qcow of version {version}; versions 2 and 3 are supported")
    if backing:
        raise ValueError(f"has a backing file; {_ALONE}")
    if encryption:
        raise ValueError("is encrypted")
    if version == 3:
        if len(header) < HEADER:
            raise ValueError("is a truncated qcow2")
        (incompatible,) = struct.unpack_from(">Q", header, 72)
        if incompatible & _EXTERNAL_DATA:
            raise ValueError(f"has an external data file; {_ALONE}")
        if incompatible & _CORRUPT:
            raise ValueError("is marked as corrupt; try qemu-img check -r all")
        order, length = struct.unpack_from(">II", header, 96)
        if incompatible & ~_KNOWN or order > 6 or length < HEADER:
            raise ValueError("is an invalid qcow2, or has features that QEMU does not support")
    if not 9 <= bits <= 21:
        raise ValueError(f"is an invalid qcow2: cluster_bits is {bits}, not 9 to 21")
    needed = -(-size >> (2 * bits - 3))  # entries of the first-level table
    tables = clusters << bits <= _MOST_REFCOUNTS and snapshots <= _MOST_SNAPSHOTS
    if not (tables and needed <= entries <= _MOST_ENTRIES):
        raise ValueError(f"is an invalid qcow2: its tables do not fit its size of {size} bytes")
    return int(size), table + entries * 8
