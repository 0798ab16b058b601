"""Layout of image files in pools and node caches, and removal of old versions.

    <pool>/<name>/image.json      sidecar with the current version of the name
    <pool>/<name>/<version>/      files of one version; named after their contents
    <pool>/<name>/<version>.old   Unix time until which a replaced version is kept
    <pool>/.staging-*             image being built; the builder holds a lock
    <pool>/.trash-*               files being removed; never read

Changes are renames under the pool's lock. A version is removed when no name refers to it, the time
in its file ``.old`` has passed, and no journal of this node names it. Writers run as root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import try_flock
from vtorque_core.base.names import Paths
from vtorque_core.images.sidecar import MAX_SIDECAR, NAME, SIDECAR, VERSION
from vtorque_core.records.reading import JournalError, walk

KIND = "image"  # of the journal's records that name a version
_STAGING, _TRASH, _OLD = ".staging-", ".trash-", ".old"
_LOCK_WAIT = 60.0  # seconds; nothing long happens under the lock
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)

Uses = Mapping[str, tuple[str, ...]]
"""Ids of the jobs that use an image version, by the version's directory."""


@contextmanager
def locked(pool: Path, *, shared: bool = False, wait: float = _LOCK_WAIT) -> Iterator[None]:
    """Hold the pool's lock on this node. A ``shared`` lock excludes only changes.

    Other nodes ignore the lock. If nodes share the pool, change it on one node at a time.
    """
    with safefs.closing(os.open(pool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        _lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait, pool)
        yield


def _lock(descriptor: int, kind: int, wait: float, pool: Path) -> None:
    try:
        if not try_flock(descriptor, kind, time.monotonic() + wait):
            raise HostFault(f"{pool} is being changed by another command: retry when it has ended")
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # a file system without locks
            raise


def replace_file(path: Path, content: bytes) -> None:
    safefs.replace(str(path), content, mode=0o644, ready=os.fsync)
    safefs.fsync(path.parent)


def current(home: Path) -> str | None:
    try:
        with (home / SIDECAR).open("rb") as file:
            data = json.loads(file.read(MAX_SIDECAR))
        version = data["version"]
        if not VERSION.fullmatch(version):
            raise ValueError("bad version")
        return str(version)
    except FileNotFoundError:
        return None
    except (OSError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from None


def image_uses(paths: Paths | None) -> Uses:
    found: dict[str, tuple[str, ...]] = {}
    for state in walk(paths) if paths is not None else ():
        for path in {str(r.args.get("path")) for r in state.open if r.kind == KIND}:
            found[path] = tuple(dict.fromkeys((*found.get(path, ()), state.header.job.id)))
    return found


def retire(home: Path, version: str, seconds: float) -> None:
    """Keep a version, which is about to be replaced, for ``seconds``."""
    if seconds > 0:
        replace_file(home / f"{version}{_OLD}", f"{time.time() + seconds:.0f}\n".encode())


def reinstate(home: Path, version: str) -> None:
    """Remove the expiry time of a version to which an image name refers again."""
    (home / f"{version}{_OLD}").unlink(missing_ok=True)


def old_versions(home: Path) -> list[tuple[str, float]]:
    now = current(home)
    found = [p.name for p in home.iterdir() if VERSION.fullmatch(p.name) and p.name != now]
    return [(version, _expiry(home, version)) for version in sorted(found)]


def _expiry(home: Path, version: str) -> float:
    try:
        return float((home / f"{version}{_OLD}").read_text("ascii")[:32])
    except (OSError, ValueError):
        return 0.0


@contextmanager
def staging(pool: Path, paths: Paths | None = None) -> Iterator[Path]:
    """Yield an empty private directory in the pool, and remove it afterwards.

    First calls :func:`sweep`.
    """
    sweep(pool, paths)
    with locked(pool):
        path = Path(tempfile.mkdtemp(prefix=_STAGING, dir=pool))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def sweep(pool: Path, paths: Paths | None = None, *, expired_only: bool = False) -> list[str]:
    """Remove leftovers of killed commands and unused versions; return ``name/version`` of each.

    The journals in ``paths`` list the versions in use; None: no version is in use. With
    ``expired_only`` (the reaper), removes only versions whose file ``.old`` has an expired time.
    """
    with safefs.name_errors(pool), locked(pool):
        uses = _try_uses(paths)
        for left in () if expired_only else pool.glob(f"{_STAGING}*"):
            _try_trash(pool, left)
        gone = [] if uses is None else _collect(pool, uses, expired_only)
    empty_trash(pool)
    return gone


def _try_uses(paths: Paths | None) -> Uses | None:
    try:
        return image_uses(paths)
    except JournalError:
        return None  # the versions in use are unknown, so none is removed; doctor reports it


def _collect(pool: Path, uses: Uses, expired_only: bool) -> list[str]:
    gone = []
    for home in sorted(pool.iterdir()):
        if NAME.fullmatch(home.name) and home.is_dir() and not home.is_symlink():
            with contextlib.suppress(ValueError):
                gone += [f"{home.name}/{version}" for version in collect(home, uses, expired_only)]
    return gone


def collect(home: Path, uses: Uses, expired_only: bool = False) -> list[str]:
    """Move unused versions of an image to the trash, and return them.

    The caller holds the pool's lock. ``expired_only``: see :func:`sweep`.
    """
    gone = []
    now = time.time()
    for version, until in old_versions(home):
        least = 1.0 if expired_only else 0.0  # 0: no recorded time
        if least <= until <= now and str(home / version) not in uses:
            move_to_trash(home.parent, home / version)
            gone.append(version)
    if expired_only:
        return gone
    safefs.remove_file(safefs.temporary_name(str(home / SIDECAR)))
    for note in home.glob(f"*{_OLD}*"):
        version = note.name.removeprefix(".").partition(_OLD)[0]
        if note.name.startswith(".") or not (home / version).exists() or current(home) == version:
            note.unlink(missing_ok=True)
    if current(home) is None and not any(home.iterdir()):
        home.rmdir()
    return gone


def collect_version(path: Path) -> None:
    """Remove an image version if it has expired and no image name refers to it.

    The caller has checked that no job uses the version.
    """
    home = path.parent
    with contextlib.suppress(OSError, ValueError, HostFault):
        if (
            current(home) == path.name
            or not path.exists()
            or _expiry(home, path.name) > time.time()
        ):
            return
        with locked(home.parent, wait=1.0):
            if current(home) == path.name:
                return
            move_to_trash(home.parent, path)
            reinstate(home, path.name)
            if not any(home.iterdir()):
                home.rmdir()
        empty_trash(home.parent)


def move_to_trash(pool: Path, path: Path) -> None:
    path.rename(pool / f"{_TRASH}{os.getpid()}-{time.time_ns():x}")


def empty_trash(pool: Path) -> None:
    for left in pool.glob(f"{_TRASH}*"):
        shutil.rmtree(left, ignore_errors=True)


def _try_trash(pool: Path, path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    with safefs.closing(descriptor):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        move_to_trash(pool, path)
