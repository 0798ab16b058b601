"""Open, copy and verify files of an untrusted container.

The owner of a container can change the container's files at any time. Therefore this module first
copies each needed part to root's own directory, and then verifies the copy. Privileges: root.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from vtorque_core.api import Refused, closing, name_errors
from vtorque_core.api.unprivileged_parser import Unreadable, parse_unprivileged
from vtorque_oci.sandbox import ENV, sandbox_command

CHUNK = 1 << 20
MOST_TEXTS = 2 << 20  # bytes: more than the agent accepts (container.MAX_SETTINGS)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
TIMEOUT = 1800  # seconds for unpacking all layers of an image


def digest_of(text: object) -> str:
    """Return the hexadecimal part of a sha256 digest. Raises Refused for other digests."""
    found = _DIGEST.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise Refused(f"{str(text)[:100]!r} is not a supported digest: it must begin with sha256:")
    return found[1]


@contextmanager
def open_source(name: str, directory: int | None = None) -> Iterator[int]:
    """Open a directory or a regular file, but no symbolic link. Raises Refused.

    Opening a FIFO would block, and opening a device may have side effects.
    """
    try:
        with closing(
            os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        ) as handle:
            mode = os.fstat(handle).st_mode
            if stat.S_ISLNK(mode):
                raise Refused(f"{name[:200]!r} is a symbolic link")
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise Refused(f"{name[:200]!r} is neither a file nor a directory")
            descriptor = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(f"{name[:200]!r}: {error.strerror}") from None
    except ValueError:
        raise Refused(f"{name[:200]!r} is not a path") from None
    with closing(descriptor):
        yield descriptor


def run_parser(
    parse: Callable[..., Iterator[bytes]],
    *args: object,
    files: Sequence[int],
    most: int = MOST_TEXTS,
) -> list[bytes]:
    """Run a parser without privileges; return the values that it yields. Raises Refused.

    Args:
        parse: see :func:`vtorque_core.api.unprivileged_parser.parse_unprivileged`.
        args: the first arguments of ``parse``.
        files: descriptors, which are the last arguments of ``parse``.
        most: maximum size of all values together in bytes.
    """
    try:
        return list(parse_unprivileged(parse, *args, files=files, most=most))
    except Unreadable as error:
        raise Refused(str(error)) from None


def numbers(answer: Iterable[bytes], descriptor: int) -> tuple[int, int]:
    """Convert a parser's answer, the offset and size of a part of a file, to two integers.

    Raises Refused if the answer is invalid or the part is not inside the file ``descriptor``.
    """
    try:
        offset, size = map(int, answer)
    except ValueError:
        raise invalid_answer() from None
    if offset < 0 or size < 0 or offset + size > os.fstat(descriptor).st_size:
        raise invalid_answer()
    return offset, size


def invalid_answer() -> Refused:
    """Return the error for an invalid answer from the process that parses the image."""
    return Refused("the unprivileged parser sent an invalid answer")


def copy(descriptor: int, offset: int, size: int, target: Path, expect: str | None) -> None:
    """Copy a part of a file to a new file and verify its sha256, if ``expect`` is given.

    Raises Refused, HostFault.
    """
    digest = hashlib.sha256()
    with name_errors(target.name, stage="copy"), target.open("xb") as file:
        at = offset
        while at < offset + size:
            part = os.pread(descriptor, min(CHUNK, offset + size - at), at)
            if not part:
                raise Refused(f"is truncated: it does not have {size} bytes at offset {offset}")
            digest.update(part)
            file.write(part)
            at += len(part)
    if expect is not None and digest.hexdigest() != expect:
        raise Refused(
            f"sha256:{expect[:16]}... is damaged: its hash is {digest.hexdigest()[:16]}..."
        )


def unpack_layer(packed: Path, target: Path, most: int, seconds: float = TIMEOUT) -> Path:
    """Return a layer as a plain tar file: the layer itself, or a decompressed copy in ``target``.

    ``most`` is the size limit in bytes, ``seconds`` the time limit. Raises Refused if a limit is
    exceeded, the layer is damaged, or its compression is unknown.
    """
    if seconds <= 0:
        raise _timeout_error()
    with packed.open("rb", buffering=0) as file:
        magic = file.read(6)
        file.seek(0)
        if magic.startswith(b"\x1f\x8b"):
            run_as_nobody(("gzip", "-d", "-c"), file, target, most, "gzip", seconds)
        elif magic.startswith(b"\x28\xb5\x2f\xfd"):
            # --memory: a frame may require any window size (RFC 8878, 3.1.1.1.2)
            argv = ("zstd", "-d", "-q", "-c", "--memory=256MB")
            run_as_nobody(argv, file, target, most, "zstd", seconds)
        elif magic.startswith((b"BZh", b"\xfd7zXZ", b"PK")):
            raise Refused("a layer is not compressed with gzip or zstd")
        else:
            return packed
    packed.unlink()
    return target


def _timeout_error() -> Refused:
    return Refused(f"its layers were not unpacked within {TIMEOUT} s")


def size_error(most: int) -> Refused:
    """Return the error for a layer that unpacks to more than ``most`` bytes."""
    return Refused(
        f"unpacks to more than {most >> 20} MiB. The limit is the root disk's size (-o size=) "
        "and a third of the free space on the pool's disk"
    )


def run_as_nobody(
    argv: tuple[str, ...],
    stdin: IO[bytes],
    target: Path,
    most: int,
    package: str,
    seconds: float = TIMEOUT,
) -> None:
    """Run a tool on untrusted data in a sandbox, with its output in a new file.

    ``most`` limits the output in bytes, ``seconds`` the time; the memory limit is 1 GiB. Raises
    Refused if the tool fails, HostFault if its Debian package ``package`` is not installed.
    """
    limits = (
        "--as=1073741824",
        "--stack=1048576",
        f"--fsize={most}",
        f"--cpu={TIMEOUT}",
    )
    command = sandbox_command(*argv, limits=limits, package=package)
    with target.open("xb") as out:
        try:
            done = subprocess.run(
                command,
                stdin=stdin,
                stdout=out,
                stderr=subprocess.PIPE,
                env=ENV,
                cwd="/",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _timeout_error() from None
    if done.returncode != 0:
        if target.stat().st_size >= most:
            raise size_error(most)
        output = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise Refused(f"{argv[0]} failed: {output or f'exit code {done.returncode}'}")
