"""Create and remove files as root without following paths that others control.

A directory is trusted if, in it and all its parents, other users cannot replace files that belong
to root or the calling user. A sticky directory such as /tmp is therefore trusted. All operations
are relative to a descriptor of a trusted directory. They never follow a link in the last component
of a path. In other components they follow only links of root or of the calling user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from vtorque_core.base.errors import HostFault

Ready = Callable[[int], object] | None

ACL = "system.posix_acl_access"
_WALK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STRAGGLERS = 1.0  # seconds
_MAX_LINKS = 40  # as the kernel, path_resolution(7)
_MAX_DEPTH = 200  # each level holds a descriptor; root's own trees are three levels deep


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close the descriptor when the context ends."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def parent_of(path: str) -> Iterator[tuple[int, str]]:
    """Open the trusted directory that contains ``path``; yield its descriptor and the base name."""
    pure = Path(path)
    if not pure.is_absolute() or ".." in pure.parts or not pure.name:
        raise HostFault(f"{path!r} is not an absolute path, or contains ..")
    descriptor = os.open("/", _WALK)
    try:
        pending = list(reversed(pure.parent.parts[1:]))
        links = 0
        while pending:
            part = pending.pop()
            below = _step(descriptor, part, path)
            if isinstance(below, int):
                os.close(descriptor)
                descriptor = below
                continue
            links += 1
            if links > _MAX_LINKS:
                raise HostFault(f"{path}: too many symbolic links")
            pending += reversed(below.parts[1:] if below.is_absolute() else below.parts)
            if below.is_absolute():
                os.close(descriptor)
                descriptor = os.open("/", _WALK)
        yield descriptor, pure.name
    finally:
        os.close(descriptor)


def _step(directory: int, part: str, path: str) -> int | Path:
    with closing(os.open(part, _LOOK, dir_fd=directory)) as below:
        status = os.fstat(below)
        _check(status, path, part, below)
        if stat.S_ISLNK(status.st_mode):
            return Path(os.readlink("", dir_fd=below))
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), part)
        return os.dup(below)


def others_can_write(status: os.stat_result, uid: int, place: str | Path) -> bool:
    """Return True if a user other than root and ``uid`` may write a file or directory.

    Ignores write permission of the user's private group (umask 002), unless there is an ACL.
    """
    shared = stat.S_IWGRP | stat.S_IWOTH
    if uid and status.st_gid == uid == os.getegid() and not _has_acl(place):
        shared = stat.S_IWOTH
    return bool(status.st_mode & shared) and not stat.S_ISLNK(status.st_mode)


def _has_acl(place: str | Path) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(place)
    except OSError:  # the file system has no ACLs
        return False


def _check(status: os.stat_result, path: str, part: str, descriptor: int) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise HostFault(f"{path}: {part} belongs to uid {status.st_uid}, not to root")
    place = f"/proc/self/fd/{descriptor}"
    sticky = status.st_mode & stat.S_ISVTX
    if not sticky and others_can_write(status, os.geteuid(), place):
        raise HostFault(
            f"{path}: {part} can be written by others (mode {status.st_mode & 0o7777:o})"
        )


@contextlib.contextmanager
def name_errors(
    what: object,
    *errors: type[Exception],
    stage: str | None = None,
    fault: Callable[..., Exception] = HostFault,
) -> Iterator[None]:
    """Turn ``errors`` (default: OSError) into a ``fault`` whose message begins with ``what``."""
    kinds = errors or (OSError,)
    try:
        yield
    except kinds as error:
        text = f"{what}: {getattr(error, 'strerror', None) or error}"
        raise (fault(text, stage) if stage else fault(text)) from error


def fsync(path: Path, flags: int = os.O_NOFOLLOW) -> None:
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)) as descriptor:
        os.fsync(descriptor)


def write_new(
    path: str, content: bytes, *, mode: int, uid: int = -1, gid: int = -1, ready: Ready = None
) -> None:
    """Create a new file with exactly this mode, owner and group (-1: those of this process).

    ``ready`` is called last with the open descriptor, for example os.fsync.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with parent_of(path) as (directory, name):
        descriptor = os.open(name, flags, 0o600, dir_fd=directory)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchown(descriptor, uid, gid)
            os.fchmod(descriptor, mode)
            if ready is not None:
                ready(descriptor)


def replace(
    path: str, content: bytes, *, mode: int, uid: int = -1, gid: int = -1, ready: Ready = None
) -> None:
    """Write a file atomically with rename(2). Otherwise like :func:`write_new`."""
    fresh = temporary_name(path)
    remove_file(fresh)
    write_new(fresh, content, mode=mode, uid=uid, gid=gid, ready=ready)
    with parent_of(path) as (directory, name):
        os.rename(Path(fresh).name, name, src_dir_fd=directory, dst_dir_fd=directory)


def set_acl(descriptor: int, uids: Iterable[int], own: int, theirs: int) -> None:
    """Set an ACL that gives only the owner and ``uids`` access (linux/posix_acl_xattr.h).

    ``own`` are the permissions of the file's owner, ``theirs`` those of ``uids``: 4 read, 2 write,
    1 execute. Sets nothing if ``uids`` has only the caller.
    """
    nobody = 0xFFFFFFFF
    others = sorted(set(uids) - {os.geteuid()})
    entries = (
        (0x01, own, nobody),  # ACL_USER_OBJ
        *((0x02, theirs, uid) for uid in others),  # ACL_USER
        (0x04, 0, nobody),  # ACL_GROUP_OBJ
        (0x10, theirs, nobody),  # ACL_MASK
        (0x20, 0, nobody),  # ACL_OTHER
    )
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    if others:
        os.setxattr(descriptor, ACL, packed)


def rewrite(path: Path, content: bytes) -> None:
    """Replace a file's contents durably and atomically; keep owner, mode and links.

    Creates a missing file with mode 0644.
    """
    with name_errors(path):
        real = path.resolve()
        mode, uid, gid = 0o644, -1, -1
        if real.exists():
            status = real.stat()
            mode, uid, gid = status.st_mode & 0o7777, status.st_uid, status.st_gid
        replace(str(real), content, mode=mode, uid=uid, gid=gid, ready=os.fsync)


def temporary_name(path: str) -> str:
    directory, _, name = path.rpartition("/")
    return f"{directory}/.{name}.new"


def make_directory(path: str, *, mode: int, uid: int = -1, gid: int = -1) -> None:
    with parent_of(path) as (directory, name):
        os.mkdir(name, 0o700, dir_fd=directory)
        with closing(os.open(name, _READ, dir_fd=directory)) as descriptor:
            os.fchown(descriptor, uid, gid)
            os.fchmod(descriptor, mode)


def make_directories(directory: Path) -> None:
    """Create a directory and its parents with mode 0755, regardless of the umask."""
    if not directory.exists():
        make_directories(directory.parent)
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)


def remove_file(path: str) -> None:
    with contextlib.suppress(FileNotFoundError), parent_of(path) as (directory, name):
        os.unlink(name, dir_fd=directory)


def remove_tree(path: str) -> None:
    """Remove a directory and its contents if it exists. Raises HostFault for a mount point."""
    with contextlib.suppress(FileNotFoundError), parent_of(path) as (directory, name):
        try:
            descriptor = os.open(name, _READ, dir_fd=directory)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            os.unlink(name, dir_fd=directory)
            return
        with closing(descriptor):
            if _mount_id(descriptor) != _mount_id(directory):
                raise HostFault(f"{path} is a mount point: unmount it first")
            _empty_all(descriptor, path)
        os.rmdir(name, dir_fd=directory)


def _empty_all(directory: int, path: str) -> None:
    end = time.monotonic() + _STRAGGLERS
    while True:
        try:
            _empty(directory, path, 0)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() >= end:
                raise
        if not os.listdir(directory) or time.monotonic() >= end:
            return
        time.sleep(0.02)


def _empty(directory: int, path: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise HostFault(f"{path}: more than {_MAX_DEPTH} directories deep")
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
            continue
        with closing(os.open(name, _READ, dir_fd=directory)) as below:
            if _mount_id(below) != _mount_id(directory):
                raise HostFault(f"{path}/{name} is a mount point: unmount it first")
            _empty(below, f"{path}/{name}", depth + 1)
        os.rmdir(name, dir_fd=directory)


def _mount_id(descriptor: int) -> str:
    text = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
    return next(line for line in text.splitlines() if line.startswith("mnt_id:"))


def is_mount_point(path: str) -> bool:
    real = os.path.realpath(path)
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    points = (line.split(" ", 5)[4] for line in text.splitlines())  # proc(5)
    return any(_unescape(point) == real for point in points)


def _unescape(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
