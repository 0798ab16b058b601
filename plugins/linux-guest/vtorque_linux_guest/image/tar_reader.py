"""Read the headers of untrusted tar files with limits on time and memory.

Python's tarfile is unsuitable: a few bytes of a sparse map, a global header or a list of records
make it use unlimited memory. This reader supports v7, ustar and pax (POSIX.1-2017, pax(1)), and
GNU's long names and large numbers ("Basic Tar Format", info tar). It ignores global headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from vtorque_core.api import Refused

MAX_ENTRIES = 500_000
MAX_HEADER = 1 << 20  # bytes of one extended header
MAX_HEADERS = 256 << 20  # bytes of all of them: names and attributes are kept in memory
MAX_NAME = 255  # bytes: the limit of ext4 and of other file systems
MAX_PATH = 4095  # bytes of a path and of a symbolic link's target: a page less its NUL
_ATTRIBUTE = 256  # bytes of memory for an extended attribute, besides its text
_BLOCK = 512
_LATEST = 0x7FFFFFFF  # seconds: the latest time that every ext4 can store
_XATTR = b"SCHILY.xattr."  # how tar(1) and Go's archive/tar name them in pax headers
_NUMBER = re.compile(rb"(-?[0-9]{1,20})(?:\.[0-9]*)?")
_KINDS = {
    b"\0": "file", b"0": "file", b"7": "file", b"1": "hard link", b"2": "link", b"3": "device",
    b"4": "device", b"5": "directory", b"6": "fifo",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a tar file. ``path`` is valid, without ``.`` or empty components.

    ``kind`` is file, directory, link, hard link, fifo or device. ``offset`` and ``size`` locate a
    file's content. ``target`` is a link's target. ``mtime`` is in seconds since 1970.
    """

    path: str
    kind: str
    mode: int
    uid: int
    gid: int
    mtime: int
    offset: int
    size: int
    target: str
    xattrs: dict[str, bytes] | None


@dataclass
class _ExtendedHeader:
    """The values that extended headers set for the next member."""

    fields: dict[bytes, bytes] = field(default_factory=dict)
    xattrs: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Budget:
    """Limits and usage counters, shared by all tar files of one image.

    Attributes:
        entries: maximum number of members.
        headers: maximum bytes of extended headers, including one block for each header.
    """

    entries: int = 2 * MAX_ENTRIES
    headers: int = MAX_HEADERS
    used_entries: int = 0
    used_headers: int = 0

    def count_entry(self) -> None:
        """Count one member. Raises Refused."""
        self.used_entries += 1
        if self.used_entries > self.entries:
            raise Refused(f"has more than {self.entries} files in all its layers")

    def count_headers(self, size: int) -> None:
        """Count bytes of an extended header. Raises Refused."""
        self.used_headers += size
        if self.used_headers > self.headers:
            raise Refused(f"has more than {self.headers >> 20} MiB of long names and attributes")


@dataclass
class _TarReader:
    file: IO[bytes]
    size: int
    budget: Budget
    at: int = 0

    def block(self) -> bytes:
        """Return the next header, or b"" at the end."""
        self.file.seek(self.at)
        data = self.file.read(_BLOCK)
        self.at += _BLOCK
        if data and len(data) < _BLOCK:
            raise _invalid_tar("it is truncated")
        return data if data.strip(b"\0") else b""

    def skip(self, size: int) -> None:
        self.at += -(-size // _BLOCK) * _BLOCK

    def text(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER:
            raise Refused(f"a header has {size} bytes, and the limit is {MAX_HEADER}")
        self.budget.count_headers(_BLOCK + size)
        self.file.seek(self.at)
        data = self.file.read(size)
        if len(data) < size:
            raise _invalid_tar("it is truncated")
        self.skip(size)
        return data


def members(file: IO[bytes], most: int, budget: Budget | None = None) -> list[Member]:
    """Return the members of an uncompressed tar file in order, with valid names and sizes.

    ``most`` limits the total size of the contents in bytes. The layers of an image share a
    ``budget``. Raises Refused if the file is invalid or truncated, or has absolute paths, ``..`` or
    unsupported file types.
    """
    budget = budget or Budget()
    reader = _TarReader(file, file.seek(0, 2), budget)
    found: list[Member] = []
    total = 0
    if reader.size == 0:
        raise _invalid_tar("it is empty")
    for member in _members(reader):
        budget.count_entry()
        total += member.size
        if total > most:
            raise Refused(
                f"has more than {most >> 20} MiB of files (the limit is the image's size: -o size=)"
            )
        found.append(member)
    return found


def _invalid_tar(why: str) -> Refused:
    return Refused(f"is not a valid tar file: {why}")


def _members(reader: _TarReader) -> Iterator[Member]:
    more = _ExtendedHeader()
    while head := reader.block():
        kind, size = head[156:157], _checked_size(head)
        if kind in (b"x", b"X"):
            _read_records(reader, more, reader.text(size))
        elif kind in (b"L", b"K"):
            name = b"path" if kind == b"L" else b"linkpath"
            more.fields[name] = reader.text(size).partition(b"\0")[0]
        elif kind == b"g":
            if not 0 <= size <= reader.size - reader.at:
                raise _invalid_tar(
                    "a header has a negative size, or ends beyond the end of the file"
                )
            reader.budget.count_headers(_BLOCK)
            reader.skip(size)
        else:
            yield _member(reader, head, more)
            more = _ExtendedHeader()


def _checked_size(head: bytes) -> int:
    """Return a header's size field. Raises Refused if the header's checksum is wrong."""
    given = head[148:156]
    sums = head[:148] + b" " * 8 + head[156:]
    total = sum(sums)
    said = _octal(given)
    if said != total and said != total - 256 * sum(byte > 127 for byte in sums):
        raise _invalid_tar("a header has a wrong checksum")
    return _octal(head[124:136])


def _octal(text: bytes) -> int:
    """Decode a number: octal digits, or two's complement if the first bit is 1."""
    if text[0] & 0x80:
        top = 1 << 8 * len(text) - 1
        number = int.from_bytes(text, "big") - top
        return number - top if number & top >> 1 else number
    digits = text.partition(b"\0")[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise _invalid_tar(f"{text!r} is not a number")
    return int(digits or b"0", 8)


def _read_records(reader: _TarReader, more: _ExtendedHeader, data: bytes) -> None:
    """Read the records of a pax header: length, blank, key, equals sign, value, newline."""
    at = 0
    while at < len(data) and data[at]:  # some programs fill up with zeros
        blank = data.find(b" ", at, at + 9)
        if blank <= at or not data[at:blank].isdigit():
            raise _invalid_tar("an extended header is damaged")
        end = at + int(data[at:blank])
        if not blank + 1 < end <= len(data) or data[end - 1 : end] != b"\n":
            raise _invalid_tar("an extended header is damaged")
        key, equals, value = data[blank + 1 : end - 1].partition(b"=")
        if not equals:
            raise _invalid_tar("an extended header is damaged")
        if key.startswith(b"GNU.sparse."):
            raise Refused("has a sparse member: make the tar file without --sparse")
        if key.startswith(_XATTR):
            reader.budget.count_headers(_ATTRIBUTE)
            name = key.removeprefix(_XATTR).decode("utf-8", "surrogateescape")
            more.xattrs[name] = value
        elif key in (b"path", b"linkpath", b"size", b"uid", b"gid", b"mtime"):
            more.fields[key] = value
        at = end


def _member(reader: _TarReader, head: bytes, more: _ExtendedHeader) -> Member:
    name = more.fields.get(b"path") or _name(head)
    shown = repr(name[:200].decode("utf-8", "backslashreplace"))
    kind = _KINDS.get(head[156:157], "")
    if kind == "file" and head[156:157] == b"\0" and name.endswith(b"/"):
        kind = "directory"
    if head[156:157] == b"S":
        raise Refused(f"{shown} is a sparse member: make the tar file without --sparse")
    if not kind:
        raise Refused(f"{shown} is of unknown type {head[156:157]!r}")
    path = _checked_path(name, shown)
    if kind == "device" and path.partition("/")[0] != "dev":
        raise Refused(f"{shown} is a device: images have devices only in /dev")
    target = b""
    if kind in ("link", "hard link"):
        target = more.fields.get(b"linkpath") or head[157:257].partition(b"\0")[0]
        if not 0 < len(target) <= MAX_PATH or b"\0" in target:
            raise Refused(f"{shown} is a link to a path that is empty or too long")
    size = _field(head[124:136], more, b"size") if kind == "file" else 0
    start = reader.at
    if size < 0 or start + size > reader.size:
        raise Refused(f"is truncated: {shown} ends beyond the end of the file")
    reader.skip(size)
    owners = [_field(head[108:116], more, b"uid"), _field(head[116:124], more, b"gid")]
    for owner in owners:
        if not 0 <= owner < 0xFFFFFFFF:
            raise Refused(f"{shown} belongs to {owner}, which is not a valid id")
    return Member(
        path=path,
        kind=kind,
        mode=_octal(head[100:108]) & 0o7777,
        uid=owners[0],
        gid=owners[1],
        mtime=min(max(_field(head[136:148], more, b"mtime"), 0), _LATEST),
        offset=start,
        size=size,
        target=target.decode("utf-8", "surrogateescape"),
        xattrs=more.xattrs or None,
    )


def _name(head: bytes) -> bytes:
    name, prefix = head[:100].partition(b"\0")[0], head[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and head[257:263] == b"ustar\0" else name


def _field(text: bytes, more: _ExtendedHeader, key: bytes) -> int:
    """Return the number in ``more`` under ``key``, otherwise the number in the field ``text``."""
    if not (given := more.fields.get(key)):
        return _octal(text)
    found = _NUMBER.fullmatch(given)
    if found is None:
        raise _invalid_tar(f"{given[:50]!r} is not a number")
    return int(found[1])


def _checked_path(name: bytes, shown: str) -> str:
    if name.startswith(b"/"):
        raise Refused(f"{shown} is an absolute path")
    words = [word for word in name.split(b"/") if word not in (b"", b".")]
    if b".." in words:
        raise Refused(f"the path {shown} contains '..'")
    path = b"/".join(words)
    if b"\0" in name or len(path) > MAX_PATH or any(len(word) > MAX_NAME for word in words):
        raise Refused(f"{shown} is not a valid file name")
    return path.decode("utf-8", "surrogateescape")
