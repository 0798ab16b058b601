"""Check a builder's files before they enter the pool. Privileges: root."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from vtorque_core.api import Refused, name_errors
from vtorque_core.api.confined_tool import path_of, run
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.api.qcow2 import HEADER, MAGIC, check_qcow2
from vtorque_core.live.images import check_facts, file_names

Hashed = Callable[[int, int], None]
"""Callback for progress, with the bytes hashed so far and the total bytes."""

_BLOCK = 1 << 20  # bytes read at a time
_TOLD = 64 << 20  # bytes between two progress reports


def check_built(staging: Path, built: BuiltImage) -> None:
    """Check that an image's files exist and match the builder's description.

    Raises Refused with the file and the problem.
    """
    try:
        check_facts(built)
    except ValueError as error:
        raise Refused(f"the built image {error}") from None
    for file in file_names(built):
        _check_plain(staging / file)
    if built.disk is not None:
        (staging / built.disk).chmod(0o644)  # the final mode; the tool runs as nobody
        check_disk(staging / built.disk, built.disk_format)


def _check_plain(path: Path) -> None:
    with name_errors(f"the builder did not write {path.name}", fault=Refused):
        status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise Refused(f"{path.name} is not a regular file, or has other hard links")
    if status.st_size == 0:
        raise Refused(f"{path.name} is empty")


def check_disk(path: Path, declared: str) -> None:
    """Check that a disk has the declared format and refers to no other file.

    With a backing or data file, an image could make QEMU read any file of the node. A qcow2's
    header is checked before qemu-img runs, because qemu-img opens the data file that the
    header names (CVE-2024-4467).

    Raises Refused; HostFault if qemu-img is missing or fails.
    """
    with path.open("rb") as file:
        header = file.read(HEADER)
        try:
            if header.startswith(MAGIC):
                check_qcow2(header, path.stat().st_size)
            # Not as root, even if root made the disk: a faulty tool may have written the disk.
            argv = ("qemu-img", "info", "--output=json", path_of(file.fileno()))
            info = json.loads(run(*argv, files=(file.fileno(),), most=0))
        except Refused as error:
            raise Refused(f"{path.name} {error}") from None
    if info.get("format") != declared:
        raise Refused(f"{path.name} has the format {info.get('format')}, not {declared}")
    specific = info.get("format-specific", {}).get("data", {})
    referred = [info.get("backing-filename"), info.get("full-backing-filename")]
    referred.append(specific.get("data-file"))
    if any(name is not None for name in referred):
        raise Refused(
            f"{path.name} refers to another file; convert it to a single file: qemu-img convert"
        )
    if info.get("encrypted"):
        raise Refused(f"{path.name} is encrypted")


def file_hashes(directory: Path, files: Iterable[str], told: Hashed) -> dict[str, str]:
    """Return the SHA-256 of files in a directory, by name."""
    sizes = {file: (directory / file).stat().st_size for file in files}
    done, digests = 0, {}
    for file, size in sizes.items():
        so_far = functools.partial(_report_hashed, told, done, sum(sizes.values()))
        digests[file] = file_sha256(directory / file, so_far)
        done += size
    return digests


def _report_hashed(told: Hashed, before: int, total: int, count: int) -> None:
    told(before + count, total)


def file_sha256(path: Path, told: Callable[[int], None] = lambda _done: None) -> str:
    """Return the SHA-256 of a file. Raises HostFault if it is unreadable or a symbolic link.

    ``told`` is called repeatedly with the number of bytes hashed so far.
    """
    digest, done, since = hashlib.sha256(), 0, 0
    block = memoryview(bytearray(_BLOCK))
    with name_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
                done += count
                if done - since >= _TOLD:
                    since = done
                    told(done)
            return digest.hexdigest()
