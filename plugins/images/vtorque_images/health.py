"""Health checks of the image pool and of this node's cache for ``vtorque doctor``."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from vtorque_core.api import HostFault, Refused, VtorqueError, node_job
from vtorque_core.api.health import LEAST_FREE, HealthCheck, HealthResult, failure, ok, warning
from vtorque_core.api.values import is_personal
from vtorque_core.live.images import (
    BrokenImage,
    ListedImage,
    Sidecar,
    Site,
    boots_by_uefi,
    describe,
    listing,
    signer_of,
)

_SYNC = "vmgr images sync --nodes NODE, on the host that fills the pool"


def checks() -> list[HealthCheck]:
    """Return the checks of the image pool and of this node's cache for doctor."""
    return [
        HealthCheck("image pool", partial(_check_whole, check_pool)),
        HealthCheck("image cache", partial(_check_whole, check_cache)),
    ]


def _check_whole(
    check: Callable[[Site], Iterable[HealthResult]], site: node_job.Site
) -> Iterable[HealthResult]:
    assert isinstance(site, Site)  # noqa: S101 - doctor passes the whole config
    return check(site)


def check_pool(site: Site) -> Iterator[HealthResult]:
    """Check that only root can write to the image pool, and that QEMU can boot its images."""
    pool, cache = site.images.pool, site.images.cache
    if cache and not pool.is_dir() and Path(cache).is_dir():
        yield ok(
            f"the pool {pool} does not exist on this node: all images are in the cache {cache}"
        )
        return
    try:
        found, broken = _split_listing(pool)
    except VtorqueError as error:
        if is_personal(site) and not pool.exists():
            yield warning("there are no images yet", "your first job builds the image micro")
        else:
            yield failure(str(error), "chown -R root: and chmod -R go-w the pool")
        return
    for item in broken:
        yield failure(f"image {item.name} {item.reason}", "build or remove it")
    if not found:
        yield warning(f"no image in {pool}", "vmgr images build micro micro")
        return
    yield ok(f"{len(found)} images in {pool}")
    if not is_personal(site):
        yield from _check_readable(found, pool)
    if not site.node.uefi.is_file():
        for sidecar in found:
            if boots_by_uefi(sidecar.built):
                missing = f"image {sidecar.name} boots by UEFI; there is no {site.node.uefi}"
                yield failure(missing, "install ovmf (edk2-ovmf), or set [node] uefi to its file")
    if site.images.signers:
        yield from _check_signed(found, site)


def _split_listing(pool: Path) -> tuple[list[Sidecar], list[BrokenImage]]:
    found = listing(pool)
    usable = [item.sidecar for item in found if isinstance(item, ListedImage)]
    return usable, [item for item in found if isinstance(item, BrokenImage)]


def _check_signed(found: Iterable[Sidecar], site: Site) -> Iterator[HealthResult]:
    """Check that the configured signers are usable, and report images that no signer signed."""
    good = 0
    for sidecar in found:
        try:
            signer_of(sidecar, Path(site.images.signers))
            good += 1
        except Refused as error:
            yield warning(str(error), f"vmgr images sign {sidecar.name} --key FILE, or remove it")
        except HostFault as error:
            yield failure(str(error), "fix this: until then jobs cannot start guests on this node")
            return
    yield ok(f"{good} images are signed by one of {site.images.signers}")


def check_cache(site: Site) -> Iterator[HealthResult]:
    """Check this node's copies of images: owned by root, complete, and equal to the pool.

    If the pool is available, a bad copy is only reported as a warning: jobs can use the pool.
    """
    if not site.images.cache:
        yield ok("this node has no cache of images ([images] cache is empty)")
        return
    cache, pool = Path(site.images.cache), site.images.pool
    wrong = warning if pool.is_dir() else failure
    if not cache.is_dir():
        yield wrong(f"{cache} does not exist, so images are not cached", _SYNC)
        return
    try:
        found, broken = _split_listing(cache)
    except VtorqueError as error:
        yield failure(
            str(error), f"chown root: and chmod go-w its files; until then jobs do not use {cache}"
        )
        return
    for item in broken:
        yield wrong(f"copy of {item.name} {item.reason}", _SYNC)
    for copy in found if pool.is_dir() else ():
        if not _is_same_in(pool, copy):
            said = f"the copy of {copy.name} differs from the pool: jobs use the pool"
            yield warning(said, _SYNC)
    yield ok(f"{len(found)} complete copies in {cache}")
    yield from _check_readable(found, cache)
    if (free := shutil.disk_usage(cache).free >> 20) < LEAST_FREE:
        yield warning(f"{cache}: {free} MiB free", "free disk space for the next vmgr images sync")


def _is_same_in(pool: Path, copy: Sidecar) -> bool:
    try:
        return describe(pool, copy.name).sha256 == copy.sha256
    except VtorqueError:
        return False


def _check_readable(found: Iterable[Sidecar], pool: Path) -> Iterator[HealthResult]:
    """Check that all users can read images, because QEMU may have another uid for each guest."""
    for sidecar in found:
        for path in (pool / sidecar.name / sidecar.version / file for file in sidecar.files):
            for part in (*reversed(path.parents), path):
                mode = part.stat().st_mode
                if not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
                    said = f"QEMU cannot reach {path}: {part} has mode {stat.filemode(mode)}"
                    yield failure(said, f"chmod o+rX {part}")
                    break
