"""Check a qcow2 header before a tool opens the file."""

from __future__ import annotations

from vtorque_core.base import qcow2_header
from vtorque_core.base.errors import Refused

MAGIC, HEADER = qcow2_header.MAGIC, qcow2_header.HEADER
_ALONE = "make it self-contained: qemu-img convert"


def check_qcow2(header: bytes, file_size: int) -> int:
    """Return the virtual size of a qcow2 file in bytes, from its first ``HEADER`` bytes.

    Format: docs/interop/qcow2.txt of QEMU. Raises Refused if the image refers to another file, or
    is encrypted, corrupt or truncated.
    """
    try:
        disk = qcow2_header.parse_header(header)
    except ValueError as error:
        raise Refused(str(error)) from None
    if disk.referred:
        raise Refused(f"has {disk.referred}; {_ALONE}")
    if disk.encryption:
        raise Refused("is encrypted")
    if disk.is_corrupt:
        raise Refused("is marked as corrupt; try qemu-img check -r all")
    if not 9 <= disk.cluster_bits <= 21:
        raise Refused(f"is an invalid qcow2: cluster_bits is {disk.cluster_bits}")
    if disk.table + disk.entries * 8 > file_size:
        raise Refused("is a truncated qcow2: its tables lie beyond the end of the file")
    return disk.size
