"""Receive images into a node's own cache. Runs as root.

Files arrive in a directory of root on the cache's file system, with the layout of a pool:
``<name>/image.json`` and ``<name>/<version>/<file>``. Files that the cache already has are not
sent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vtorque_core.api import Paths, Refused, UsageError
from vtorque_core.api.setup_steps import make_directories
from vtorque_core.live.images import (
    SIDECAR,
    Sidecar,
    check_pool,
    describe,
    has_copy,
    root_site,
    store,
)
from vtorque_core.live.images import names as names_in
from vtorque_images import change


@dataclass(frozen=True)
class ImagePlaces:
    """The image pool, this node's cache, and this node's directories with the job journals."""

    pool: Path
    cache: Path
    paths: Paths


def places(config: Path) -> ImagePlaces:
    """Return the site's image directories. Raises UsageError if ``[images] cache`` is not set."""
    site, _ = root_site(config)
    if not site.images.cache:
        raise UsageError(
            f"[images] cache is not set in {site.path}, so nodes have no directory for copies"
        )
    return ImagePlaces(site.images.pool, Path(site.images.cache), site.paths)


def files(places: ImagePlaces, names: Sequence[str] = ()) -> dict[str, list[str]]:
    """Map each image (default: all images) to its files, as paths relative to the pool.

    Raises:
        Refused: If an image is missing or unreadable.
        HostFault: If there is no pool.
    """
    found = {}
    for name in names or names_in(places.pool):
        known = describe(places.pool, name)
        inside = [SIDECAR, *(f"{known.version}/{file}" for file in known.files)]
        found[name] = [f"{name}/{file}" for file in inside]
    return found


def receive_directory(places: ImagePlaces, name: str) -> Path:
    """Return the cache's directory ``name`` for received files. Create it and the cache if missing.

    Raises:
        Refused: If users other than root can write to the cache.
    """
    make_directories(places.cache)
    check_pool(places.cache)
    sent = places.cache / name
    sent.mkdir(mode=0o755, exist_ok=True)
    return sent


def take(places: ImagePlaces, sent: Path, names: Iterable[str]) -> list[str]:
    """Move received images into the cache; return the names of images that the cache did not have.

    If the cache already has an image's version, only the labels and the signature are replaced.
    After an interruption, a repeated call continues.

    Raises:
        Refused: If users other than root can write to the directories, or if a copy does not match
            its sidecar. Such a copy is deleted.
        HostFault: If the disk is full.
    """
    for directory in (places.cache, sent):
        check_pool(directory)
    copies = [describe(sent, name) for name in names]
    new = [copy for copy in copies if not has_copy(places.cache, copy)]
    for copy in new:
        _gather(places.cache, sent, copy)
    store.sweep(places.cache, places.paths)  # also damaged files: sent again next time
    for copy in copies:
        if copy in new:
            _commit(places, sent, copy)
        else:
            _adopt(places.cache, copy)
        shutil.rmtree(sent / copy.name, ignore_errors=True)
    return [copy.name for copy in new]


def keep_only(places: ImagePlaces, names: Iterable[str]) -> list[str]:
    """Remove all images except ``names`` from the cache; return the removed images' names.

    Files of a removed image stay while a job uses them.
    """
    check_pool(places.cache)
    others = sorted({*names_in(places.cache)} - {*names})
    for name in others:
        change.remove(places.cache, name, paths=places.paths, when_free=True)
    return others


def _gather(cache: Path, sent: Path, copy: Sidecar) -> None:
    """Move all files of a received image back to the directory from which ``_commit`` takes them.

    An interrupted :func:`_commit` may have moved files into a subdirectory or into the cache.
    """
    part, there = sent / copy.name / copy.version, cache / copy.name / copy.version
    part.mkdir(mode=0o755, exist_ok=True)
    for inside in (part / part.name).glob("*"):
        inside.rename(part / inside.name)
    with contextlib.suppress(FileNotFoundError):
        (part / part.name).rmdir()
    for file in copy.files:
        if not os.path.lexists(part / file) and os.path.lexists(there / file):
            (there / file).rename(part / file)


def _commit(places: ImagePlaces, sent: Path, copy: Sidecar) -> None:
    def sign(new: Sidecar) -> str:
        if new.version != copy.version:
            raise Refused(
                f"image {copy.name}: the copy is version {new.version}, not {copy.version}"
            )
        return copy.signature

    made = copy.name, sent / copy.name / copy.version, copy.built, copy.builder
    try:
        options = change.CommitOptions(places.paths, sign=sign)
        change.commit(places.cache, *made, options=options)
    except Refused:
        shutil.rmtree(sent / copy.name, ignore_errors=True)
        raise


def _adopt(cache: Path, copy: Sidecar) -> None:
    """Give the cache's image the labels and signature of a received copy of the same version."""

    def adopt(now: Sidecar) -> Sidecar:
        same = now.version == copy.version
        return replace(now, built=copy.built, signature=copy.signature) if same else now

    change.rewrite(cache, copy.name, "sync", adopt)
