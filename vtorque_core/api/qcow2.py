"""Check a qcow2 header before a tool opens the file."""

from __future__ import annotations

import struct

from vtorque_core.base.errors import Refused

MAGIC = b"QFI\xfb"
HEADER = 112  # bytes
# docs/interop/qcow2.txt of QEMU: incompatible_features
_CORRUPT, _EXTERNAL_DATA = 1 << 1, 1 << 2
_ALONE = "make it self-contained: qemu-img convert"


def check_qcow2(header: bytes, file_size: int) -> int:
    """Return the virtual size of a qcow2 file in bytes, from its first ``HEADER`` bytes.

    Format: docs/interop/qcow2.txt of QEMU. Raises Refused if the image refers to another file, or
    is encrypted, corrupt or truncated.
    """
    if len(header) < 72:
        raise Refused("is a truncated qcow2")
    version, backing = struct.unpack_from(">IQ", header, 4)
    bits, size, encryption, entries, table = struct.unpack_from(">IQIIQ", header, 20)
    if version not in (2, 3):
        raise Refused(f"is a qcow of version {version}; versions 2 and 3 are supported")
    if backing:
        raise Refused(f"has a backing file; {_ALONE}")
    if encryption:
        raise Refused("is encrypted")
    if version == 3:
        if len(header) < 104:
            raise Refused("is a truncated qcow2")
        (incompatible,) = struct.unpack_from(">Q", header, 72)
        if incompatible & _EXTERNAL_DATA:
            raise Refused(f"has an external data file; {_ALONE}")
        if incompatible & _CORRUPT:
            raise Refused("is marked as corrupt; try qemu-img check -r all")
    if not 9 <= bits <= 21:
        raise Refused(f"is an invalid qcow2: cluster_bits is {bits}")
    if table + entries * 8 > file_size:
        raise Refused("is a truncated qcow2: its tables lie beyond the end of the file")
    return int(size)
