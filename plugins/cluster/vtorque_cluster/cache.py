"""Nodes' own copies of images: what there is to send, and taking it. Root's.

What was sent lies as in a pool, in any directory that is root's and on the cache's file system:
``<name>/image.json`` and ``<name>/<version>/<file>``, less the files that the cache has.
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
class Places:
    """Where images are: the pool, this node's copies; ``paths``: of its jobs, that use them."""

    pool: Path
    cache: Path
    paths: Paths


def places(config: Path) -> Places:
    """Return where the site has its images. Raises UsageError, also for a site without a cache."""
    site, _ = root_site(config)
    if not site.images.cache:
        raise UsageError(f"[images] cache is not set in {site.path}: there is nowhere to copy to")
    return Places(site.images.pool, Path(site.images.cache), site.paths)


def files(places: Places, names: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the files of images (none named: of all) of the pool, by image, as paths in the pool.

    Raises Refused: no such image, or it cannot be read; HostFault: no pool.
    """
    found = {}
    for name in names or names_in(places.pool):
        known = describe(places.pool, name)
        inside = [SIDECAR, *(f"{known.version}/{file}" for file in known.files)]
        found[name] = [f"{name}/{file}" for file in inside]
    return found


def receiving(places: Places, name: str) -> Path:
    """Return the cache's own directory for what is sent; both are made if they are missing.

    Raises Refused if others than root can write the cache, before anything is done in it; OSError.
    """
    make_directories(places.cache)
    check_pool(places.cache)
    sent = places.cache / name
    sent.mkdir(mode=0o755, exist_ok=True)
    return sent


def take(places: Places, sent: Path, names: Iterable[str]) -> list[str]:
    """Make images of the cache of what was sent, and remove that; return those that are new.

    An image that is there already gets the labels and the signature that were sent. After a kill,
    or a HostFault, it goes on where it was. Raises Refused: others than root can write the cache or
    what was sent, or a copy has not the hash that its sidecar says, and is thrown away; HostFault:
    no room.
    """
    for directory in (places.cache, sent):
        check_pool(directory)
    copies = [describe(sent, name) for name in names]
    new = [copy for copy in copies if not has_copy(places.cache, copy)]
    for copy in new:
        _gather(places.cache, sent, copy)
    store.sweep(places.cache, places.paths)  # also what is damaged and has no name: sent next time
    for copy in copies:
        if copy in new:
            _commit(places, sent, copy)
        else:
            _adopt(places.cache, copy)
        shutil.rmtree(sent / copy.name, ignore_errors=True)
    return [copy.name for copy in new]


def keep_only(places: Places, names: Iterable[str]) -> list[str]:
    """Remove all other images from the cache, their files when no job uses them; return them.

    Raises Refused if others than root can write the cache.
    """
    check_pool(places.cache)
    others = sorted({*names_in(places.cache)} - {*names})
    for name in others:
        change.remove(places.cache, name, paths=places.paths, when_free=True)
    return others


def _gather(cache: Path, sent: Path, copy: Sidecar) -> None:
    """Put all files of a copy beside each other.

    A commit that was killed has moved them one directory down, or into the cache already; what the
    cache has was not sent.
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


def _commit(places: Places, sent: Path, copy: Sidecar) -> None:
    def signed(new: Sidecar) -> str:
        if new.version != copy.version:
            raise Refused(f"image {copy.name}: its copy is {new.version}, not {copy.version}")
        return copy.signature

    made = copy.name, sent / copy.name / copy.version, copy.built, copy.builder
    try:
        change.commit(places.cache, *made, paths=places.paths, sign=signed)
    except Refused:
        shutil.rmtree(sent / copy.name, ignore_errors=True)
        raise


def _adopt(cache: Path, copy: Sidecar) -> None:
    """Have an image of the cache say what the pool says of the same version."""

    def adopted(now: Sidecar) -> Sidecar:
        same = now.version == copy.version
        return replace(now, built=copy.built, signature=copy.signature) if same else now

    change.rewrite(cache, copy.name, "sync", adopted)
