"""OCI image layouts and what ``podman save`` and ``docker save`` write, as directory or tar file.

OCI image-spec 1.1: image-layout.md, manifest.md. A tar file is read where it is: nothing is
unpacked by the names that it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vtorque_core.api import Refused
from vtorque_linux_guest.image.tar_reader import Budget, Member, members
from vtorque_oci.blobs import TIMEOUT, copy, digest_of, opened, unpacked
from vtorque_oci.container import (
    ARCHITECTURES,
    MAX_JSON,
    MAX_LAYERS,
    Container,
    of_config,
    parse_json,
)

_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_TITLE = "org.opencontainers.image.ref.name"
_ARCHIVE = 10_000, 4 << 20  # files, and bytes of their long names: root reads a tar file's list
_MAX_DEPTH = 4  # an index may list indexes


class Files(Protocol):
    """Where an image's files are."""

    def part(self, path: str) -> tuple[int, int, int] | None:
        """Return descriptor, offset and size of a file, or None if there is none."""


@dataclass(frozen=True)
class _Directory:
    """A layout as a directory: each part of a path is opened without following links."""

    descriptor: int
    stack: ExitStack

    def part(self, path: str) -> tuple[int, int, int] | None:
        at = self.descriptor
        for word in path.split("/"):
            if word in ("", ".", ".."):
                raise Refused(f"{path[:200]!r} is not a path in the image")
            try:
                at = self.stack.enter_context(opened(word, at))
            except Refused:
                return None
        status = os.fstat(at)
        return (at, 0, status.st_size) if stat.S_ISREG(status.st_mode) else None


@dataclass(frozen=True)
class _Archive:
    """A layout or a saved image as a tar file."""

    descriptor: int
    files: Mapping[str, Member]

    def part(self, path: str) -> tuple[int, int, int] | None:
        for _ in range(4):  # docker save links equal layers: ../ID/layer.tar
            member = self.files.get(posixpath.normpath(path))
            if member is None:
                return None
            if member.kind == "file":
                return self.descriptor, member.offset, member.size
            if member.kind != "link":
                return None
            path = posixpath.join(posixpath.dirname(member.path), member.target)
        return None


@contextmanager
def files_of(descriptor: int) -> Iterator[Files]:
    """Yield the files of a directory or a tar file that is open. Raises Refused."""
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        with ExitStack() as stack:
            yield _Directory(descriptor, stack)
        return
    with os.fdopen(os.dup(descriptor), "rb") as file:
        if file.read(3)[:2] in (b"\x1f\x8b", b"\x28\xb5"):
            raise Refused("is compressed as a whole: unpack it first (gunzip, zstd -d)")
        size = file.seek(0, 2)
        found = {member.path: member for member in members(file, size, Budget(*_ARCHIVE))}
    yield _Archive(descriptor, found)


@dataclass(frozen=True)
class _Reading:
    """One image being read into ``work``.

    Attributes:
        most: bytes that all its layers may unpack to.
        until: when they must all be unpacked, by time.monotonic().
    """

    files: Files
    work: Path
    most: int
    arch: str
    until: float


def read_image(files: Files, work: Path, most: int, arch: str, tag: str) -> Container:
    """Copy, check and decompress an image's layers into ``work``; return the container.

    ``tag`` chooses one of several images. Raises Refused.
    """
    reading = _Reading(files, work, most, arch, time.monotonic() + TIMEOUT)
    if files.part("index.json") is not None:
        return _read_layout(reading, tag)
    if files.part("manifest.json") is not None:
        return _read_saved(reading, tag)
    raise Refused(
        "has neither index.json (an OCI image layout: skopeo copy ... oci:DIR) nor manifest.json "
        "(podman save, docker save)"
    )


def _json(reading: _Reading, path: str) -> bytes:
    part = reading.files.part(path)
    if part is None:
        raise Refused(f"has no {path[:200]}")
    descriptor, offset, size = part
    if size > MAX_JSON:
        raise Refused(f"{path[:200]} has {size} bytes; at most {MAX_JSON} are read")
    return os.pread(descriptor, size, offset)


def _blob(reading: _Reading, described: Any) -> tuple[str, bytes]:
    """Return media type and content of a descriptor's JSON blob, checked against its digest."""
    if type(described) is not dict:
        raise Refused("a descriptor is not a JSON object")
    digest = digest_of(described.get("digest"))
    data = _json(reading, f"blobs/sha256/{digest}")
    _check_size(described, len(data))
    if hashlib.sha256(data).hexdigest() != digest:
        raise Refused(f"sha256:{digest[:16]}... is damaged: its content has another hash")
    return str(described.get("mediaType", "")), data


def _check_size(described: Mapping[str, Any], size: int) -> None:
    """Refuse a blob whose size is not the one of its descriptor (descriptor.md)."""
    if (said := described.get("size", size)) != size:
        raise Refused(f"a blob has {size} bytes, its descriptor says {str(said)[:30]}")


def _read_layout(reading: _Reading, tag: str) -> Container:
    index = parse_json(_json(reading, "index.json"), "index.json")
    listed = _listed(index)
    if tag:
        listed = [d for d in listed if _title(d) == tag]
    title = tag
    for _ in range(_MAX_DEPTH):
        described = _choose(listed, reading.arch)
        title = title or _title(described)
        kind, data = _blob(reading, described)
        found = parse_json(data, "the manifest")
        kind = kind or str(found.get("mediaType", ""))
        if kind in _INDEXES or "manifests" in found:
            listed = _listed(found)
            continue
        if kind not in (*_MANIFESTS, ""):
            raise Refused(f"has a manifest of unknown type {kind[:100]!r}")
        return _read_manifest(reading, found, title)
    raise Refused("has indexes in indexes in indexes")


def _table(described: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object in an object; an empty one for anything else."""
    found = described.get(key)
    return found if type(found) is dict else {}


def _title(described: Mapping[str, Any]) -> str:
    return str(_table(described, "annotations").get(_TITLE, ""))


def _listed(index: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = index.get("manifests")
    if type(listed) is not list or not all(type(d) is dict for d in listed):
        raise Refused("the index lists no manifests")
    return listed


def _choose(listed: list[dict[str, Any]], arch: str) -> dict[str, Any]:
    """Return the only image, or the only one for this architecture."""
    wanted = ARCHITECTURES.get(arch, arch)
    fitting = [d for d in listed if _table(d, "platform").get("architecture") == wanted]
    found = listed if len(listed) == 1 else fitting
    if len(found) != 1:
        names = sorted(_title(d) for d in listed)
        shown = ", ".join(name for name in names if name) or "none has a name"
        raise Refused(
            f"has {len(listed)} images ({shown[:300]}), {len(fitting)} of them marked as {wanted}: "
            "say which with -o tag=NAME"
        )
    return found[0]


def _read_manifest(reading: _Reading, manifest: Mapping[str, Any], title: str) -> Container:
    _, config = _blob(reading, manifest.get("config"))
    listed = manifest.get("layers")
    if type(listed) is not list or not 0 < len(listed) <= MAX_LAYERS:
        raise Refused(f"the manifest has no layers, or more than {MAX_LAYERS}")
    layers, left = [], reading.most
    for number, described in enumerate(listed):
        if type(described) is not dict:
            raise Refused("the manifest has a layer that is not a JSON object")
        digest = digest_of(described.get("digest"))
        layer = _layer(reading, number, f"blobs/sha256/{digest}", digest, left, described)
        left -= layer.stat().st_size
        layers.append(layer)
    found = parse_json(config, "the configuration")
    return of_config(found, tuple(layers), reading.arch, title)


def _layer(
    reading: _Reading,
    number: int,
    path: str,
    digest: str | None,
    left: int,
    described: Mapping[str, Any],
) -> Path:
    """Return a layer as a plain tar file in the work directory."""
    part = reading.files.part(path)
    if part is None:
        raise Refused(f"has no {path[:200]}, one of its layers")
    descriptor, offset, size = part
    _check_size(described, size)
    if size > left:
        raise Refused(f"{path[:200]} has {size >> 20} MiB, more than the root disk (-o size=)")
    packed = reading.work / f"layer{number}"
    copy(descriptor, offset, size, packed, digest)
    seconds = reading.until - time.monotonic()
    return unpacked(packed, reading.work / f"layer{number}.tar", left, seconds)


def _read_saved(reading: _Reading, tag: str) -> Container:
    """Read what docker save writes: manifest.json, a list of images with the paths of layers."""
    try:
        listed = json.loads(_json(reading, "manifest.json"))
    except (ValueError, RecursionError):
        raise Refused("manifest.json is not JSON") from None
    if type(listed) is not list or not all(type(each) is dict for each in listed):
        raise Refused("manifest.json is not a list of images")
    if tag:
        listed = [each for each in listed if tag in _tags(each)]
    if len(listed) != 1:
        raise Refused(f"has {len(listed)} such images: say which with -o tag=NAME")
    paths, config = listed[0].get("Layers"), listed[0].get("Config")
    if type(paths) is not list or not 0 < len(paths) <= MAX_LAYERS or type(config) is not str:
        raise Refused("manifest.json names no layers, or no configuration")
    layers, left = [], reading.most
    for number, path in enumerate(paths):
        layer = _layer(reading, number, str(path), None, left, {})
        left -= layer.stat().st_size
        layers.append(layer)
    tags = _tags(listed[0]) or [""]
    found = parse_json(_json(reading, config), "the configuration")
    return of_config(found, tuple(layers), reading.arch, str(tags[0]))


def _tags(image: Mapping[str, Any]) -> list[str]:
    found = image.get("RepoTags")
    return [str(tag) for tag in found] if type(found) is list else []
