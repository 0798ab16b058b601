"""Resolve ``-vm img=`` to a digest, and convert the image once into the user's cache.

Runs as the user on the submit host, in ``vsub`` and ``vmgr images pull``.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pwd
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vtorque_core.api import JobRequest, Refused, VtorqueError, printable
from vtorque_core.api.node_job import Site
from vtorque_core.api.vm_options import IMG
from vtorque_linux_guest.image.kernel import architecture
from vtorque_own_images import cache, convert, skopeo, work
from vtorque_own_images.plugin import ROOT, WORK, Settings, is_disk
from vtorque_own_images.reference import Reference, parse
from vtorque_own_images.submitted_disk import examine
from vtorque_own_images.submitted_image import refuse_sudo, require_allowed

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LIMIT = "-o size=", "[plugin.own-images] max_size"  # names of the limit: image builder, here


def resolve_request(request: JobRequest, site: Site, pull: bool) -> dict[str, str]:
    """Return the values of ``img`` and ``work`` to submit; for ``pull`` see :func:`resolve`.

    Raises Refused, HostFault.
    """
    require_allowed(request[IMG], request[ROOT], site)
    if refused := refuse_sudo(request):
        raise Refused(refused)
    directory = work.choose_directory(request[WORK])
    if is_disk(request[IMG]):
        value = examine(request[IMG], site[Settings].max_size).value
    else:
        value = resolve(request[IMG], site, pull)
    return {IMG.key: value, WORK.key: directory}


def resolve(value: str, site: Site, pull: bool) -> str:
    """Return the path of an image's squashfs in the cache. Converts the image if necessary.

    If ``pull`` is False, uses neither the network nor skopeo.

    Raises:
        Refused: the image is invalid, or ``pull`` is False and the cache lacks the image.
        HostFault: a program for the conversion is missing or fails.
    """
    require_allowed(value, "", site)
    images, reference = cache.cache_of(site), parse(value, Path.cwd())
    if not pull:
        found = images.find_by_reference(reference.name)
        if found is None:
            raise Refused(
                "is not in your cache",
                key=IMG.key,
                value=value,
                fix=f"vmgr images pull {value}, or omit --no-pull",
            )
        return _use_image(images, found.digest, reference)
    with _errors(reference, images):
        most = site[Settings].max_size
        digest = _digest(reference, most)
        if images.entry(digest) is None:
            _convert(images, reference, digest, most)
            _prune(images, site)
        return _use_image(images, digest, reference)


@contextmanager
def _errors(reference: Reference, images: cache.Cache) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise skopeo.full_disk_error(images.root) from None
        raise Refused(str(error.strerror), key=IMG.key, value=reference.written) from None


def _prune(images: cache.Cache, site: Site) -> None:
    """Remove unused images from the cache, unless the user has jobs, which may need them."""
    settings = site[Settings]
    if not has_jobs(site):
        for each in images.prune(settings.keep, settings.cache_size << 20):
            name = printable(" ".join(each.references[:1]))
            sys.stderr.write(f"vsub: removed the unused image {name}\n")


def has_jobs(site: Site) -> bool:
    """Return True if the caller has a queued or running job, or if the batch system fails."""
    from vtorque_core.live.service import batch_system  # noqa: PLC0415 - not by every submission

    me = pwd.getpwuid(os.geteuid()).pw_name
    try:
        of_site, batch = batch_system(site.path)
        jobs = [job for job in batch.submitter(of_site).jobs() if job.owner == me]
    except VtorqueError:
        return True
    return not all(job.ended for job in jobs)


def _use_image(images: cache.Cache, digest: str, reference: Reference) -> str:
    images.use(digest, reference.name)
    return str(images.file(digest))


def _digest(reference: Reference, most: int) -> str:
    """Return the hash by which the cache identifies an image.

    For an image in a registry, this is the digest of its manifest. For a file or directory, this is
    a hash of content, path and tag. If the content changes before its conversion, the changed
    content is cached under this hash. It cannot be mistaken for an image of a registry, because a
    hash that includes a path differs from all digests of manifests.
    """
    if reference.digest:
        return reference.digest.removeprefix("sha256:")
    if reference.kind == "docker":
        return skopeo.digest_of(skopeo.manifest(reference, most << 21))
    name = os.fsencode(reference.name)
    if reference.kind == "oci":
        return skopeo.digest_of(skopeo.manifest(reference, most << 21) + name)
    handle = os.open(reference.place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Refused("is not a regular file", key=IMG.key, value=reference.written)
        found = hashlib.file_digest(file, "sha256")
    found.update(name)
    return found.hexdigest()


def _convert(images: cache.Cache, reference: Reference, digest: str, most: int) -> None:
    with images.hold_conversion(digest) as work, _errors(reference, images):
        if images.entry(digest) is not None:  # converted by another command during the wait
            return
        source = Path(reference.place)
        if reference.kind != "sif":
            sys.stderr.write(f"vsub: copying {printable(reference.skopeo_name)}\n")
            source = work / "layout"
            _, arch = architecture()
            skopeo.copy(reference.with_digest(digest), source, arch, most << 21)
        made = work / "image.squashfs"
        try:
            with _progress("vsub: converting it, once") as told:
                convert.convert(source, work, made, most, told)
        except Refused as error:
            why = str(error).removeprefix(f"source {source}: ").replace(*_LIMIT)
            raise Refused(why, key=IMG.key, value=reference.written) from None
        images.keep(digest, reference.name, made)


@contextmanager
def _progress(text: str) -> Iterator[convert.Told]:
    """Yield a function that shows progress: on a terminal a bar. Elsewhere, print one line."""
    if not sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415 - 60 ms, for a terminal only
    from rich.progress import Progress  # noqa: PLC0415 - as above

    with Progress(console=Console(stderr=True)) as bars:
        bar = bars.add_task(text, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
