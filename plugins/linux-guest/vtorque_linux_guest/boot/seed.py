"""The seed: a small read-only disk with the configuration of one guest.

It is an ISO 9660 image labeled ``cidata`` with Joliet and Rock Ridge names, as cloud-init's NoCloud
data source requires (cloud-init docs, "NoCloud"; ECMA-119; IEEE P1282). doc/guests.md describes its
contents.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api import HostFault, closing, name_errors
from vtorque_core.api.acquired import Resource, unjournalled

if TYPE_CHECKING:
    from pycdlib import PyCdlib

    from vtorque_core.api.guest_plan import GuestPlan
    from vtorque_core.api.job_files import File

LABEL = "cidata"
SERIAL = "vtseed"
SEED_NAME = "seed.iso"
_FILE = 0o100600  # mode in the guest, where only root needs to read the files
_DIRECTORY = 0o040700


def iso(files: Mapping[str, bytes]) -> bytes:
    """Return an ISO image. ``files`` maps paths (``vtorque/setup.sh``) to contents.

    Raises HostFault for a path component with more than 64 characters (Joliet).
    """
    from pycdlib import PyCdlib  # noqa: PLC0415 - takes 25 ms, and no epilogue needs it

    image = PyCdlib()
    image.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident=LABEL)
    made: dict[str, str] = {"": ""}
    for number, (path, content) in enumerate(sorted(files.items())):
        folder, _, name = path.rpartition("/")
        if any(len(part) > 64 for part in path.split("/")):
            raise HostFault(f"seed: a name in {path!r} is longer than 64 characters")
        _make_folders(image, folder, made)
        image.add_fp(
            BytesIO(content),
            len(content),
            f"{made[folder]}/F{number:06d}.;1",
            rr_name=name,
            joliet_path=f"/{path}",
            file_mode=_FILE,
        )
    out = BytesIO()
    image.write_fp(out)
    image.close()
    return out.getvalue()


def _make_folders(image: PyCdlib, folder: str, made: dict[str, str]) -> None:
    """Create a directory and its parents. ``made`` maps each path to its ISO 9660 path."""
    if folder in made:
        return
    above, _, name = folder.rpartition("/")
    _make_folders(image, above, made)
    made[folder] = f"{made[above]}/D{len(made):06d}"
    image.add_directory(made[folder], rr_name=name, joliet_path=f"/{folder}", file_mode=_DIRECTORY)


def seed_file(guest: GuestPlan, files: Mapping[str, bytes]) -> File:
    """Return the seed as a resource; see :func:`iso`. Raises HostFault."""
    from vtorque_core.api.job_files import File  # noqa: PLC0415 - as above

    path, content = str(guest.state_dir / SEED_NAME), iso(files)
    return File(path, mode=0o400, uid=guest.qemu_uid, content=content)


@dataclass(frozen=True)
class Seed(Resource):
    """The file on the node with the seed of one guest.

    The seed contains the guest's keys, so only root and ``owner``, the uid of QEMU, can read it.
    The empty file at ``marker`` exists if the guest has a site epilogue.
    """

    kind = "linux-seed"
    volatile = False

    path: str
    owner: int
    marker: str = ""
    content: bytes = unjournalled(b"")

    def create(self) -> None:
        """Write the files. Raises HostFault if the disk is full or the directory is missing."""
        _write(Path(self.path), self.content, 0o400, self.owner)
        if self.marker:
            _write(Path(self.marker), b"", 0o444, os.geteuid())

    def release(self) -> None:
        """Delete the files. Raises HostFault if that fails."""
        for path in filter(None, (self.path, self.marker)):
            with name_errors(path, stage="seed"):
                Path(path).unlink(missing_ok=True)


def _write(path: Path, content: bytes, mode: int, owner: int) -> None:
    """Write a new file. Replace a file left by an interrupted attempt, and follow no link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path.unlink(missing_ok=True)
        with closing(os.open(path, flags, mode)) as descriptor:
            os.fchmod(descriptor, mode)
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fchown(descriptor, owner, -1)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise HostFault(f"{path}: {error.strerror}", stage="seed") from None
