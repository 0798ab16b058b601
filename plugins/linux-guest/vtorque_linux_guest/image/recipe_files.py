"""Write one tar file with all files that a recipe adds to an image.

Runs as root. Other users may be able to write to the recipe's directory, so no symbolic link is
followed.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from vtorque_core.api import Refused, closing
from vtorque_linux_guest.image.recipe import AddedFile

_BELOW = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def pack(directory: Path, added: Iterable[AddedFile], into: Path, most: int) -> None:
    """Write the ``added`` files into a new tar file; its members belong to root and have time 0.

    ``most`` is the limit of the total size in MiB. Raises Refused naming the file.
    """
    left = [most << 20]
    with tarfile.open(into, "w", format=tarfile.PAX_FORMAT) as archive:
        for each in added:
            target = each.target.strip("/")
            if each.source is None:
                info = _info(target, each.mode if each.mode is not None else 0o644)
                info.size = len(each.content)
                archive.addfile(info, io.BytesIO(each.content))
            else:
                with _open_below(directory, each.source) as descriptor:
                    _add(archive, descriptor, target, each, left)


def read_below(directory: Path, source: str, most: int = 1 << 20) -> bytes:
    """Return the content of a file below ``directory``.

    Raises Refused, for example if the file is larger than ``most`` bytes.
    """
    with _open_below(directory, source) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise Refused(f"{source!r}: must be a file of at most {most} bytes")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(most)


@contextmanager
def _open_below(directory: Path, source: str) -> Iterator[int]:
    """Open a path below a directory, following no link. Raises Refused."""
    at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for word in PurePosixPath(source).parts:
            following = _open_component(at, word, source)
            os.close(at)
            at = following
        yield at
    finally:
        os.close(at)


def _open_component(directory: int, name: str, shown: str) -> int:
    try:
        return os.open(name, _BELOW, dir_fd=directory)
    except OSError as error:
        reason = "is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise Refused(f"{shown!r} of the recipe: {reason}") from None


def _info(name: str, mode: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.type = mode, kind
    return info


def _add(
    archive: tarfile.TarFile, descriptor: int, target: str, each: AddedFile, left: list[int]
) -> None:
    """Add an open file or directory tree. ``left[0]`` is the number of bytes that may be added."""
    status = os.fstat(descriptor)
    mode = stat.S_IMODE(status.st_mode) & 0o755
    if stat.S_ISREG(status.st_mode):
        left[0] -= status.st_size
        if left[0] < 0:
            raise Refused(f"{each.source!r} of the recipe: is larger than the image's size")
        info = _info(target, each.mode if each.mode is not None else mode)
        info.size = status.st_size
        with os.fdopen(os.dup(descriptor), "rb") as file:
            archive.addfile(info, file)
        return
    if not stat.S_ISDIR(status.st_mode):
        raise Refused(f"{each.source!r} of the recipe: {target} is neither file nor directory")
    archive.addfile(_info(target, mode | 0o700, tarfile.DIRTYPE))
    for name in sorted(os.listdir(descriptor)):
        inside = f"{target}/{name}"
        status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            info = _info(inside, 0o777, tarfile.SYMTYPE)
            info.linkname = os.readlink(name, dir_fd=descriptor)
            archive.addfile(info)
            continue
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise Refused(f"{each.source!r} of the recipe: {inside} is neither file nor directory")
        with closing(_open_component(descriptor, name, inside)) as found:
            _add(archive, found, inside, each, left)
