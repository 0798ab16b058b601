"""The image pool: a root-owned directory of images, each with a sidecar that says what it is.

Reading is :mod:`vtorque_core.image_pool`, whose names are here too; how files lie on disk and how
old ones go is :mod:`vtorque_core.image_store`. This module changes the pool, as root. Each change
is one rename: a kill at any point leaves the image as it was or as it is to be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from json import dumps
from pathlib import Path

from vtorque_core import image_store
from vtorque_core.api import Image
from vtorque_core.api_image import BuiltImage
from vtorque_core.errors import HostFault, Refusal, Refused
from vtorque_core.image_files import check_built, check_disk, file_sha256
from vtorque_core.image_pool import (
    Broken,
    Listed,
    bad,
    check_name,
    check_pool,
    describe,
    file_status,
    list_images,
    listing,
    lookup,
    read_sidecar,
    scan,
    select,
    unknown,
)
from vtorque_core.image_sidecar import (
    SIDECAR,
    FileRecord,
    Sidecar,
    check_facts,
    file_names,
    version_of,
)
from vtorque_core.image_signature import signed_bytes
from vtorque_core.image_store import staging, sweep
from vtorque_core.names import Paths
from vtorque_core.trust import effective_root

__all__ = [
    "SIDECAR",
    "Broken",
    "Listed",
    "Removed",
    "adopt",
    "attach",
    "check_name",
    "check_pool",
    "commit",
    "describe",
    "file_status",
    "label",
    "list_images",
    "listing",
    "lookup",
    "read_sidecar",
    "remove",
    "scan",
    "select",
    "staging",
    "sweep",
    "unsigned",
    "verify",
]

Hashed = Callable[[int, int], None]
"""Told of progress: bytes that are hashed, bytes in all."""


Sign = Callable[[Sidecar], str]
"""Returns the signature that a new image gets; empty: none."""


def unsigned(_new: Sidecar) -> str:
    """Sign nothing."""
    return ""


@dataclass(frozen=True)
class Removed:
    """What a removal left: ``used_by``: jobs of this node that still use a version of it;
    ``kept``: versions that stay for them, or for other nodes' jobs.
    """

    used_by: tuple[str, ...]
    kept: tuple[str, ...]


def verify(pool: Path, name: str, told: Hashed = lambda _done, _all: None) -> Image:
    """Hash every file of an image, check its disk and who can read it. As root, note that.

    A pool that was copied to a node has other inodes and times than the sidecar says; after a
    good hash root's ``verify`` records the new ones, and when it was. Raises Refused naming the
    file and what is wrong.
    """
    sidecar = describe(pool, name)
    directory = pool / name / sidecar.version
    total = sum(record.size for record in sidecar.files.values())
    records: dict[str, FileRecord] = {}
    done = 0
    for file, record in sidecar.files.items():
        status = file_status(f"{directory}/{file}", name)
        if not status.st_mode & 0o004:
            raise bad(name, f"{file} cannot be read by QEMU's user: chmod 644 {directory}/{file}")
        before = done
        digest = file_sha256(directory / file, lambda n, b=before: told(b + n, total))  # type: ignore[misc]
        done += status.st_size
        if digest != record.sha256:
            raise bad(name, f"{file} has sha256 {digest}, its sidecar says {record.sha256}")
        records[file] = FileRecord.of(digest, status)
    for part in (directory, pool / name, pool):
        if not part.stat().st_mode & 0o001:
            raise bad(name, f"QEMU's user cannot enter {part}: chmod o+x {part}")
    if sidecar.built.disk is not None:
        try:
            check_disk(directory / sidecar.built.disk, sidecar.built.disk_format)
        except Refused as error:
            raise bad(name, str(error)) from None
    if effective_root():
        _record_again(pool, sidecar, records)
    elif records != sidecar.files:
        raise bad(name, "its files have been copied: run vmgr images verify as root")
    return sidecar.image(pool)


def commit(
    pool: Path,
    name: str,
    source: Path,
    built: BuiltImage,
    builder: str,
    *,
    paths: Paths | None = None,
    keep: float = 0.0,
    told: Hashed = lambda _done, _all: None,
    expect: str = "",
    sign: Sign = unsigned,
) -> Image:
    """Check what a builder left in ``source`` and make it what image ``name`` is, as root.

    The files get a directory named after their content; the sidecar that names it is renamed into
    place last. Guests that run from the version before keep it.

    Args:
        pool, name: where, and as what; an image of that name is replaced.
        source: from :func:`staging`.
        built: what is in it.
        builder: who made it, for the sidecar.
        paths: this node's, if its jobs use the pool.
        keep: seconds that the version before is kept for jobs of other nodes.
        told: of the hashing.
        expect: the version that it must be, for a copy.
        sign: gives its signature. Without, the same content again keeps the one that it has.

    Raises Refused for a bad name or bad files, HostFault if the disk is full.
    """
    check_name(name)
    check_pool(pool)
    check_built(source, built)
    try:
        sidecar = _prepare(name, source, built, builder, told)
        if expect not in ("", sidecar.version):
            raise Refused(f"image {name}: its copy is {sidecar.version}, not {expect}")
        sidecar = replace(sidecar, signature=sign(sidecar))
        with image_store.locked(pool):
            sidecar = _switch(pool, source, sidecar, max(keep, image_store.GRACE))
        sweep(pool, paths)
    except OSError as error:
        raise HostFault(f"image {name}: {error}", stage="commit") from None
    return sidecar.image(pool)


def remove(
    pool: Path,
    name: str,
    *,
    paths: Paths | None = None,
    keep: float = 0.0,
    when_free: bool = False,
) -> Removed:
    """Remove an image, as root: the name at once, its files when nothing uses them.

    Args:
        pool, name: which.
        paths: this node's, if its jobs use the pool.
        keep: seconds that the files are kept for jobs of other nodes.
        when_free: also if jobs of this node use it: the files stay until the last has ended.

    Raises Refused if there is no such image, or it is in use.
    """
    check_name(name)
    check_pool(pool)
    home = pool / name
    try:
        with image_store.locked(pool):
            if not os.path.lexists(home / SIDECAR):
                raise unknown(pool, name)
            uses = image_store.in_use(paths)
            users = image_store.users_of(home, uses)
            if users and not when_free:
                raise _used(name, users)
            if not users and keep <= 0:
                image_store.trash(pool, home)
            else:
                _forget(home, uses, keep)
            image_store.fsync(pool)
        image_store.empty_trash(pool)
        left = [] if not home.is_dir() else [v for v, _ in image_store.old_versions(home)]
    except OSError as error:
        raise HostFault(f"image {name}: {error}", stage="remove") from None
    return Removed(users, tuple(left))


def label(
    pool: Path, name: str, changes: Mapping[str, str | None], paths: Paths | None = None
) -> Sidecar:
    """Set labels of an image, or remove those whose value is None; returns the new sidecar.

    As root. Raises Refused: no such image, a label that is not a short text.
    """
    describe(pool, name)
    try:
        with image_store.locked(pool):
            sidecar = read_sidecar(pool, name)
            labels = {**sidecar.built.labels, **changes}
            kept = {key: value for key, value in labels.items() if value is not None}
            new = replace(sidecar, built=replace(sidecar.built, labels=kept))
            if signed_bytes(new) != signed_bytes(sidecar):
                new = replace(new, signature="")  # it was not for these labels
            try:
                check_facts(new.built)
            except ValueError as error:
                raise Refused(f"image {name} {error}") from None
            _write_sidecar(pool / name, new)
        sweep(pool, paths)
    except OSError as error:
        raise HostFault(f"image {name}: {error}", stage="label") from None
    return new


def attach(pool: Path, seen: Sidecar, signature: str) -> None:
    """Give an image its signature, as root. Raises Refused if it is not ``seen`` any more."""
    try:
        with image_store.locked(pool):
            now = read_sidecar(pool, seen.name)
            if signed_bytes(now) != signed_bytes(seen):
                raise Refused(f"image {seen.name} has been changed meanwhile: look at it again")
            _write_sidecar(pool / seen.name, replace(now, signature=signature))
    except OSError as error:
        raise HostFault(f"image {seen.name}: {error}", stage="sign") from None


def adopt(cache: Path, wanted: Sidecar) -> None:
    """Have a copy say what the pool says of the same version: labels and signature change too.

    As root, on a copy whose files are whole. Raises HostFault.
    """
    try:
        with image_store.locked(cache):
            here = read_sidecar(cache, wanted.name)
            new = replace(here, built=wanted.built, signature=wanted.signature)
            if here.version == wanted.version and new != here:
                _write_sidecar(cache / wanted.name, new)
    except OSError as error:
        raise HostFault(f"image {wanted.name}: {error}", stage="sync") from None


def _used(name: str, users: tuple[str, ...]) -> Refused:
    jobs = ", ".join(users[:8]) + (f" and {len(users) - 8} more" if len(users) > 8 else "")
    fix = "wait, or remove it as soon as it is free: --when-free"
    return Refused(Refusal(f"is in use by {jobs}", key="img", value=name, fix=fix))


def _prepare(name: str, source: Path, built: BuiltImage, builder: str, told: Hashed) -> Sidecar:
    """Make ``source`` hold nothing but the version's directory, hashed and on disk."""
    files = file_names(built)
    total = sum((source / file).stat().st_size for file in files)
    done, digests = 0, {}
    for file in files:
        path = source / file
        os.chown(path, os.geteuid(), os.getegid())
        path.chmod(0o644)
        image_store.fsync(path)
        before = done
        digests[file] = file_sha256(path, lambda n, b=before: told(b + n, total))  # type: ignore[misc]
        done += path.stat().st_size
    version = version_of(built, digests)
    target = source / version
    target.mkdir()
    target.chmod(0o755)
    for file in files:
        (source / file).rename(target / file)
    image_store.fsync(target)
    records = {file: FileRecord.of(digests[file], (target / file).lstat()) for file in files}
    now = _now()
    return Sidecar(name, built, version, builder, now, records, now)


def _switch(pool: Path, source: Path, sidecar: Sidecar, keep: float) -> Sidecar:
    """Give the name its new version, under the pool's lock."""
    home = pool / sidecar.name
    home.mkdir(mode=0o755, exist_ok=True)
    home.chmod(0o755)
    sidecar = _still_signed(pool, sidecar)
    try:
        old = image_store.current(home)
    except ValueError:
        old = None  # broken: replaced
    prepared, target = source / sidecar.version, home / sidecar.version
    if not os.path.lexists(target):
        prepared.rename(target)
    elif old == sidecar.version and (whole := _whole(pool, sidecar)) is not None:
        sidecar = replace(sidecar, files=whole)  # the same content again: guests use these files
    else:
        for file in sidecar.files:  # of the same content; who has the old one open keeps it
            (prepared / file).rename(target / file)
        image_store.fsync(target)
    image_store.fsync(home)
    if old is not None and old != sidecar.version:
        image_store.retire(home, old, keep)
    _write_sidecar(home, sidecar)
    image_store.fsync(pool)
    image_store.reinstate(home, sidecar.version)
    return sidecar


def _still_signed(pool: Path, new: Sidecar) -> Sidecar:
    """Return the sidecar with the signature of the one it replaces, if that is the same image."""
    try:
        old = read_sidecar(pool, new.name)
    except Refused:
        return new
    if new.signature or signed_bytes(old) != signed_bytes(new):
        return new
    return replace(new, signature=old.signature)


def _whole(pool: Path, sidecar: Sidecar) -> Mapping[str, FileRecord] | None:
    """Return the records of the files that are there if stat(2) finds them unchanged."""
    try:
        lookup(pool, sidecar.name)
        there = read_sidecar(pool, sidecar.name)
    except Refused:
        return None
    return there.files if set(there.files) == set(sidecar.files) else None


def _forget(home: Path, uses: image_store.Uses, keep: float) -> None:
    """Take the name from an image whose files stay for now, under the pool's lock."""
    try:
        version = image_store.current(home)
    except ValueError:
        version = None
    if version is not None:
        image_store.retire(home, version, keep)
    (home / SIDECAR).unlink()
    image_store.fsync(home)
    image_store.collect(home, uses)


def _record_again(pool: Path, seen: Sidecar, records: dict[str, FileRecord]) -> None:
    """Note when an image was found good, and where; not if it has been replaced meanwhile."""
    try:
        with image_store.locked(pool):
            if read_sidecar(pool, seen.name).version == seen.version:
                now = read_sidecar(pool, seen.name)
                _write_sidecar(pool / seen.name, replace(now, files=records, verified=_now()))
    except OSError as error:
        if records != seen.files:
            raise HostFault(f"image {seen.name}: {error}", stage="verify") from None


def _write_sidecar(home: Path, sidecar: Sidecar) -> None:
    text = dumps(sidecar.as_json(), indent=2) + "\n"
    image_store.replace_file(home / SIDECAR, text.encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
