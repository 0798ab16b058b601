"""Find and check images in the pool and in the node's cache. As any user.

Files are compared with the sidecar by size, modification time and inode, because hashing takes too
long.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vtorque_core.api.qcow2 import HEADER, MAGIC, check_qcow2
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.api.vm_options import ARCH, DISTRO, FS_TYPE, IMG, is_own_image
from vtorque_core.base.errors import ConfigError, HostFault, Refused, printable
from vtorque_core.base.safefs import closing, name_errors
from vtorque_core.base.suggest import closest_names
from vtorque_core.base.trust import require_root_owned
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import own_images
from vtorque_core.config.site_config import Site
from vtorque_core.images.sidecar import (
    MAX_SIDECAR,
    NAME,
    SIDECAR,
    FileRecord,
    Sidecar,
    names,
    parse_sidecar,
)


@dataclass(frozen=True)
class ListedImage:
    sidecar: Sidecar
    size: int
    on_disk: int

    @property
    def name(self) -> str:
        return self.sidecar.name


@dataclass(frozen=True)
class BrokenImage:
    name: str
    reason: str


def check_pool(pool: Path) -> None:
    """Raise Refused unless only root or the caller can change the pool and its parents."""
    if not pool.is_absolute():
        raise Refused(f"[images] pool={printable(str(pool))}: must be an absolute path")
    if not pool.is_dir():
        make = "Run this command on a node, or make this host a node: vtorque setup install"
        raise HostFault(f"image pool {pool} does not exist on this host. {make}")
    _check_slowly(pool)


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise Refused(
            "is not the name of an image: use letters, digits and ._+- (no path)",
            key="img",
            value=name,
        )


def lookup(pool: Path, name: str, cache: Path | None = None, signers: Path | None = None) -> Image:
    """Return one image after checking its files.

    ``cache`` is the directory of the node's copies. A copy that is identical to the pool's image is
    preferred. If the pool is missing, any copy is used. One of ``signers`` must have signed the
    image.
    """
    check_name(name)
    if cache is not None and not pool.is_dir() and cache.is_dir():
        pool, cache = cache, None
    check_pool(pool)
    if cache is not None and has_copy(cache, found := read_sidecar(pool, name)):
        pool = cache
    else:
        found = _read_image(pool, name).sidecar
    if signers is not None:
        from vtorque_core.images.signature import signer_of  # noqa: PLC0415 - not by vsub

        signer_of(found, signers)
    return found.image(pool)


def has_copy(cache: Path, wanted: Sidecar) -> bool:
    try:
        check_pool(cache)
        found = _read_image(cache, wanted.name).sidecar
    except (Refused, HostFault):
        return False  # missing, being replaced, or damaged: use the pool
    return (found.version, found.sha256) == (wanted.version, wanted.sha256)


def listing(pool: Path) -> list[ListedImage | BrokenImage]:
    check_pool(pool)
    found: list[ListedImage | BrokenImage] = []
    for name in names(pool):
        try:
            found.append(_read_image(pool, name))
        except Refused as error:
            found.append(BrokenImage(name, str(error)))
    return found


def select(
    pool: Path,
    name: str | None,
    distro: str | None,
    arch: str | None,
    cache: Path | None = None,
    signers: Path | None = None,
) -> Image:
    """Return the image with this name; without a name, the only image of ``distro`` and ``arch``.

    ``distro`` may be a family (``redhat`` for Rocky Linux).
    """
    if name:
        image = lookup(pool, name, cache, signers)
        for key, wanted, has in (("distro", distro, _distros(image)), ("arch", arch, [image.arch])):
            if wanted and wanted.lower() not in has:
                message = f"does not fit img={name}, whose {key} is {' or '.join(has)}"
                raise Refused(message, key=key, value=wanted)
        return image
    if cache is not None and not pool.is_dir() and cache.is_dir():
        pool, cache = cache, None
    usable = [item.sidecar.image(pool) for item in listing(pool) if isinstance(item, ListedImage)]
    fit = [
        image
        for image in usable
        if (not distro or distro.lower() in _distros(image)) and arch in (None, "", image.arch)
    ]
    if len(fit) == 1:
        return lookup(pool, fit[0].name, cache, signers)
    asked = " ".join(f"{k}={printable(v)}" for k, v in (("distro", distro), ("arch", arch)) if v)
    found = ", ".join(i.name for i in fit or usable) or "none"
    if not fit:
        raise Refused(f"the image pool has no {asked or 'usable'} image (available: {found})")
    raise Refused(f"several images fit {asked or 'the job'}: choose one with img= ({found})")


def _distros(image: Image) -> list[str]:
    names = (image.distro, image.labels.get("family", ""))
    return list(dict.fromkeys(name.lower() for name in names if name))


def describe(pool: Path, name: str) -> Sidecar:
    check_name(name)
    check_pool(pool)
    return read_sidecar(pool, name)


def read_sidecar(pool: Path, name: str) -> Sidecar:
    path = f"{pool}/{name}/{SIDECAR}"
    try:
        if stat.S_ISLNK(_own_status(f"{pool}/{name}").st_mode):
            raise invalid(
                name, f"{pool}/{name} is a symbolic link: it must be a directory of the pool"
            )
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise unknown_image(pool, name) from None
    except OSError as error:
        raise invalid(name, f"{SIDECAR}: {error.strerror}") from None
    with closing(descriptor):
        status = os.fstat(descriptor)
        if not _is_own(status):
            _check_slowly(Path(path))
        text = os.read(descriptor, MAX_SIDECAR + 1) if stat.S_ISREG(status.st_mode) else b""
    try:
        if len(text) > MAX_SIDECAR:
            raise ValueError(f"is longer than {MAX_SIDECAR} bytes")
        return parse_sidecar(text, name)
    except ValueError as error:
        raise invalid(name, f"{SIDECAR} {error}") from None


def _read_image(pool: Path, name: str) -> ListedImage:
    sidecar = read_sidecar(pool, name)
    directory = f"{pool}/{name}/{sidecar.version}"
    size = blocks = 0
    _component_status(directory, name)
    for file, record in sidecar.files.items():
        status = file_status(f"{directory}/{file}", name)
        if FileRecord.from_status(record.sha256, status) != record:
            raise invalid(
                name,
                f"{file} is not the file that was hashed (size, time or inode differ): "
                f"run vmgr images verify {name} as root",
            )
        size += status.st_size
        blocks += status.st_blocks
    return ListedImage(sidecar, size, blocks * 512)


def file_status(path: str, name: str) -> os.stat_result:
    status = _component_status(path, name)
    if not stat.S_ISREG(status.st_mode):
        raise invalid(name, f"{path.rpartition('/')[2]} is not a regular file")
    return status


def _component_status(path: str, name: str) -> os.stat_result:
    with name_errors(path, fault=partial(invalid, name)):
        return _own_status(path)


def _own_status(path: str) -> os.stat_result:
    status = os.lstat(path)
    if not _is_own(status):
        _check_slowly(Path(path))
    return status


def _is_own(status: os.stat_result) -> bool:
    return not status.st_mode & 0o022 and status.st_uid in (0, os.geteuid())


def _check_slowly(path: Path) -> None:
    try:
        require_root_owned(path, uid=os.geteuid())
    except ConfigError as error:
        raise Refused(f"image pool: {error}") from None


def unknown_image(pool: Path, name: str) -> Refused:
    known = names(pool)
    close = closest_names(name, known, 3) or known[:10]
    hint = f"did you mean {', '.join(close)}?" if close else "build one with vmgr images build"
    return Refused(f"no such image in {pool}", key="img", value=name, fix=hint)


def invalid(name: str, reason: str) -> Refused:
    return Refused(f"the image is broken: {printable(reason)}", key="img", value=name)


def ramdisk_mib(request: JobRequest, image: Image) -> int:
    """Return the largest size in MiB of the overlay that a RAM disk holds; 0 without RAM disk.

    The overlay can contain the whole disk. Its tables need 10 bytes for each cluster of 64 KiB, and
    less than 2 MiB in addition (QEMU, docs/interop/qcow2.txt).
    """
    if image.disk is None or request[FS_TYPE] != "ramdisk":
        return 0
    with image.disk.open("rb") as file:
        header = file.read(HEADER)
    size = image.disk.stat().st_size
    if header.startswith(MAGIC):
        try:
            size = check_qcow2(header, size)
        except Refused as error:
            raise Refused(f"image {image.name} {error}") from None
    mib = -(-size // (1 << 20))
    return mib + mib // 4096 + 2


def select_image(
    request: JobRequest,
    site: Site,
    plugins: Plugins,
    cache: Path | None = None,
    signers: Path | None = None,
) -> Image:
    """Return the image that a job requests. ``cache`` and ``signers``: see :func:`lookup`."""

    def named(name: str, distro: str | None = None, arch: str | None = None) -> Image:
        return select(site.images.pool, name, distro, arch, cache, signers)

    if not is_own_image(request[IMG]):
        return named(request[IMG], request[DISTRO], request[ARCH])
    for option in (DISTRO, ARCH):
        if request[option]:
            raise Refused("does not apply to your own image", key=option.key, value=request[option])
    return own_images(request[IMG], plugins).image(request, site, named)
