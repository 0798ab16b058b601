"""Read OCI image layouts and output of ``podman save`` and ``docker save`` (directory or tar).

OCI image-spec 1.1: image-layout.md, manifest.md. A tar file is read in place; the names in it are
never used as paths.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vtorque_core.api import Refused
from vtorque_linux_guest.image.tar_reader import Budget, members
from vtorque_oci import documents
from vtorque_oci.blobs import (
    TIMEOUT,
    copy,
    digest_of,
    invalid_answer,
    numbers,
    open_source,
    run_parser,
    unpack_layer,
)
from vtorque_oci.container import Container

_ARCHIVE = 10_000, 4 << 20  # files of a tar file, and bytes of their long names
_MOST_LIST = 10 << 20  # bytes: 10,000 short names, and the long ones
MAX_DEPTH = 4
"""Maximum number of nested indexes."""


class Files(Protocol):
    """Access to an image's files."""

    def part(self, path: str) -> tuple[int, int, int] | None:
        """Return descriptor, offset and size of a file, or None if it is missing."""


@dataclass(frozen=True)
class _Directory:
    """An image layout in a directory; path components are opened without following links."""

    descriptor: int
    stack: ExitStack

    def part(self, path: str) -> tuple[int, int, int] | None:
        at = self.descriptor
        for word in path.split("/"):
            if word in ("", ".", ".."):
                raise Refused(f"{path[:200]!r} is not a path in the image")
            try:
                at = self.stack.enter_context(open_source(word, at))
            except Refused:
                return None
        status = os.fstat(at)
        return (at, 0, status.st_size) if stat.S_ISREG(status.st_mode) else None


@dataclass(frozen=True)
class Part:
    """A member of a tar file; see :class:`vtorque_linux_guest.image.tar_reader.Member`."""

    kind: str
    offset: int
    size: int
    target: str


@dataclass(frozen=True)
class _Archive:
    descriptor: int
    files: Mapping[str, Part]

    def part(self, path: str) -> tuple[int, int, int] | None:
        for _ in range(4):  # docker save links equal layers: ../ID/layer.tar
            path = posixpath.normpath(path)
            member = self.files.get(path)
            if member is None:
                return None
            if member.kind == "file":
                return self.descriptor, member.offset, member.size
            if member.kind != "link":
                return None
            path = posixpath.join(posixpath.dirname(path), member.target)
        return None


@contextmanager
def files_of(descriptor: int) -> Iterator[Files]:
    """Yield the files of an open directory or tar file. Raises Refused."""
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        with ExitStack() as stack:
            yield _Directory(descriptor, stack)
        return
    if os.pread(descriptor, 2, 0) in (b"\x1f\x8b", b"\x28\xb5"):
        raise Refused("is compressed as a whole: unpack it first (gunzip, zstd -d)")
    found = {}
    for value in run_parser(list_members, files=[descriptor], most=_MOST_LIST):
        *place, rest = value.split(b" ", 2)
        names = rest.decode("utf-8", "surrogateescape").split("\0")
        if len(names) != 3:
            raise invalid_answer()
        found[names[1]] = Part(names[0], *numbers(place, descriptor), names[2])
    yield _Archive(descriptor, found)


def list_members(descriptor: int) -> Iterator[bytes]:
    """Yield offset, size, kind, path and target of each member of a tar file.

    Runs without privileges. Path and target each follow a NUL; offset, size and kind are separated
    by blanks. Raises Refused.
    """
    with os.fdopen(os.dup(descriptor), "rb") as file:
        for each in members(file, file.seek(0, 2), Budget(*_ARCHIVE)):
            text = f"{each.offset} {each.size} {each.kind}\0{each.path}\0{each.target}"
            yield text.encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class _Reading:
    """State while one image is read into the directory ``work``.

    Attributes:
        most: maximum size of all unpacked layers in bytes.
        until: deadline for unpacking the layers, by time.monotonic().
        private: True if the caller has verified the image's files, and no other user can change
            them. The layers are then linked, not copied.
    """

    files: Files
    work: Path
    most: int
    arch: str
    until: float
    private: bool = False


def read_image(
    files: Files, work: Path, most: int, arch: str, tag: str, *, private: bool = False
) -> Container:
    """Copy, verify and decompress an image's layers to ``work``; return the container.

    ``tag`` selects one of several images. With ``private``, the compressed layers are only
    hard-linked: the caller has verified the files, and no other user can change them.
    Raises Refused.
    """
    reading = _Reading(files, work, most, arch, time.monotonic() + TIMEOUT, private)
    try:
        if files.part("index.json") is not None:
            return _read_layout(reading, tag)
        if files.part("manifest.json") is not None:
            return _read_saved(reading, tag)
    except ValueError:  # the image has taken over the process that parses its documents
        raise invalid_answer() from None
    raise Refused(
        "has neither index.json (an OCI image layout: skopeo copy ... oci:DIR) nor manifest.json "
        "(podman save, docker save)"
    )


def _json(reading: _Reading, path: str) -> bytes:
    part = reading.files.part(path)
    if part is None:
        raise Refused(f"lacks {path[:200]}")
    descriptor, offset, size = part
    if size > documents.MAX_JSON:
        raise Refused(f"{path[:200]} has {size} bytes, and the limit is {documents.MAX_JSON}")
    return os.pread(descriptor, size, offset)


def _blob(reading: _Reading, digest: str, size: str) -> bytes:
    """Return the content of a JSON blob, verified against its descriptor."""
    digest = digest_of(digest)
    data = _json(reading, f"blobs/sha256/{digest}")
    _check_size(size, len(data))
    if hashlib.sha256(data).hexdigest() != digest:
        raise Refused(f"sha256:{digest[:16]}... is damaged: its content has a different hash")
    return data


def _check_size(expected: str, size: int) -> None:
    if expected and expected != str(size):
        raise Refused(f"a blob has {size} bytes, but its descriptor says {expected}")


def texts_of(parse: Callable[..., Iterator[bytes]], data: bytes, *args: object) -> list[str]:
    """Run a parser of :mod:`vtorque_oci.documents` without privileges; return its values.

    Raises Refused.
    """
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return [value.decode() for value in run_parser(parse, *args, files=[file.fileno()])]


def _read_layout(reading: _Reading, tag: str) -> Container:
    found = texts_of(documents.parse_index, _json(reading, "index.json"), tag, reading.arch)
    title = tag
    for _ in range(MAX_DEPTH):
        digest, size, kind, name = found
        title = title or name
        data = _blob(reading, digest, size)
        what, *found = texts_of(documents.parse_manifest, data, kind, reading.arch)
        if what == documents.MANIFEST:
            return _read_manifest(reading, found, title)
    raise Refused("contains too deeply nested indexes")


def _read_manifest(reading: _Reading, found: Sequence[str], title: str) -> Container:
    (config, size), *layers = zip(found[::2], found[1::2], strict=True)
    data = _blob(reading, config, size)
    paths, left = list[Path](), reading.most
    for number, (each, size) in enumerate(layers):
        digest = digest_of(each)
        layer = _layer(reading, number, f"blobs/sha256/{digest}", digest, left, size)
        left -= layer.stat().st_size
        paths.append(layer)
    return _container(reading, data, paths, title)


def _container(reading: _Reading, config: bytes, layers: Sequence[Path], title: str) -> Container:
    texts = texts_of(documents.parse_configuration, config, len(layers), reading.arch)

    def texts_after(letter: str) -> tuple[str, ...]:
        return tuple(text[1:] for text in texts if text[:1] == letter)

    return Container(
        layers=tuple(zip(layers, map(digest_of, texts_after(documents.LAYER)), strict=True)),
        environment=dict(each.split("=", 1) for each in texts_after(documents.VARIABLE)),
        entrypoint=texts_after(documents.ENTRYPOINT),
        command=texts_after(documents.COMMAND),
        title=title,
    )


def _layer(
    reading: _Reading,
    number: int,
    path: str,
    digest: str | None,
    left: int,
    said: str,
) -> Path:
    part = reading.files.part(path)
    if part is None:
        raise Refused(f"lacks the layer {path[:200]}")
    descriptor, offset, size = part
    _check_size(said, size)
    if size > left:
        raise Refused(f"{path[:200]} has {size >> 20} MiB, more than the root disk (-o size=)")
    packed = reading.work / f"layer{number}"
    if reading.private:
        packed.hardlink_to(Path(f"/proc/self/fd/{descriptor}").readlink())
        return packed
    copy(descriptor, offset, size, packed, digest)
    seconds = reading.until - time.monotonic()
    return unpack_layer(packed, reading.work / f"layer{number}.tar", left, seconds)


def _read_saved(reading: _Reading, tag: str) -> Container:
    title, config, *paths = texts_of(documents.parse_saved, _json(reading, "manifest.json"), tag)
    layers, left = [], reading.most
    for number, path in enumerate(paths):
        layer = _layer(reading, number, path, None, left, "")
        left -= layer.stat().st_size
        layers.append(layer)
    return _container(reading, _json(reading, config), layers, title)
