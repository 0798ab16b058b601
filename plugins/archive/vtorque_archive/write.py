"""Write an archive to the caller's directory, and remove old or excess archives.

Privileges: the job's user. The directory's content can only affect that user.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from vtorque_archive.pack import UNFINISHED, key_of, pack_files
from vtorque_archive.plugin import Settings
from vtorque_core.api import closing
from vtorque_core.api.kept_records import JOB

_MAX_ENTRIES = 100_000  # directory entries that are read
_OVER = 3600.0  # seconds after which an unfinished file counts as left by a killed process
_MAX_CODE = 5  # bytes
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write(
    directory: Path,
    name: str,
    files: Sequence[tuple[str, bytes]],
    settings: Settings,
    now: float,
) -> None:
    """Write an archive of the files atomically as ``name``, mode 0600.

    Missing directories are created with mode 0700. ``now`` is in Unix seconds.

    Raises OSError if writing fails, or if the directory belongs to another user.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(os.open(directory, _DIRECTORY)) as at:
        owner = os.fstat(at).st_uid
        if owner != os.geteuid():
            raise PermissionError(
                errno.EPERM, f"the archive directory belongs to uid {owner}, not to you"
            )
        content = pack_files(_add_exit_code(at, name, files), settings.file_mib << 20)
        _make_room(at, name, len(content), settings, now)
        _put(at, name, content)
        _remove(at, UNFINISHED + name)


def _add_exit_code(
    at: int, name: str, files: Sequence[tuple[str, bytes]]
) -> list[tuple[str, bytes]]:
    said = b""
    with contextlib.suppress(OSError):
        descriptor = os.open(UNFINISHED + name, _READ, dir_fd=at)
        with os.fdopen(descriptor, "rb") as file:
            said = file.read(_MAX_CODE).strip()
    contents = dict(files)
    with contextlib.suppress(ValueError):  # facts that a full disk has truncated
        facts = json.loads(contents.get(JOB, b"{}"))
        if said.isdigit() and not facts.get("status"):
            contents[JOB] = json.dumps(facts | {"status": said.decode()}).encode()
    return list(contents.items())


def _put(at: int, name: str, content: bytes) -> None:
    fresh = UNFINISHED + secrets.token_hex(8)
    descriptor = os.open(fresh, _NEW, 0o600, dir_fd=at)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # network file systems report a full disk only here
        os.replace(fresh, name, src_dir_fd=at, dst_dir_fd=at)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh, dir_fd=at)
        raise


def _make_room(at: int, name: str, size: int, settings: Settings, now: float) -> None:
    left = []
    for entry, about in _iter_archives(at):
        age = now - about.st_mtime
        if age > (_OVER if entry.startswith(UNFINISHED) else settings.days * 86400):
            _remove(at, entry)
        elif entry != name:
            left.append((about.st_mtime, entry, about.st_size))
    size += sum(each[2] for each in left)
    for _, entry, its in sorted(left):
        if size <= settings.mib << 20:
            return
        _remove(at, entry)
        size -= its


def _iter_archives(at: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(at) as entries:
        for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False):
            if key_of(entry.name) or entry.name.startswith(UNFINISHED):
                with contextlib.suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode):
                        yield entry.name, about


def _remove(at: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=at)
