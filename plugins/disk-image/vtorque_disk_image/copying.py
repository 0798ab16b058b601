"""Copy an untrusted file, with its holes, to the staging directory.

Only the copy is checked and used, because the file may change at any time. Privileges: root.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import NOBODY, HostFault, Refused, closing, printable
from vtorque_core.api.confined_tool import Told

_CHUNK = 16 << 20  # bytes copied at a time


@dataclass(frozen=True)
class SourceFile:
    """An open file of a user; ``stamp`` (inode, size, times) must not change during the copy."""

    path: Path
    descriptor: int
    size: int
    stamp: tuple[int, ...]

    def check_unchanged(self) -> None:
        """Raise Refused if the file was modified since it was opened."""
        if _stamp(os.fstat(self.descriptor)) != self.stamp:
            raise Refused("changed while it was read: try again when no program writes to it")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def open_source(path: Path) -> Iterator[SourceFile]:
    """Open a regular file without following a link. Errors inside the context name the file.

    Raises Refused for any other type without opening the file: opening a FIFO blocks, and opening
    a device may have effects.
    """
    shown = printable(str(path))
    try:
        with closing(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as handle:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{shown}: is {_kind(status.st_mode)}, not a file")
            descriptor = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not a path"
        raise Refused(f"{shown}: {reason}") from None
    try:
        if status.st_size == 0:
            raise Refused("is empty")
        yield SourceFile(path, descriptor, status.st_size, _stamp(os.fstat(descriptor)))
    except Refused as error:
        raise Refused(f"{shown}: {error}") from None
    finally:
        os.close(descriptor)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


@contextmanager
def create_file(path: Path) -> Iterator[int]:
    """Create a file, and yield its descriptor. If called by root, ``nobody`` owns the file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing(os.open(path, flags, 0o600)) as descriptor:
        if os.geteuid() == 0:
            os.fchown(descriptor, NOBODY, NOBODY)
        yield descriptor


def copy(source: SourceFile, target: int, pool: Path, told: Told) -> None:
    """Copy a file's data and keep its holes.

    Raises Refused if the file changes during the copy, HostFault if the pool is full.
    """
    data = min(source.size, os.fstat(source.descriptor).st_blocks * 512)
    if data > (free := free_bytes(pool)):
        raise HostFault(f"{pool} has {free >> 20} MiB free, but {data >> 20} MiB are needed")
    os.ftruncate(target, source.size)
    done = 0
    for start, end in extents(source.descriptor, source.size):
        at = start
        while at < end:
            count = _copy_some(source.descriptor, target, at, min(_CHUNK, end - at))
            if count == 0:
                break  # the file was truncated: check_unchanged() raises
            at += count
            done += count
            told(done, max(data, done))
    source.check_unchanged()


def extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each data extent (lseek(2), SEEK_DATA)."""
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = min(size, os.lseek(descriptor, start, os.SEEK_HOLE))
        yield start, at


def _copy_some(source: int, target: int, at: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, count, at, at)  # a reflink if possible
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise HostFault(f"copy: {error.strerror}") from None
    return os.pwrite(target, os.pread(source, count, at), at)


def free_bytes(pool: Path) -> int:
    """Return how many bytes may be written to the pool if 2 % of its file system must stay free."""
    there = os.statvfs(pool)
    return max(0, there.f_bavail - there.f_blocks // 50) * there.f_frsize
