"""Create vTorque's directories on a node, at setup and after each reboot."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.config.site_config import Site


def node_directories(site: Site) -> list[tuple[Path, int]]:
    paths = site.paths
    modes = [
        (paths.state, 0o755),
        (paths.state / "jobs", 0o711),
        (paths.journal, 0o700),
        (site.images.pool, 0o755),
        (paths.run, 0o755),
        (paths.run / "jobs", 0o711),
        (paths.run / "locks", 0o700),
        (paths.run / "proof", 0o711),
    ]
    return [(path, mode & 0o700 if site.owner else mode) for path, mode in modes]


def make_missing(site: Site) -> None:
    """Create directories that a reboot removed from ``/run``.

    Does not repair directories on disk that others could write: their contents may be forged.
    """
    for directory, mode in node_directories(site):
        in_memory = directory.is_relative_to(site.paths.run)
        right = is_correct(directory, mode, site.owner)
        if not os.path.lexists(directory) or (in_memory and not right):
            make(directory, mode, site.owner)
    if site.owner and not site.paths.secret.exists():  # no admin sets up a personal site
        with contextlib.suppress(FileExistsError):
            safefs.write_new(str(site.paths.secret), os.urandom(64), mode=0o600)


def is_correct(directory: Path, mode: int, owner: int = 0) -> bool:
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return False
    return status.st_mode == stat.S_IFDIR | mode and status.st_uid == owner


def make(directory: Path, mode: int, owner: int = 0) -> None:
    safefs.make_directories(directory)
    if directory.is_symlink() or not directory.is_dir():
        raise HostFault(f"{directory} is not a directory: move it away")
    os.chown(directory, owner, os.getegid() if owner else 0)
    directory.chmod(mode)
