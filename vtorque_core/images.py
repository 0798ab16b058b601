"""The image pool: a root-owned directory of images, each with a sidecar that says what it is.

    <pool>/<name>/image.json      the sidecar; replaced in one step: an image is whole or absent
    <pool>/<name>/<version>/...   the files of one build; the last but one is kept for jobs that
                                  are being started from it

A full hash of every file at each job's start would take longer than the boot, so :func:`lookup`
compares size, modification time and inode with those the sidecar has, and :func:`verify` hashes.
Nothing here is writable by anybody but root; a pool or an image that is gets refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from vtorque_core.api import Image
from vtorque_core.api_image import BuiltImage
from vtorque_core.errors import ConfigError, HostFault, Refusal, Refused, printable
from vtorque_core.image_files import check_built, file_sha256
from vtorque_core.image_sidecar import FileRecord, Sidecar, file_names, parse_sidecar
from vtorque_core.trust import effective_root, require_root_owned

SIDECAR = "image.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", re.ASCII)
_MAX_SIDECAR = 65536  # bytes
_STAGING = ".staging-"


@dataclass(frozen=True)
class Broken:
    """An image that cannot be used, and why."""

    name: str
    reason: str


def check_pool(pool: Path) -> None:
    """Check that only root (or the calling user) can change the pool or anything above it.

    Raises Refused naming the path and its mode, HostFault if there is no pool.
    """
    if not pool.is_absolute():
        raise Refused(f"[images] pool={printable(str(pool))}: must be an absolute path")
    if not pool.is_dir():
        raise HostFault(f"image pool {pool} does not exist: run vtorque setup install")
    _check_trusted(pool)


def check_name(name: str) -> None:
    """Check the name of an image. Raises Refused for paths, dots in front, odd characters."""
    if not _NAME.fullmatch(name):
        raise Refused(
            Refusal(
                "is not the name of an image: use letters, digits and ._+- (no path)",
                key="img",
                value=name,
            )
        )


def lookup(pool: Path, name: str) -> Image:
    """Return one image of the pool, its files checked by size, time and inode. Any user.

    Raises Refused: bad name, no such image, unreadable sidecar, a file that has changed, files or
    directories that others than root can write; HostFault: no pool.
    """
    check_name(name)
    check_pool(pool)
    return _lookup(pool, name)


def list_images(pool: Path) -> list[Image]:
    """Return all usable images by name. Raises as :func:`check_pool`; see :func:`scan`."""
    return [found for found in scan(pool) if isinstance(found, Image)]


def scan(pool: Path) -> list[Image | Broken]:
    """Return every image of the pool by name, those that cannot be used with the reason."""
    check_pool(pool)
    found: list[Image | Broken] = []
    for name in _names(pool):
        try:
            found.append(_lookup(pool, name))
        except Refused as error:
            found.append(Broken(name, str(error)))
    return found


def select(pool: Path, name: str | None, distro: str | None, arch: str | None) -> Image:
    """Return the image a job asked for: by name, or the only one of a distro and architecture.

    None and empty text mean that nobody chose. A named image must be of the distro and the
    architecture, if given. Raises Refused (none fits, or several do), HostFault.
    """
    if name:
        image = lookup(pool, name)
        for key, wanted, has in (("distro", distro, image.distro), ("arch", arch, image.arch)):
            if wanted and wanted != has:
                message = f"does not fit img={name}, whose {key} is {has}"
                raise Refused(Refusal(message, key=key, value=wanted))
        return image
    usable = list_images(pool)
    fit = [i for i in usable if distro in (None, "", i.distro) and arch in (None, "", i.arch)]
    if len(fit) == 1:
        return fit[0]
    asked = " ".join(f"{k}={printable(v)}" for k, v in (("distro", distro), ("arch", arch)) if v)
    names = ", ".join(i.name for i in fit or usable) or "none"
    if not fit:
        raise Refused(f"no image of the pool has {asked or 'been built'} (there is: {names})")
    raise Refused(f"several images fit {asked or 'the job'}: choose one with img= ({names})")


def describe(pool: Path, name: str) -> Sidecar:
    """Return what the sidecar of an image says, its files not looked at. Raises as lookup."""
    check_name(name)
    check_pool(pool)
    return _read_sidecar(pool, name)


def verify(pool: Path, name: str) -> Image:
    """Hash every file of an image and compare with the sidecar; as root, note new inodes.

    A pool that was copied to a node has other inodes and times than the sidecar says; after a
    good hash root's ``verify`` records the new ones. Raises Refused naming the file that differs.
    """
    sidecar = describe(pool, name)
    directory = pool / name / sidecar.version
    records: dict[str, FileRecord] = {}
    for file, record in sidecar.files.items():
        status = _status(directory / file, name)
        digest = file_sha256(directory / file)
        if digest != record.sha256:
            raise _bad(name, f"{file} has sha256 {digest}, its sidecar says {record.sha256}")
        records[file] = FileRecord.of(digest, status)
    if records != sidecar.files and not effective_root():
        raise _bad(name, "its files have been copied: run vmgr images verify as root")
    if records != sidecar.files:
        _record_again(pool, sidecar, records)
    return sidecar.image(pool)


def commit(pool: Path, name: str, staging: Path, built: BuiltImage, builder: str) -> Image:
    """Check what a builder left in ``staging`` and make it image ``name``, as root.

    ``staging`` comes from :func:`staging`. The files are moved into a new version directory; the
    sidecar that names it is renamed into place last, so a kill leaves the old image or the new.
    Raises Refused for a bad name or bad files, HostFault if the disk is full.
    """
    check_name(name)
    check_pool(pool)
    check_built(staging, built)
    try:
        with _locked(pool):
            return _commit(pool, name, staging, built, builder)
    except OSError as error:
        raise HostFault(f"image {name}: {error}", stage="commit") from None


def remove(pool: Path, name: str) -> None:
    """Remove an image, as root: the sidecar first, so that no job starts from half of it.

    Guests that run from it keep the files open. Raises Refused if there is no such image.
    """
    check_name(name)
    check_pool(pool)
    if name not in _names(pool):
        raise _unknown(pool, name)
    try:
        with _locked(pool):
            (pool / name / SIDECAR).unlink(missing_ok=True)
            _fsync(pool / name)
            shutil.rmtree(pool / name)
    except OSError as error:
        raise HostFault(f"image {name}: {error}", stage="remove") from None


@contextmanager
def staging(pool: Path) -> Iterator[Path]:
    """Give an empty root-only directory in the pool for a builder, removed afterwards.

    Directories of builders that were killed are removed on the way: nobody holds their lock.
    """
    check_pool(pool)
    with _locked(pool):
        for left in pool.glob(f"{_STAGING}*"):
            _remove_if_left(left)
        path = Path(tempfile.mkdtemp(prefix=_STAGING, dir=pool))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


# -- reading ----------------------------------------------------------------------------------


def _lookup(pool: Path, name: str) -> Image:
    sidecar = _read_sidecar(pool, name)
    for file, record in sidecar.files.items():
        status = _status(pool / name / sidecar.version / file, name)
        if FileRecord.of(record.sha256, status) != record:
            raise _bad(
                name,
                f"{file} is not the file that was hashed (size, time or inode differ): "
                f"run vmgr images verify {name} as root",
            )
    return sidecar.image(pool)


def _read_sidecar(pool: Path, name: str) -> Sidecar:
    path = pool / name / SIDECAR
    if path.parent.is_symlink():
        raise _bad(name, f"{path.parent} is a symbolic link: an image lies in the pool itself")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise _unknown(pool, name) from None
    except OSError as error:
        raise _bad(name, f"{SIDECAR}: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        _check_trusted(path)
        text = file.read(_MAX_SIDECAR + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    try:
        if len(text) > _MAX_SIDECAR:
            raise ValueError(f"is longer than {_MAX_SIDECAR} bytes")
        return parse_sidecar(text, name)
    except ValueError as error:
        raise _bad(name, f"{SIDECAR} {error}") from None


def _status(path: Path, name: str) -> os.stat_result:
    """Return the status of one of an image's files; it must be regular and root's alone."""
    try:
        require_root_owned(path, uid=os.geteuid())
    except ConfigError as error:
        raise _bad(name, str(error)) from None
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise _bad(name, f"{path.name} is not a regular file")
    return status


def _check_trusted(path: Path) -> None:
    try:
        require_root_owned(path, uid=os.geteuid())
    except ConfigError as error:
        raise Refused(f"image pool: {error}") from None


def _names(pool: Path) -> list[str]:
    return sorted(
        path.name
        for path in pool.iterdir()
        if _NAME.fullmatch(path.name) and os.path.lexists(path / SIDECAR)
    )


def _unknown(pool: Path, name: str) -> Refused:
    from difflib import get_close_matches  # noqa: PLC0415 (12 ms, for errors only)

    known = _names(pool)
    close = get_close_matches(name, known, n=3) or known[:10]
    hint = f"did you mean {', '.join(close)}?" if close else "build one with vmgr images build"
    return Refused(Refusal(f"no such image in {pool}", key="img", value=name, fix=hint))


def _bad(name: str, reason: str) -> Refused:
    return Refused(Refusal(f"the image is broken: {printable(reason)}", key="img", value=name))


# -- writing ----------------------------------------------------------------------------------


def _commit(pool: Path, name: str, source: Path, built: BuiltImage, builder: str) -> Image:
    home = pool / name
    home.mkdir(mode=0o755, exist_ok=True)
    home.chmod(0o755)
    version = f"v{time.time_ns():x}"
    target = home / version
    target.mkdir(mode=0o755)
    target.chmod(0o755)
    records = {}
    for file in file_names(built):
        path = target / file
        (source / file).rename(path)
        os.chown(path, os.geteuid(), os.getegid())
        path.chmod(0o644)
        _fsync(path)
        records[file] = FileRecord.of(file_sha256(path), path.lstat())
    _fsync(target)
    kept = _version_in_use(home)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    sidecar = Sidecar(name, built, version, builder, created, records)
    _write_sidecar(home, sidecar)
    _fsync(pool)
    for old in home.glob("v*"):
        if old.name not in (version, kept):
            shutil.rmtree(old, ignore_errors=True)
    return sidecar.image(pool)


def _record_again(pool: Path, seen: Sidecar, records: dict[str, FileRecord]) -> None:
    """Write a sidecar with other records, unless the image has been replaced meanwhile."""
    with _locked(pool):
        if _version_in_use(pool / seen.name) == seen.version:
            _write_sidecar(pool / seen.name, replace(seen, files=records))


def _version_in_use(home: Path) -> str | None:
    try:
        return parse_sidecar((home / SIDECAR).read_bytes(), home.name).version
    except (OSError, ValueError):
        return None


def _write_sidecar(home: Path, sidecar: Sidecar) -> None:
    fresh = home / f".{SIDECAR}.new"
    fresh.unlink(missing_ok=True)
    fresh.write_text(json.dumps(sidecar.as_json(), indent=2) + "\n", encoding="utf-8")
    fresh.chmod(0o644)
    _fsync(fresh)
    fresh.rename(home / SIDECAR)
    _fsync(home)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(pool: Path) -> Iterator[None]:
    """Hold the pool's lock: one commit or removal at a time."""
    descriptor = os.open(pool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_left(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
