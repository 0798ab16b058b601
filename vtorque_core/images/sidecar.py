"""Sidecar of an image: JSON that describes the image, with the hashes of its files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.api.values import Image
from vtorque_core.config.values import convert

SCHEMA = 1
SIDECAR = "image.json"
MAX_SIDECAR = 65536  # bytes
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", re.ASCII)
VERSION = re.compile(r"v[0-9a-f]{1,32}", re.ASCII)
FILE_NAME = _WORD = NAME  # the same characters
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
MAX_CMDLINE = 2047  # COMMAND_LINE_SIZE of x86 less its NUL: arch/x86/include/asm/setup.h of Linux
MAX_LABELS = 64
FIRMWARE = "firmware"  # label: how a disk is booted, bios or efi
MAX_SIGNATURE = 8192  # bytes; one by a 4096-bit RSA key has 1,700
_ROLES = ("disk", "kernel", "initrd")  # of files
DISK_FORMATS = ("raw", "qcow2")


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes, modification time in ns and inode number when it was hashed."""

    sha256: str
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def from_status(cls, sha256: str, status: os.stat_result) -> FileRecord:
        return cls(sha256, status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True)
class Sidecar:
    """Contents of a sidecar. ``version`` is the name of the directory with the files.

    ``created`` and ``verified`` are the times of the build and of the last check of the hashes, UTC
    in ISO 8601.
    """

    name: str
    built: BuiltImage
    version: str
    builder: str
    created: str
    files: Mapping[str, FileRecord]
    verified: str = ""
    signature: str = ""

    @property
    def sha256(self) -> str:
        roles = {role: getattr(self.built, role) for role in _ROLES}
        lines = [f"{role} {self.files[f].sha256}\n" for role, f in sorted(roles.items()) if f]
        return _sha256(lines)

    def image(self, pool: Path) -> Image:
        directory, facts = pool / self.name / self.version, vars(self.built)
        paths = {role: directory / facts[role] for role in _ROLES if facts[role]}
        return Image(name=self.name, sha256=self.sha256, **{**facts, **paths})

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "name": self.name, "version": self.version, "builder": self.builder,
            "created": self.created, "verified": self.verified or self.created,
            "sha256": self.sha256, **vars(self.built),
            "labels": dict(sorted(self.built.labels.items())),
            "files": {name: vars(record) for name, record in sorted(self.files.items())},
            "signature": self.signature,
        }  # fmt: skip


def parse_sidecar(text: bytes, name: str) -> Sidecar:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"has a schema other than {SCHEMA}")
    if data.get("name") != name:
        raise ValueError(f"describes an image with another name than {name}")
    given = {field.name: data[field.name] for field in fields(Sidecar) if field.name in data}
    facts = {field.name: data.get(field.name) for field in fields(BuiltImage)}
    sidecar: Sidecar = convert(Sidecar, {**given, "built": facts})
    check_facts(sidecar.built)
    if not VERSION.fullmatch(sidecar.version):
        raise ValueError("has a bad version")
    if sidecar.files.keys() != set(file_names(sidecar.built)):
        raise ValueError("does not list exactly the files that the image has")
    if not all(_SHA256.fullmatch(record.sha256) for record in sidecar.files.values()):
        raise ValueError("has a bad sha256")
    if len(sidecar.signature) > MAX_SIGNATURE or not sidecar.signature.isascii():
        raise ValueError(f"has a signature that has over {MAX_SIGNATURE} bytes or is not ASCII")
    if data.get("sha256") != sidecar.sha256:
        raise ValueError("has a sha256 that does not match the hashes of its files")
    return sidecar


def names(pool: Path) -> list[str]:
    with os.scandir(pool) as entries:
        found = [entry.name for entry in entries if NAME.fullmatch(entry.name)]
    return sorted(name for name in found if os.path.lexists(f"{pool}/{name}/{SIDECAR}"))


def _sha256(lines: Iterable[str]) -> str:
    import hashlib  # noqa: PLC0415 - it loads OpenSSL, and a submission may see no image

    return hashlib.sha256("".join(lines).encode()).hexdigest()


def version_of(built: BuiltImage, sha256: Mapping[str, str]) -> str:
    lines = [f"{file} {sha256[file]}\n" for file in sorted(file_names(built))]
    return "v" + _sha256(lines)[:32]


def file_names(built: BuiltImage) -> list[str]:
    return [f for f in (built.disk, built.kernel, built.initrd) if f is not None]


def check_facts(built: BuiltImage) -> None:
    for key in ("guest_type", "distro", "arch"):
        if not _WORD.fullmatch(getattr(built, key)):
            raise ValueError(f"has an invalid {key}: use letters, digits and ._+-")
    if not 1 <= built.min_ram_mib <= 1 << 40:
        raise ValueError(f"has min_ram_mib={built.min_ram_mib}: it must be 1 to {1 << 40}")
    if built.disk_format not in DISK_FORMATS:
        raise ValueError(f"has a disk_format other than {' and '.join(DISK_FORMATS)}")
    if built.disk is None and built.kernel is None:
        raise ValueError("has neither a disk nor a kernel")
    if built.initrd is not None and built.kernel is None:
        raise ValueError("has an initrd without a kernel")
    names = file_names(built)
    if len(set(names)) < len(names) or not all(FILE_NAME.fullmatch(n) for n in names):
        raise ValueError("has an invalid or a repeated file name")
    if len(built.cmdline) > MAX_CMDLINE or not (built.cmdline + " ").isprintable():
        raise ValueError(f"has a cmdline that is unprintable or has over {MAX_CMDLINE} characters")
    _check_labels(built.labels)


def _check_labels(labels: Mapping[Any, Any]) -> None:
    texts = [*labels, *labels.values()]
    if len(labels) > MAX_LABELS or not all(
        isinstance(t, str) and t.isprintable() and len(t) <= 255 for t in texts
    ):
        raise ValueError(f"has over {MAX_LABELS} labels, or one that is too long or unprintable")
    if labels.get(FIRMWARE, "bios") not in ("bios", "efi"):
        raise ValueError(f"has the label {FIRMWARE}={labels[FIRMWARE]}: write bios or efi")


def boots_by_uefi(image: Image | BuiltImage) -> bool:
    boots = image.arch == "x86_64" and image.kernel is None
    return boots and image.labels.get(FIRMWARE) == "efi"
