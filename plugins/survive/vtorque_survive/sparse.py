"""Copy a guest's own disk, which is a sparse file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator


def copy_data(source: int, to: int) -> None:
    """Copy a file and keep its holes."""
    os.ftruncate(to, os.fstat(source).st_size)
    for begin, end in data(source):
        at = begin
        os.lseek(to, at, os.SEEK_SET)  # where _copy_some writes
        while at < end:
            sent = _copy_some(source, to, end - at, at)
            if not sent:
                raise OSError(errno.EIO, "the file shrank during the copy")
            at += sent


def data(file: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each data extent of a file (lseek(2), SEEK_DATA)."""
    at, size = 0, os.fstat(file).st_size
    while at < size:
        try:
            at = os.lseek(file, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no more data
                raise
            return
        end = os.lseek(file, at, os.SEEK_HOLE)
        yield at, end
        at = end


def _copy_some(source: int, to: int, count: int, at: int) -> int:
    """Copy some bytes and return their number. Within one file system, the kernel copies them."""
    try:
        return os.copy_file_range(source, to, count, at, at)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return os.sendfile(to, source, at, count)  # at the offset of ``to``
