"""A layer's uncompressed content as a forward-only stream, without a copy on disk.

Writing a 1 GB layer to a disk and reading it again would double the time of a conversion.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

from vtorque_core.api import Refused
from vtorque_oci.sandbox import ENV, sandbox_command

_CHUNK = 1 << 20
_LIMITS = "--as=1073741824", "--fsize=0"  # virtual memory and written files, in bytes
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # gzip and zstd
# zstd also decompresses gzip, in half the time of gzip. --memory limits the window size that a zstd
# frame may require (RFC 8878, 3.1.1.1.2).
_ZSTD = ("zstd", "-d", "-q", "-c", "--memory=128MB")
_OTHERS = (b"BZh", b"\xfd7zXZ", b"PK")


def enlarge_pipe(pipe: IO[bytes]) -> None:
    """Enlarge a pipe if the system permits it: a larger pipe needs fewer context switches."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _CHUNK)


class LayerStream:
    """A stream of one layer (gzip, zstd or uncompressed), limited to ``most`` bytes."""

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most = path, most
        self._buffer = memoryview(bytearray(_CHUNK))
        self._process: subprocess.Popen[bytes] | None = None
        self._hash: Any = hashlib.sha256()
        self._at = 0
        self._file: FileIO | None = self._start()

    def restart(self) -> None:
        """Return to the beginning. The content is not hashed again: call :meth:`check` first.

        The program that decompresses the layer starts when the layer is read.
        """
        self.close()
        self._hash = None

    def _start(self) -> FileIO:
        with self._path.open("rb", buffering=0) as file:
            magic = file.read(6)
            file.seek(0)
            if magic.startswith(_OTHERS):
                raise Refused("a layer is not compressed with gzip or zstd")
            if not magic.startswith(_COMPRESSED):
                return self._path.open("rb", buffering=0)
            self._process = subprocess.Popen(
                sandbox_command(*_ZSTD, limits=_LIMITS, package="zstd"), env=ENV, cwd="/",
                stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            )  # fmt: skip
        found = cast(FileIO, self._process.stdout)  # because of bufsize=0
        enlarge_pipe(found)
        return found

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Skip to a later position, and return it.

        With SEEK_END, return a number that no layer reaches, without moving. Raises ValueError for
        an earlier position.
        """
        if whence == os.SEEK_END:
            return 1 << 62
        if offset < self._at:
            raise ValueError(f"cannot seek from {self._at} back to {offset}")
        while self._at < offset and self._read_part(offset - self._at):
            pass
        return self._at

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, or fewer at the end."""
        data = bytearray()
        while len(data) < size and (part := self._read_part(size - len(data))):
            data += part
        return bytes(data)

    def send(self, size: int, pipe: int) -> int:
        """Move ``size`` bytes, or fewer at the end, to a pipe without a copy (splice(2)).

        Returns the number of bytes. Requires :meth:`restart`.
        """
        file, left = self._open_file(), size
        while left and (count := os.splice(file.fileno(), pipe, left)):
            left -= count
            self._advance(count)
        return size - left

    def check(self, digest: str | None) -> int:
        """Read the rest of the layer, and return the layer's size in bytes.

        ``digest`` is the expected SHA-256 in hexadecimal, or None for any. Raises Refused if the
        layer is damaged or has another SHA-256.
        """
        while self._read_part(_CHUNK):
            pass
        if self._process is not None and self._process.wait():
            raise Refused("a layer is damaged, or decompressing it needs too much memory")
        if digest is not None and (found := self._hash.hexdigest()) != digest:
            raise Refused(
                f"a layer has sha256 {found[:16]}..., but the configuration requires "
                f"{digest[:16]}..."
            )
        return self._at

    def close(self) -> None:
        """Close the layer, and kill the program that decompresses it."""
        if self._file is not None:
            self._file.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._file, self._process, self._at = None, None, 0

    def _read_part(self, size: int) -> memoryview:
        """Return the next bytes, at most ``size``. The next call overwrites them."""
        part = self._buffer[: self._open_file().readinto(self._buffer[:size])]
        if self._hash is not None:
            self._hash.update(part)
        self._advance(len(part))
        return part

    def _open_file(self) -> FileIO:
        if self._file is None:
            self._file = self._start()
        return self._file

    def _advance(self, count: int) -> None:
        self._at += count
        if self._at > self._most:
            raise Refused(
                f"a layer unpacks to more than {self._most >> 20} MiB (the limit of all layers is "
                "twice -o size=)"
            )
