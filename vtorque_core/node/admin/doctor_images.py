"""What ``vtorque doctor`` says of the image pool and of this node's copies of images."""

from __future__ import annotations

import pwd
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from vtorque_core import image_signature, image_store, images
from vtorque_core.api import Image
from vtorque_core.api_node import HealthResult
from vtorque_core.config import Site
from vtorque_core.errors import HostFault, Refused, VtorqueError

LEAST_FREE = 1024  # MiB of a disk that vTorque writes to


def _ok(message: str) -> HealthResult:
    return HealthResult("ok", message)


def _failed(message: str, fix: str) -> HealthResult:
    return HealthResult("failed", message, fix)


def _warning(message: str, fix: str) -> HealthResult:
    return HealthResult("warning", message, fix)


def check_pool(site: Site) -> Iterator[HealthResult]:
    """Check the image pool: root's alone to write, readable and traversable for QEMU."""
    pool, cache = site.images.pool, site.images.cache
    if cache and not pool.is_dir() and Path(cache).is_dir():
        yield _ok(f"there is no {pool} here: all images are in the cache {cache}")
        return
    try:
        scanned = images.scan(pool)
    except VtorqueError as error:
        yield _failed(str(error), "chown -R root: and chmod -R go-w the pool")
        return
    for broken in scanned:
        if isinstance(broken, images.Broken):
            yield _failed(f"image {broken.name} {broken.reason}", "build or remove it")
    found = [image for image in scanned if not isinstance(image, images.Broken)]
    if not found:
        yield _warning(f"no image in {pool}", "vmgr images build micro micro")
        return
    yield _ok(f"{len(found)} images in {pool}")
    yield from _check_readable(found, site)
    if site.images.signers:
        yield from _check_signed(found, site)


def _check_signed(found: Iterable[Image], site: Site) -> Iterator[HealthResult]:
    """Check that who may sign images is said, and tell which are not signed by them."""
    accept = image_signature.acceptor(site.images.signers)
    good = 0
    for image in found:
        try:
            accept(images.describe(site.images.pool, image.name))
            good += 1
        except Refused as error:
            yield _warning(str(error), f"vmgr images sign {image.name} --key FILE, or remove it")
        except HostFault as error:
            yield _failed(str(error), "until then no job gets a guest on this node")
            return
    yield _ok(f"{good} images are signed by one of {site.images.signers}")


def check_cache(site: Site) -> Iterator[HealthResult]:
    """Check this node's own copies of images: they are root's, whole, and what the pool has.

    What is wrong with a copy costs jobs no more than time as long as there is the pool.
    """
    if not site.images.cache:
        yield _ok("this node keeps no copies of images ([images] cache)")
        return
    cache, pool = Path(site.images.cache), site.images.pool
    wrong = _warning if pool.is_dir() else _failed
    if not cache.is_dir():
        yield wrong(f"{cache} does not exist: no copies of images", "vmgr images sync")
        return
    try:
        scanned = images.scan(cache)
    except VtorqueError as error:
        yield _failed(
            str(error), f"chown root: and chmod go-w what it names; jobs do not use {cache}"
        )
        return
    found = [image for image in scanned if not isinstance(image, images.Broken)]
    for broken in scanned:
        if isinstance(broken, images.Broken):
            fix = f"vmgr images sync {broken.name}, or send it again from where the pool is"
            yield wrong(f"copy of {broken.name} {broken.reason}", fix)
    if pool.is_dir():
        for image in found:
            if not _same_in(pool, image):
                yield _warning(
                    f"copy of {image.name} is not what the pool has: jobs read the pool",
                    "vmgr images sync",
                )
    yield _ok(f"{len(found)} whole copies in {cache}")
    yield from _check_readable(found, site)
    if (free := image_store.free_bytes(cache) >> 20) < LEAST_FREE:
        yield _warning(f"{cache}: {free} MiB free", "make room for the next vmgr images sync")


def _same_in(pool: Path, image: Image) -> bool:
    try:
        return images.describe(pool, image.name).sha256 == image.sha256
    except VtorqueError:
        return False


def _check_readable(found: Iterable[Image], site: Site) -> Iterator[HealthResult]:
    try:
        qemu = pwd.getpwnam(site.node.qemu_user)
    except KeyError:
        yield _failed(f"QEMU's user {site.node.qemu_user} is unknown", "mend [node] qemu_user")
        return
    for image in found:
        for path in (image.disk, image.kernel, image.initrd):
            blocked = None if path is None else _unreadable_for(path, qemu)
            if blocked:
                yield _failed(
                    f"{site.node.qemu_user} cannot reach {path}: {blocked} has mode "
                    f"{stat.filemode(Path(blocked).stat().st_mode)}",
                    f"chmod o+rX {blocked}",
                )


def _unreadable_for(path: Path, user: pwd.struct_passwd) -> Path | None:
    for part in (*reversed(path.parents), path):
        status = part.stat()
        need = stat.S_IXOTH if stat.S_ISDIR(status.st_mode) else stat.S_IROTH
        mine = status.st_uid == user.pw_uid
        if not mine and not status.st_mode & need:
            return part
    return None
