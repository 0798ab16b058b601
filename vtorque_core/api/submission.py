"""Encode a request as one shell-safe word, and run the site's submit command."""

from __future__ import annotations

import os
import re
import signal
import sys
import zlib
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from typing import NoReturn

from vtorque_core.base.errors import Refused, UsageError
from vtorque_core.base.safefs import name_errors

MAX_REQUEST = 128 * 1024  # bytes of one encoded request
_WORD = r"vt1:([A-Za-z0-9_-]+)"  # compiled where it is needed: not by vsub
_PLAIN, _ZLIB = b"\x00", b"\x01"  # first byte inside a token
_MAX_TOKEN = 4 + (MAX_REQUEST + 1) * 4 // 3 + 4


def refuse(problem: str) -> NoReturn:
    """Raise Refused for a request that ``vsub`` cannot have written."""
    raise Refused(f"the job's request is invalid: {problem}")


def to_token(blob: bytes) -> str:
    """Return a request as ``vt1:`` and unpadded base64url (RFC 4648), compressed if shorter."""
    packed = zlib.compress(blob, 9)
    data = _ZLIB + packed if len(packed) < len(blob) else _PLAIN + blob
    return "vt1:" + urlsafe_b64encode(data).decode().rstrip("=")


def from_token(token: str) -> bytes:
    """Decode an untrusted token. The caller is root; an unprivileged process does the decoding.

    Raises Refused if the token is invalid, HostFault if that process fails.
    """
    from vtorque_core.api.unprivileged_parser import Unreadable, parse_unprivileged  # noqa: PLC0415 - not by vsub

    try:
        return b"".join(parse_unprivileged(unpack_token, token[: _MAX_TOKEN + 1]))
    except Unreadable as error:
        raise Refused(str(error)) from None


def unpack_token(token: str) -> Iterator[bytes]:
    """Yield the bytes of a decoded token, at most MAX_REQUEST. Raises Refused only."""
    match = re.fullmatch(_WORD, token, re.ASCII) if len(token) <= _MAX_TOKEN else None
    if match is None:
        refuse("it is not a vt1 token")
    try:
        data = b64decode(match[1] + "=" * (-len(match[1]) % 4), altchars=b"-_", validate=True)
    except ValueError:
        refuse("the token is not base64")
    if data[:1] == _PLAIN:
        yield data[1:]
        return
    if data[:1] != _ZLIB:
        refuse("the token's type is unknown")
    unpacker = zlib.decompressobj()
    try:
        blob = unpacker.decompress(data[1:], MAX_REQUEST + 1)
    except zlib.error:
        refuse("the token cannot be decompressed")
    if len(blob) > MAX_REQUEST or not unpacker.eof or unpacker.unused_data:
        refuse(f"the decompressed token is larger than {MAX_REQUEST} bytes")
    yield blob


def exec_command(argv: Sequence[str], stdin: bytes | None = None) -> NoReturn:
    """Replace this process by a command, whose program is an absolute path.

    ``stdin`` becomes its standard input. Raises UsageError if the program cannot run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if stdin is not None:
        source = os.memfd_create("script")
        with os.fdopen(os.dup(source), "wb") as file:
            file.write(stdin)
        os.lseek(source, 0, os.SEEK_SET)
        os.dup2(source, 0)
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and that would be inherited
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    with name_errors(argv[0], fault=UsageError):
        os.execv(argv[0], list(argv))  # noqa: S606
