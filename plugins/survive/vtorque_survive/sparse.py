"""Copy a guest's own disk, which is a file with holes."""

from __future__ import annotations

import errno
import os


def copy_data(source: int, to: int) -> None:
    """Copy a file; its holes stay holes (lseek(2), SEEK_DATA). Raises OSError."""
    size, at = os.fstat(source).st_size, 0
    os.ftruncate(to, size)
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # ENXIO: no more data
            break
        end = os.lseek(source, at, os.SEEK_HOLE)
        os.lseek(to, at, os.SEEK_SET)  # for _copied
        while at < end:
            sent = _copied(source, to, end - at, at)
            if not sent:
                raise OSError(5, "it became shorter")
            at += sent


def _copied(source: int, to: int, count: int, at: int) -> int:
    """Copy some bytes, by the file system itself where both files are in one; return how many."""
    try:
        return os.copy_file_range(source, to, count, at, at)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return os.sendfile(to, source, at, count)  # to where ``to`` stands
