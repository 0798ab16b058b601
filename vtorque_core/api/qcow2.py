"""Check a qcow2 header before a tool opens the file."""

from __future__ import annotations

from vtorque_core.base import qcow2_header
from vtorque_core.base.errors import Refused

MAGIC, HEADER = qcow2_header.MAGIC, qcow2_header.HEADER


def check_qcow2(header: bytes, file_size: int) -> int:
    """Return the virtual size of a qcow2 file in bytes, from its first ``HEADER`` bytes.

    Format: docs/interop/qcow2.txt of QEMU. Raises Refused if the image refers to another file, or
    is encrypted, corrupt or truncated.
    """
    try:
        size, tables = qcow2_header.check_header(header)
    except ValueError as error:
        raise Refused(str(error)) from None
    if tables > file_size:
        raise Refused("is a truncated qcow2: its tables lie beyond the end of the file")
    return size
