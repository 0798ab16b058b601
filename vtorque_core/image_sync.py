"""Fill a node's own cache of images, as root: from the pool that it sees, or pushed to it.

A copy grows in ``<cache>/.partial/<name>/<version>/`` and stays there when it is interrupted: the
next time it goes on where it was. Only what has the hash that the pool's sidecar says becomes an
image of the cache, by the same rename as in a pool.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core import images
from vtorque_core.api_node import run_tool
from vtorque_core.errors import HostFault, Refused
from vtorque_core.image_add import Progress
from vtorque_core.image_pool import bad
from vtorque_core.image_sidecar import SIDECAR, Sidecar, names
from vtorque_core.image_store import free_bytes
from vtorque_core.image_tool import extents
from vtorque_core.locks import take
from vtorque_core.names import Paths

PARTIAL = ".partial"
_BLOCK = 4 << 20  # bytes; a copy that is resumed goes back to a multiple of it
_PUSH_TIME = 86400.0  # seconds for one node


@dataclass(frozen=True)
class Synced:
    """What a synchronisation did: names copied, there already, removed."""

    copied: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def pull(
    pool: Path, cache: Path, wanted: Sequence[str], progress: Progress, paths: Paths
) -> Synced:
    """Copy images from the pool into the cache.

    Args:
        pool: as this node sees it.
        cache: made if it is missing.
        wanted: names; none: all, and what the pool does not have any more goes when it is free.
        progress: is told.
        paths: this node's.

    Raises Refused: no such image, a copy that is not what the pool says; HostFault: no room, or
    another synchronisation is at work.
    """
    images.check_pool(pool)
    with _cache(cache, paths):
        sidecars = [images.describe(pool, name) for name in wanted or names(pool)]
        new = [s for s in sidecars if not _has(cache, s)]
        for sidecar in sidecars:
            if sidecar not in new:
                images.adopt(cache, sidecar)
        _check_room(pool, cache, new)
        for sidecar in new:
            progress.step(f"copying {sidecar.name}")
            _copy(pool, cache, sidecar, progress)
            _commit(cache, sidecar, progress, paths)
        gone = [] if wanted else sorted({*names(cache)} - {s.name for s in sidecars})
        for name in gone:
            images.remove(cache, name, paths=paths, when_free=True)
        for part in (cache / PARTIAL).iterdir():  # all is copied: these are of older versions
            if not wanted or part.name in wanted:
                shutil.rmtree(part, ignore_errors=True)
        copied = tuple(s.name for s in new)
        same = tuple(s.name for s in sidecars if s not in new)
        return Synced(copied, same, tuple(gone))


def receive(cache: Path, wanted: Sequence[str], progress: Progress, paths: Paths) -> Synced:
    """Take what :func:`push` has left in the cache's partial directory. On the node."""
    with _cache(cache, paths):
        copied, same = [], []
        for name in wanted:
            sidecar = images.describe(cache / PARTIAL, name)
            if _has(cache, sidecar):
                images.adopt(cache, sidecar)
                same.append(name)
            else:
                _commit(cache, sidecar, progress, paths)
                copied.append(name)
            shutil.rmtree(cache / PARTIAL / name, ignore_errors=True)
        return Synced(tuple(copied), tuple(same))


def push(pool: Path, cache: Path, wanted: Sequence[str], node: str, ssh: str = "ssh") -> None:
    """Send images to a node that does not see the pool, with rsync(1), resumable. On one host.

    ``receive`` must follow there. Raises Refused, HostFault with rsync's words.
    """
    parts = []
    for name in wanted or names(pool):
        sidecar = images.describe(pool, name)
        files = (SIDECAR, *(f"{sidecar.version}/{file}" for file in sidecar.files))
        parts += [f"{pool}/./{name}/{file}" for file in files]
    target = f"{cache}/{PARTIAL}"
    quoted = "'" + target.replace("'", "'\\''") + "'"
    run_tool(
        *("rsync", "--relative", "--times", "--perms", "--partial", "--inplace", "--sparse"),
        *("--protect-args", f"--rsync-path=mkdir -p {quoted} && rsync"),
        *("-e", f"{ssh} -o BatchMode=yes", "--", *parts, f"{node}:{target}/"),
        timeout=_PUSH_TIME,
    )


@contextlib.contextmanager
def _cache(cache: Path, paths: Paths) -> Iterator[None]:
    """Make the cache if needed, and be the only one who fills it."""
    try:
        cache.mkdir(mode=0o755, parents=True, exist_ok=True)
        images.check_pool(cache)
        (cache / PARTIAL).mkdir(mode=0o755, exist_ok=True)
        lock = take(paths.run / "image-sync.lock", 0)
        try:
            images.sweep(cache, paths)
            yield
        finally:
            os.close(lock)
    except OSError as error:
        raise HostFault(f"{cache}: {error.strerror}") from None


def _has(cache: Path, wanted: Sidecar) -> bool:
    try:
        images.lookup(cache, wanted.name)
        return images.describe(cache, wanted.name).version == wanted.version
    except Refused:
        return False


def _check_room(pool: Path, cache: Path, new: Sequence[Sidecar]) -> None:
    needed = 0
    for sidecar in new:
        for file in sidecar.files:
            needed += (pool / sidecar.name / sidecar.version / file).stat().st_blocks * 512
            part = _partial(cache, sidecar) / file
            needed -= part.stat().st_blocks * 512 if part.exists() else 0
    if needed > (free := free_bytes(cache)):
        raise HostFault(f"{cache} has {free >> 20} MiB left; {needed >> 20} MiB are needed")


def _partial(cache: Path, sidecar: Sidecar) -> Path:
    return cache / PARTIAL / sidecar.name / sidecar.version


def _copy(pool: Path, cache: Path, sidecar: Sidecar, progress: Progress) -> None:
    target = _partial(cache, sidecar)
    target.mkdir(mode=0o755, parents=True, exist_ok=True)
    _unprepare(target)
    total = sum(record.size for record in sidecar.files.values())
    before = 0
    for file, record in sidecar.files.items():
        status = images.file_status(f"{pool}/{sidecar.name}/{sidecar.version}/{file}", sidecar.name)
        if status.st_size != record.size:
            raise bad(sidecar.name, f"{file} has {status.st_size} bytes, not {record.size}")
        for done in _grow(pool / sidecar.name / sidecar.version / file, target / file, record.size):
            progress.told(before + done, total)
        before += record.size


def _grow(source: Path, target: Path, size: int) -> Iterator[int]:
    """Copy on from where the target ends; yield how far it is. Holes stay holes."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    writing = os.open(target, flags, 0o644)
    try:
        # What a crash of the host has left at the end may be zeros that were never written.
        at = min(os.fstat(writing).st_size, size) // _BLOCK * _BLOCK
        os.ftruncate(writing, at)
        for start, end in extents(reading, size):
            here = max(start, at)
            while here < end:
                data = os.pread(reading, min(_BLOCK, end - here), here)
                if not data:
                    raise HostFault(f"{source} has become shorter")
                os.pwrite(writing, data, here)
                here += len(data)
                yield here
        os.ftruncate(writing, size)
    finally:
        os.close(reading)
        os.close(writing)


def _commit(cache: Path, sidecar: Sidecar, progress: Progress, paths: Paths) -> None:
    """Make a whole copy an image of the cache; one with another hash is thrown away."""
    progress.step(f"hashing {sidecar.name}")
    source = _partial(cache, sidecar)
    _unprepare(source)
    try:
        images.commit(
            cache,
            sidecar.name,
            source,
            sidecar.built,
            sidecar.builder,
            paths=paths,
            told=progress.told,
            expect=sidecar.version,
            sign=lambda _new: sidecar.signature,
        )
    except Refused:
        shutil.rmtree(source, ignore_errors=True)
        raise
    shutil.rmtree(source.parent, ignore_errors=True)


def _unprepare(part: Path) -> None:
    """Take back what a commit that was killed had begun: its files, moved one directory down."""
    for inside in (part / part.name).glob("*"):
        inside.rename(part / inside.name)
    with contextlib.suppress(FileNotFoundError):
        (part / part.name).rmdir()
