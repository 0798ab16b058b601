"""Check that only root can write a file, or replace it or any of its parent directories."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from vtorque_core.base.errors import ConfigError
from vtorque_core.base.safefs import others_can_write

_MAX_LINKS = 40  # as the kernel, path_resolution(7)


def require_root_owned(path: Path, uid: int = 0, known: dict[Path, Path] | None = None) -> None:
    """Raise ConfigError if others can change ``path``, or any directory or link on the way to it.

    Accepts sticky directories (``/tmp``), where others cannot replace root's entries. ``uid`` may
    own files, too. ``known`` caches checked directories.
    """
    _follow(path.absolute(), uid, _MAX_LINKS, {} if known is None else known)


def _follow(path: Path, uid: int, links: int, known: dict[Path, Path]) -> Path:
    if path == path.parent:
        _check(path, uid)
        return path
    parent = known.get(path.parent)
    if parent is None:
        parent = known[path.parent] = _follow(path.parent, uid, links, known)
    if path.name == "..":
        return parent.parent
    current = parent / path.name
    if not _check(current, uid):
        return current
    if not links:
        raise ConfigError(f"{current}: too many symbolic links")
    return _follow(parent / current.readlink(), uid, links - 1, known)


def require_secret(path: Path, uid: int = 0) -> None:
    require_root_owned(path, uid)
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: is not a regular file")
    if mode & 0o077:
        raise ConfigError(
            f"{path}: is a secret, but users other than root can access it "
            f"(mode {mode & 0o7777:04o}): chmod 600 {path}"
        )


def _check(part: str | Path, uid: int) -> bool:
    """Raise ConfigError if others can change ``part``; return True if it is a symbolic link."""
    try:
        info = os.lstat(part)
    except OSError as error:
        raise ConfigError(f"{part}: {error.strerror}") from None
    if info.st_uid not in (0, uid):
        raise ConfigError(
            f"{part}: is owned by uid {info.st_uid}, who could change it: chown root {part}"
        )
    if stat.S_ISLNK(info.st_mode):
        return True
    sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
    if not sticky and others_can_write(info, uid, part):
        raise ConfigError(
            f"{part}: can be written by others than root (mode {info.st_mode & 0o7777:04o}): "
            f"chmod go-w {part}"
        )
    return False


def require_own_code(uid: int = 0) -> None:
    """Raise ConfigError if others can change the interpreter, the import path or the core's code.

    Plugins are checked before their import.
    """
    package = Path(__file__).parents[1]
    for place in dict.fromkeys((sys.executable, *sys.path, str(package))):
        if place and os.path.exists(place):  # noqa: PTH110 - text, some of it no path at all
            require_root_owned(Path(place), uid)
    require_tree(package, uid)


def require_tree(top: Path, uid: int = 0) -> None:
    """Raise ConfigError if others can change anything below ``top``."""
    for directory, below, files in os.walk(top):
        for name in (*below, *files):
            _check(f"{directory}/{name}", uid)  # not a Path: each hook checks 500 files


def effective_root() -> bool:
    return os.geteuid() == 0
