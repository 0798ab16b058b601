"""Change the pool: add, label, sign and remove images. Privileges: root.

The core reads images (:mod:`vtorque_core.live.images`), and defines their layout on disk and the
lifetime of old versions (``store``). Each change is one rename, so a kill leaves the old or the new
image.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from json import dumps
from pathlib import Path

from vtorque_core.api import HostFault, Image, Paths, Refused, name_errors
from vtorque_core.api.image_builder import Building, BuiltImage
from vtorque_core.live.images import (
    SIDECAR,
    FileRecord,
    Sidecar,
    check_facts,
    check_name,
    check_pool,
    describe,
    effective_root,
    file_names,
    file_status,
    fsync,
    has_copy,
    invalid,
    names,
    read_sidecar,
    signed_bytes,
    store,
    unknown_image,
    version_of,
)
from vtorque_images.check import Hashed, check_built, check_disk, file_hashes
from vtorque_images.common import users_of

_GRACE = 600.0  # seconds for which a replaced version is kept, for jobs that are just starting

Sign = Callable[[Sidecar], str]
"""Function that returns the signature of a new image, or an empty string."""


@dataclass(frozen=True)
class CommitOptions:
    """How an image is committed.

    Attributes:
        paths: this node's directories, if this node's jobs use the pool.
        keep: seconds to keep the previous version for jobs of other nodes.
        told: called with the progress of the hashing.
        sign: returns the signature, or raises Refused. None: keep the previous version's signature
            if it also fits the new version.
    """

    paths: Paths | None = None
    keep: float = 0.0
    told: Hashed = lambda _done, _all: None
    sign: Sign | None = None


def verify(pool: Path, name: str, told: Hashed = lambda _done, _all: None) -> Image:
    """Verify an image: file hashes, the disk, and whether QEMU's user can read the files.

    If the caller owns the pool, also update the files' inodes and times in the sidecar, because a
    copied pool has new inodes.

    Raises:
        Refused: a check failed; the message names the file and the problem.
    """
    sidecar = describe(pool, name)
    directory = pool / name / sidecar.version
    there = {file: file_status(f"{directory}/{file}", name) for file in sidecar.files}
    for file, status in there.items():
        if not status.st_mode & 0o004:
            raise invalid(name, f"QEMU's user cannot read {file}: chmod 644 {directory}/{file}")
    digests = file_hashes(directory, there, told)
    for file, record in sidecar.files.items():
        if digests[file] != record.sha256:
            raise invalid(
                name, f"{file} has sha256 {digests[file]}, but its sidecar has {record.sha256}"
            )
    records = {
        file: FileRecord.from_status(digests[file], status) for file, status in there.items()
    }
    owner = pool.stat().st_uid == os.geteuid()
    qemu_is_owner = owner and not effective_root()  # on a personal site
    for part in () if qemu_is_owner else (directory, pool / name, pool):
        if not part.stat().st_mode & 0o001:
            raise invalid(name, f"QEMU's user cannot enter {part}: chmod o+x {part}")
    if sidecar.built.disk is not None:
        try:
            check_disk(directory / sidecar.built.disk, sidecar.built.disk_format)
        except Refused as error:
            raise invalid(name, str(error)) from None
    if owner:
        _record_verification(pool, sidecar, records)
    elif records != sidecar.files:
        raise invalid(
            name, f"size, time or inode of a file changed: run vmgr images verify {name} as root"
        )
    return sidecar.image(pool)


def build(
    pool: Path,
    name: str,
    builder: str,
    make: Callable[[Path, Building], BuiltImage],
    building: Building,
    *,
    there: bool | None = None,
    options: CommitOptions = CommitOptions(),
) -> Image:
    """Build an image and commit it.

    Args:
        pool: the pool.
        name: the image's name.
        builder: the builder's name.
        make: calls a builder's ``build`` with the staging directory and ``building``.
        building: progress and notes of the build.
        there: whether the image must exist. False: raise Refused if it exists. True: raise Refused
            if it is missing, and pass its description to the builder. None: create or replace it.
        options: as for :func:`commit`.
    """
    check_name(name)
    check_pool(pool)
    if there is False and name in names(pool):
        raise Refused(
            f"image {name} already exists: replace it with vmgr images update {name} FILE"
        )
    before = _current_image(pool, name) if there else None
    with (
        name_errors(f"image {name}", stage="build"),
        store.staging(pool, options.paths) as staging,
    ):
        built = make(staging, replace(building, before=before))
        building.step("checking and hashing")
        changed = replace(options, told=building.told)
        return commit(pool, name, staging, built, builder, options=changed)


def _current_image(pool: Path, name: str) -> BuiltImage | None:
    if name not in names(pool):
        raise unknown_image(pool, name)
    try:
        return describe(pool, name).built
    except Refused:
        return None  # broken: an update replaces it


def commit(
    pool: Path,
    name: str,
    source: Path,
    built: BuiltImage,
    builder: str,
    *,
    options: CommitOptions = CommitOptions(),
) -> Image:
    """Check the builder's files in ``source`` and make them the current version of an image.

    The files move to a directory named after their contents. The sidecar, which names this
    directory, is renamed last. Running guests keep the previous version.

    Args:
        pool: the pool.
        name: the name of the image, which is replaced if it exists.
        source: the staging directory.
        built: the builder's description of the image.
        builder: the builder's name, for the sidecar.
        options: how to replace the previous version.

    Raises:
        Refused: the name or the files are invalid.
        HostFault: the disk is full.
    """
    check_name(name)
    check_pool(pool)
    check_built(source, built)
    try:
        sidecar = _prepare(name, source, built, builder, options.told)
        if options.sign is not None:
            sidecar = replace(sidecar, signature=options.sign(sidecar))
        with store.locked(pool):
            sidecar = _switch(pool, source, sidecar, max(options.keep, _GRACE))
        store.sweep(pool, options.paths)
    except OSError as error:
        raise HostFault(f"image {name}: {error}", stage="commit") from None
    return sidecar.image(pool)


@dataclass(frozen=True)
class RemoveResult:
    """Result of a removal.

    Attributes:
        used_by: jobs of this node that still use a version of the image.
        kept: versions that remain for these jobs, or for jobs of other nodes.
    """

    used_by: tuple[str, ...]
    kept: tuple[str, ...]


def remove(
    pool: Path,
    name: str,
    *,
    paths: Paths | None = None,
    keep: float = 0.0,
    when_free: bool = False,
) -> RemoveResult:
    """Remove an image: its name at once, its files when no job uses them.

    Args:
        pool: the pool.
        name: the image's name.
        paths: this node's directories, if this node's jobs use the pool.
        keep: seconds to keep the files for jobs of other nodes.
        when_free: also remove an image in use on this node; its files remain until the last job
            ends.

    Raises:
        Refused: the image does not exist, or is in use.
    """
    check_name(name)
    check_pool(pool)
    home = pool / name
    try:
        with store.locked(pool):
            if not os.path.lexists(home / SIDECAR):
                raise unknown_image(pool, name)
            uses = store.image_uses(paths)
            users = users_of(home, uses)
            if users and not when_free:
                raise _in_use_refusal(name, users)
            if not users and keep <= 0:
                store.move_to_trash(pool, home)
            else:
                _forget(home, uses, keep)
            fsync(pool)
        store.empty_trash(pool)
        left = [] if not home.is_dir() else [v for v, _ in store.old_versions(home)]
    except OSError as error:
        raise HostFault(f"image {name}: {error}", stage="remove") from None
    return RemoveResult(users, tuple(left))


def label(
    pool: Path, name: str, changes: Mapping[str, str | None], paths: Paths | None = None
) -> Sidecar:
    """Set labels of an image, or remove those with the value None; return the new sidecar.

    Raises:
        Refused: the image does not exist, or a label is invalid.
    """

    def apply_labels(now: Sidecar) -> Sidecar:
        labels = {**now.built.labels, **changes}
        kept = {key: value for key, value in labels.items() if value is not None}
        new = replace(now, built=replace(now.built, labels=kept))
        try:
            check_facts(new.built)
        except ValueError as error:
            raise Refused(f"image {name} {error}") from None
        # The signature does not cover the new labels.
        return new if signed_bytes(new) == signed_bytes(now) else replace(new, signature="")

    describe(pool, name)
    new = rewrite(pool, name, "label", apply_labels)
    store.sweep(pool, paths)
    return new


def attach(pool: Path, seen: Sidecar, signature: str) -> None:
    """Add a signature to an image.

    ``seen`` is the signed sidecar. Raises Refused if the pool's sidecar differs from ``seen``.
    """

    def signed(now: Sidecar) -> Sidecar:
        if signed_bytes(now) != signed_bytes(seen):
            raise Refused(f"another command changed image {seen.name} at the same time: try again")
        return replace(now, signature=signature)

    rewrite(pool, seen.name, "sign", signed)


def rewrite(pool: Path, name: str, stage: str, make: Callable[[Sidecar], Sidecar]) -> Sidecar:
    """Replace an image's sidecar by the result of ``make``; return the new sidecar.

    Holds the pool's lock. ``stage`` begins the message of a HostFault.
    """
    try:
        with store.locked(pool):
            now = read_sidecar(pool, name)
            new = make(now)
            if new != now:
                _write_sidecar(pool / name, new)
    except OSError as error:
        raise HostFault(f"image {name}: {error}", stage=stage) from None
    return new


def _in_use_refusal(name: str, users: tuple[str, ...]) -> Refused:
    jobs = ", ".join(users[:8]) + (f" and {len(users) - 8} more" if len(users) > 8 else "")
    fix = "wait until the jobs end, or use --when-free"
    return Refused(f"is in use by {jobs}", key="img", value=name, fix=fix)


def _prepare(name: str, source: Path, built: BuiltImage, builder: str, told: Hashed) -> Sidecar:
    """Hash and sync an image's files, and move them to a version directory in ``source``."""
    files = file_names(built)
    for path in (source / file for file in files):
        os.chown(path, os.geteuid(), os.getegid())
        path.chmod(0o644)
        fsync(path)
    digests = file_hashes(source, files, told)
    version = version_of(built, digests)
    target = source / version
    target.mkdir()
    target.chmod(0o755)
    for file in files:
        (source / file).rename(target / file)
    fsync(target)
    records = {
        file: FileRecord.from_status(digests[file], (target / file).lstat()) for file in files
    }
    now = _timestamp()
    return Sidecar(name, built, version, builder, now, records, now)


def _switch(pool: Path, source: Path, sidecar: Sidecar, keep: float) -> Sidecar:
    home = pool / sidecar.name
    home.mkdir(mode=0o755, exist_ok=True)
    home.chmod(0o755)
    sidecar = _keep_signature(pool, sidecar)
    try:
        old = store.current(home)
    except ValueError:
        old = None  # the broken image is replaced
    prepared, target = source / sidecar.version, home / sidecar.version
    if not os.path.lexists(target):
        prepared.rename(target)
    elif old == sidecar.version and has_copy(pool, sidecar):
        there = read_sidecar(pool, sidecar.name)
        sidecar = replace(sidecar, files=there.files)  # keep the files that guests use
    else:
        for file in sidecar.files:  # same content; guests keep the old file open
            (prepared / file).rename(target / file)
        fsync(target)
    fsync(home)
    if old is not None and old != sidecar.version:
        store.retire(home, old, keep)
    _write_sidecar(home, sidecar)
    fsync(pool)
    store.reinstate(home, sidecar.version)
    return sidecar


def _keep_signature(pool: Path, new: Sidecar) -> Sidecar:
    """Return the new sidecar, with the old signature if it is also valid for the new sidecar."""
    try:
        old = read_sidecar(pool, new.name)
    except Refused:
        return new
    if new.signature or signed_bytes(old) != signed_bytes(new):
        return new
    return replace(new, signature=old.signature)


def _forget(home: Path, uses: store.Uses, keep: float) -> None:
    """Remove an image's sidecar but keep its files for jobs. The caller holds the pool's lock."""
    try:
        version = store.current(home)
    except ValueError:
        version = None
    if version is not None:
        store.retire(home, version, keep)
    (home / SIDECAR).unlink()
    fsync(home)
    store.collect(home, uses)


def _record_verification(pool: Path, seen: Sidecar, records: dict[str, FileRecord]) -> None:
    def apply_records(now: Sidecar) -> Sidecar:
        same = now.version == seen.version
        return replace(now, files=records, verified=_timestamp()) if same else now

    try:
        rewrite(pool, seen.name, "verify", apply_records)
    except HostFault:  # usually because the pool is read-only
        if records != seen.files:
            raise


def _write_sidecar(home: Path, sidecar: Sidecar) -> None:
    text = dumps(sidecar.as_json(), indent=2) + "\n"
    store.replace_file(home / SIDECAR, text.encode())


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
