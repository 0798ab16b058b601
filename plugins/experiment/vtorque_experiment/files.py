"""Read and write files in the results directory, where guests can also write.

Each path begins at a directory that the caller trusts. Below this directory, the functions follow
no symbolic link and read only regular files. They write to a new file and rename it into place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api import closing

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def directory(top: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Open the directory with the path ``names`` below ``top``, and yield its descriptor.

    ``make`` creates missing directories. Raises OSError for a missing directory or a symbolic link.
    """
    descriptor = os.open(top, _DIRECTORY)
    try:
        for name in names:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
            below = os.open(name, _DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def read(top: Path, *names: str, most: int, end: bool = False) -> bytes:
    """Return the beginning (with ``end``, the end) of a file below ``top``: at most ``most`` bytes.

    Raises OSError if the file is not a regular file. Does not block on a FIFO.
    """
    with directory(top, *names[:-1]) as parent:
        opened = os.open(names[-1], _READ, dir_fd=parent)
    with closing(opened) as descriptor:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            file.seek(max(0, about.st_size - most) if end else 0)
            return file.read(most)


def write(top: Path, *names: str, content: bytes, mode: int = 0o644, sync: bool = False) -> None:
    """Create or replace a file below ``top`` atomically. Raises OSError.

    With ``sync``, content and directory entry are on disk (fsync(2)) at return.
    """
    fresh = f".{names[-1]}.{secrets.token_hex(4)}"
    with directory(top, *names[:-1]) as parent:
        descriptor = os.open(fresh, _WRITE, mode, dir_fd=parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                if sync:
                    os.fsync(descriptor)
            os.rename(fresh, names[-1], src_dir_fd=parent, dst_dir_fd=parent)
            if sync:
                _sync_directory(parent)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # already renamed
                os.unlink(fresh, dir_fd=parent)
            raise


def _sync_directory(directory: int) -> None:
    """Write a directory's entries to disk.

    Opens the directory again, because fsync(2) rejects descriptors opened with ``O_PATH``.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with closing(os.open(".", flags, dir_fd=directory)) as descriptor:
        os.fsync(descriptor)
