"""A layer's uncompressed content as a forward-only stream, without a copy on disk.

Writing a 1 GB layer to a disk and reading it again would double the time of a conversion.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
from pathlib import Path
from typing import IO, Any

from vtorque_core.api import HostFault, Refused

_CHUNK = 1 << 20
_LIMITS = ("prlimit", "--as=1073741824", "--core=0", "--")
# Magic numbers and programs. --memory limits the window size that a zstd frame may require
# (RFC 8878, 3.1.1.1.2).
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "-d", "-c"),
    b"\x28\xb5\x2f\xfd": ("zstd", "-d", "-q", "-c", "--memory=256MB"),
}
_OTHERS = (b"BZh", b"\xfd7zXZ", b"PK")


def enlarge_pipe(pipe: IO[bytes]) -> None:
    """Enlarge a pipe if the system permits it: a larger pipe needs fewer context switches."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _CHUNK)


class LayerStream:
    """A stream of one layer (gzip, zstd or uncompressed), limited to ``most`` bytes."""

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most = path, most
        self._process: subprocess.Popen[bytes] | None = None
        self._file: IO[bytes] | None = None
        self._hash: Any = hashlib.sha256()
        self._start()

    def restart(self) -> None:
        """Return to the beginning. The content is not hashed again: call :meth:`check` first."""
        self.close()
        self._hash = None
        self._start()

    def _start(self) -> None:
        self._at = 0
        with self._path.open("rb", buffering=0) as file:
            magic = file.read(6)
            file.seek(0)
            found = [argv for start, argv in _COMPRESSED.items() if magic.startswith(start)]
            if magic.startswith(_OTHERS):
                raise Refused("a layer is not compressed with gzip or zstd")
            if not found:
                self._file = self._path.open("rb", buffering=0)
                return
            try:
                self._process = subprocess.Popen(
                    [*_LIMITS, *found[0]],
                    stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
                )  # fmt: skip
            except OSError as error:
                raise HostFault(f"{found[0][0]}: {error.strerror}") from None
        self._file = self._process.stdout
        assert self._file is not None  # noqa: S101 - a pipe
        enlarge_pipe(self._file)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Skip to a later position, and return it.

        With SEEK_END, return a number that no layer reaches, without moving. Raises ValueError for
        an earlier position.
        """
        if whence == os.SEEK_END:
            return 1 << 62
        if offset < self._at:
            raise ValueError(f"cannot seek from {self._at} back to {offset}")
        while self._at < offset and self._read_part(min(_CHUNK, offset - self._at)):
            pass
        return self._at

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, or fewer at the end."""
        parts = []
        while size > 0 and (part := self._read_part(min(_CHUNK, size))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

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
        self._file = self._process = None

    def _read_part(self, size: int) -> bytes:
        assert self._file is not None  # noqa: S101 - not used after close
        part = self._file.read(size)
        if self._hash is not None:
            self._hash.update(part)
        self._at += len(part)
        if self._at > self._most:
            raise Refused(
                f"a layer unpacks to more than {self._most >> 20} MiB (the limit of all layers is "
                "twice -o size=)"
            )
        return part
