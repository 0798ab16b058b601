"""The cache of a user's converted images. An image has a squashfs and a JSON file.

The directory belongs to the user, and only the user's processes access it. A killed conversion
leaves only a directory ``.work-*``, from which the next conversion continues.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import Busy, HostFault, Refused, replace_file, take_lock
from vtorque_core.api.node_job import Site
from vtorque_own_images.plugin import Settings
from vtorque_own_images.submitted_image import SUFFIX

FORMAT = 1
"""Version of the conversion. Images of another version are converted again."""
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_WORK = ".work-"
_NOTICE = "vsub: another command converts this image: waiting for it\n"
_WAIT_FOR_RECORD = 60.0  # seconds to wait for another submission that writes its record
_WAIT = 24 * 3600.0  # seconds to wait for another submission that converts the same image
_KEEP_WORK = 24 * 3600.0  # seconds after which an interrupted conversion is removed
_MAX_FACTS = 65536  # bytes


@dataclass(frozen=True)
class CacheEntry:
    """A converted image in the cache.

    Attributes:
        digest: SHA-256 of the manifest, or of a local image's content, path and tag; hexadecimal.
        references: names by which the user pulled the image, last used first.
        size: size of the squashfs in bytes.
        used: Unix time of the last submission.
    """

    digest: str
    references: tuple[str, ...]
    size: int
    used: float

    @property
    def name(self) -> str:
        """The name in logs and listings."""
        return f"own:{self.digest[:12]}"

    def table_row(self) -> dict[str, str | int]:
        """Return the row of ``vmgr images list --mine``."""
        used = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.used))
        reference = " ".join(self.references)
        return {"name": self.name, "reference": reference, "size": self.size, "used": used}


@dataclass(frozen=True)
class Cache:
    """The images of one user."""

    root: Path

    def file(self, digest: str) -> Path:
        """Return the path of an image's squashfs, which need not exist."""
        return self.root / f"{digest}{SUFFIX}"

    def entries(self) -> list[CacheEntry]:
        """Return the finished images, most recently used first."""
        found = [self.entry(path.name.removesuffix(SUFFIX)) for path in self.root.glob("*")]
        return sorted((each for each in found if each), key=lambda each: -each.used)

    def entry(self, digest: str) -> CacheEntry | None:
        """Return a finished image of the current :data:`FORMAT`, or None."""
        if not _HEX.fullmatch(digest):
            return None
        try:
            status = self.file(digest).lstat()
            with self._facts(digest).open("rb") as file:
                used = os.fstat(file.fileno()).st_mtime
                facts = json.loads(file.read(_MAX_FACTS))
            if facts["format"] != FORMAT or not stat.S_ISREG(status.st_mode):
                return None
            references = tuple(str(each) for each in facts["references"])
            return CacheEntry(digest, references, status.st_size, used)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def find_by_reference(self, name: str) -> CacheEntry | None:
        """Return the last used image with this reference, or None."""
        return next((each for each in self.entries() if name in each.references), None)

    def use(self, digest: str, reference: str) -> None:
        """Record that a submission uses an image under this reference. Raises HostFault."""
        with self._hold_lock("references", _WAIT_FOR_RECORD):
            found = self.entry(digest)
            known = found.references if found else ()
            references = [reference, *(r for r in known if r != reference)]
            facts = json.dumps({"format": FORMAT, "references": references})
            replace_file(str(self._facts(digest)), facts.encode(), mode=0o600)

    @contextmanager
    def hold_conversion(self, digest: str) -> Iterator[Path]:
        """Hold the lock of an image's digest, and yield a directory for converting the image.

        The directory stays after an exception other than Refused: the next pull of the digest
        continues with the layers that are complete.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.check_owner()  # another user may just have created it
        self._sweep()
        with self._hold_lock(digest, _WAIT, _NOTICE):
            work = self.root / f"{_WORK}{digest}"
            work.mkdir(mode=0o700, exist_ok=True)
            try:
                yield work
            except Refused:
                shutil.rmtree(work, ignore_errors=True)
                raise
            shutil.rmtree(work, ignore_errors=True)

    @contextmanager
    def _hold_lock(self, name: str, wait: float, notice: str = "") -> Iterator[None]:
        path = self.root / f".lock-{name}"
        try:
            lock = take_lock(path, 0.0)
        except Busy:
            if not wait:
                raise
            sys.stderr.write(notice)
            lock = take_lock(path, wait)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(lock)

    def keep(self, digest: str, reference: str, made: Path) -> None:
        """Move a finished squashfs into the cache."""
        with made.open("rb") as file:
            os.fsync(file.fileno())
        self.use(digest, reference)
        made.rename(self.file(digest))

    def prune(self, keep: float, most: int) -> list[CacheEntry]:
        """Remove old images and images over the size limit; return the removed images.

        Args:
            keep: seconds since the last submission after which an image is removed.
            most: maximum bytes of all images; 0 means no limit. The least recently used images are
                removed first. The most recently used image stays.
        """
        removed, total = [], 0
        for number, each in enumerate(self.entries()):
            total += each.size
            too_many = 0 < most < total and number > 0
            if (too_many or time.time() - each.used > keep) and self.remove(each.digest):
                removed.append(each)
                total -= each.size
        return removed

    def remove(self, name: str) -> bool:
        """Remove an image by name, digest or reference; return False if the image is not found."""
        for each in self.entries():
            if name in (each.name, each.digest, f"sha256:{each.digest}", *each.references):
                self.file(each.digest).unlink(missing_ok=True)
                self._facts(each.digest).unlink(missing_ok=True)
                return True
        return False

    def check_owner(self) -> None:
        """Raise Refused if other users can change the cache, or replace it by another directory.

        Raises FileNotFoundError if the cache does not exist.
        """
        status = self.root.stat()
        owners = {status.st_uid, self.root.lstat().st_uid}
        if owners != {os.geteuid()} or status.st_mode & 0o022:
            fix = f"chmod go-w {self.root}, or set XDG_CACHE_HOME to a directory of your own"
            raise Refused(f"your image cache {self.root}: other users can change it", fix=fix)

    def _facts(self, digest: str) -> Path:
        return self.root / f"{digest}.json"

    def _sweep(self) -> None:
        """Remove the directories of conversions that were interrupted a day ago or earlier."""
        for left in self.root.glob(f"{_WORK}*"):
            with suppress(OSError, Busy):
                if left.stat().st_mtime < time.time() - _KEEP_WORK:
                    with self._hold_lock(left.name.removeprefix(_WORK), 0.0):
                        shutil.rmtree(left, ignore_errors=True)


def cache_of(site: Site) -> Cache:
    """Return the caller's cache, whose directory may not exist yet. Raises HostFault, Refused."""
    found = Cache(_place(site))
    try:
        found.check_owner()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HostFault(f"your image cache {found.root}: {error.strerror}") from None
    return found


def list_images(site: Site) -> list[dict[str, str | int]]:
    """Return the caller's images, for ``vmgr images list --mine``. Raises HostFault, Refused."""
    return [entry.table_row() for entry in cache_of(site).entries()]


def remove_image(site: Site, name: str) -> bool:
    """Remove an image of the caller. Returns False if it does not exist."""
    return cache_of(site).remove(name)


def _place(site: Site) -> Path:
    if own := site[Settings].cache:
        return Path(own) / str(os.geteuid())
    given = os.environ.get("XDG_CACHE_HOME", "")
    top = Path(given) if given.startswith("/") else Path.home() / ".cache"
    return top / "vtorque" / "images"
