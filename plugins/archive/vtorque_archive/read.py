"""Read a user's archives as that user. Archives may be forged, so no size in them is trusted.

Nothing is unpacked into a directory, because a killed command would leave files behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from vtorque_archive.pack import MAX_BYTES, key_of
from vtorque_core.api import Paths
from vtorque_core.api.kept_records import Place

_MAX_ARCHIVE = 256 << 20  # bytes; the most that a site can set
_MAX_ENTRIES = 100_000  # directory entries that are read
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # other methods may need GiB of memory
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_left = MAX_BYTES  # bytes that this process may still open


@dataclasses.dataclass(frozen=True)
class ArchivedRecord(Place):
    """One node's records of a job attempt, in a user's archive."""

    path: Path = Path()

    @property
    def directory(self) -> Path:
        """Path of the archive, for messages. The archive is a file, not a directory."""
        return self.path

    @property
    def changed(self) -> float:
        """Modification time of the archive in Unix seconds."""
        with contextlib.suppress(OSError):
            return self.path.lstat().st_mtime
        return 0.0

    def open(self, name: str) -> int:
        """Copy an archived file to an unnamed file, and return that file's descriptor.

        Raises OSError like :meth:`read`. Together, the copies that a process makes have at most
        :data:`~vtorque_archive.pack.MAX_BYTES` bytes; the rest is cut.
        """
        global _left  # noqa: PLW0603 - a user can have forged as many archives as they like
        content = self.read(name, _left)
        _left -= len(content)
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(content)
            file.seek(0)
            return os.dup(file.fileno())

    def read(self, name: str, limit: int = 64 << 20) -> bytes:
        """Return at most ``limit`` bytes of a file.

        Raise OSError if the file is missing or the archive is invalid.
        """
        with _open_archive(self.path) as archive:
            return _member(archive, name, limit)


def archives(paths: Paths, directory: Path, uid: int) -> Iterator[ArchivedRecord]:
    """Yield the archives in a directory, sorted by name; none if the directory is missing."""
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        names += (entry.name for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False))
    for name in sorted(names):
        if key := key_of(name):
            yield ArchivedRecord(paths, uid, key, directory / name)


@contextlib.contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive. Convert all errors about its content to OSError."""
    with os.fdopen(os.open(path, _FLAGS), "rb") as file:
        _check(file)
        try:
            with zipfile.ZipFile(file) as archive:
                yield archive
        except OSError:
            raise
        except Exception as error:  # zipfile raises many types for invalid files
            raise OSError(
                errno.EIO, f"is not an archive of vTorque: {type(error).__name__}"
            ) from None


def _check(file: BinaryIO) -> None:
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file")
    if about.st_size > _MAX_ARCHIVE:
        raise OSError(errno.EFBIG, f"is larger than {_MAX_ARCHIVE >> 20} MiB")


def _member(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
    if info.compress_type not in _METHODS:
        raise OSError(errno.EINVAL, "uses a compression that vTorque does not write")
    with archive.open(info) as file:
        return file.read(max(0, min(limit, MAX_BYTES)))
