"""A program to run in the guest, and its FILE and START frames (`doc/stream.md`)."""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from vtorque_linux_guest.job.frames import (
    BadStart,
    FrameKind,
    Tag,
    element,
    frame,
    split_frames,
    winsize,
)

START_MAX = 2 << 20
FILES_MAX = 16
FILE_BYTES_MAX = 16 << 20


class StartMode(IntEnum):
    """How to run a command: directly, or by the user's shell in the guest's passwd(5).

    LOGIN starts the first argument as a login shell. If that argument is empty, LOGIN starts the
    user's shell.
    """

    DIRECT = 0
    SHELL = 1
    LOGIN = 2


class FileArg(NamedTuple):
    """An argument that the agent replaces with the path of the file sent under this name."""

    name: str


class GuestFileData(NamedTuple):
    """A file stored in the guest for this run, owned by the user, mode 0700."""

    name: str
    data: bytes


class Pty(NamedTuple):
    """A terminal for the program; `term` sets TERM in its environment."""

    term: str
    rows: int
    columns: int


@dataclass(frozen=True)
class StartRequest:
    """One program to run. Strings may contain any bytes (PEP 383), but no NUL.

    An empty `cwd` is the user's home. `limits` maps RLIMIT numbers to (soft, hard), where -1 means
    unlimited; `limits` can only lower the limits of the guest. `merge` sends stderr to stdout, as a
    pty always does.
    """

    argv: tuple[str | FileArg, ...]
    env: Mapping[str, str]
    cwd: str = ""
    umask: int = 0o22
    limits: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    pty: Pty | None = None
    merge: bool = False
    files: tuple[GuestFileData, ...] = ()
    mode: StartMode = StartMode.DIRECT

    def encode(self) -> bytes:
        """Return the FILE and START frames. Raises BadStart."""
        return b"".join(self._file_frames()) + self._start_frames()

    def _file_frames(self) -> list[bytes]:
        size = sum(len(file.data) for file in self.files)
        if len(self.files) > FILES_MAX or size > FILE_BYTES_MAX:
            raise BadStart(
                f"{len(self.files)} files of {size} bytes are too many: the limit is 16 "
                "files and 16 MiB"
            )
        parts = []
        for file in self.files:
            name = os.fsencode(file.name)
            bad = name in (b"", b".", b"..") or len(name) > 255 or b"/" in name
            if bad or any(byte < 32 or byte == 127 for byte in name):
                raise BadStart(f"{file.name!r} is not a valid file name")
            parts += [frame(FrameKind.FILE, 0, name), split_frames(FrameKind.FILE, 1, file.data)]
        return parts

    def _argv(self) -> list[bytes]:
        sent = {file.name for file in self.files}
        parts = []
        for arg in self.argv:
            if isinstance(arg, FileArg):
                if arg.name not in sent:
                    raise BadStart(f"an argument names the file {arg.name!r}, which is not sent")
                parts.append(element(Tag.FILEARG, _text(arg.name)))
            else:
                parts.append(element(Tag.ARG, _text(arg)))
        if not self.argv and self.mode is StartMode.DIRECT:
            raise BadStart("no command")
        return parts

    def _env(self) -> list[bytes]:
        parts = []
        env = dict(self.env) | ({"TERM": self.pty.term} if self.pty else {})
        for name, value in env.items():
            if not name or "=" in name:
                raise BadStart(f"{name!r} is not a valid name of an environment variable")
            parts.append(element(Tag.ENV, _text(f"{name}={value}")))
        return parts

    def _start_frames(self) -> bytes:
        parts = self._argv() + self._env()
        if self.cwd:
            parts.append(element(Tag.CWD, _text(self.cwd)))
        parts.append(element(Tag.UMASK, struct.pack("<I", self.umask & 0o777)))
        for number, (soft, hard) in self.limits.items():
            if not 0 <= number < 16:
                raise BadStart(f"unknown resource limit: {number}")
            limit = struct.pack("<BQQ", number, soft & (2**64 - 1), hard & (2**64 - 1))
            parts.append(element(Tag.RLIMIT, limit))
        if self.pty:
            parts.append(element(Tag.PTY, winsize(self.pty.rows, self.pty.columns)))
        if self.merge:
            parts.append(element(Tag.MERGE, b""))
        parts.append(element(Tag.MODE, bytes([self.mode])))
        payload = b"".join(parts)
        if len(payload) > START_MAX:
            raise BadStart(
                f"arguments and environment have {len(payload)} bytes, and the limit is {START_MAX}"
            )
        return split_frames(FrameKind.START, 0, payload) + frame(FrameKind.START, 1)


def _text(value: str) -> bytes:
    data = os.fsencode(value)
    if b"\0" in data:
        raise BadStart(f"{value[:80]!r} contains a NUL byte")
    return data + b"\0"
