"""Descriptors that a user sends: only those of terminals are kept.

close(2) of a file in a FUSE file system waits for an answer of its owner's, also in every process
that is forked meanwhile. So does almost any question about it, but not those that are asked here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import threading
import time
from pathlib import Path

_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x1000, 0x4000  # statx(2)
_STATX_TYPE = 1
_STATX_SIZE = 256  # bytes of struct statx
_MODE, _RDEV_MAJOR = 28, 128  # offsets in it, in bytes (linux/stat.h)
_GONE = 1.0  # seconds until close(2) has taken a number from the table, which it does first


def receive(client: socket.socket, most: int, alone: threading.Lock) -> tuple[bytes, list[int]]:
    """Return a message's first byte and the terminals that came with it.

    Args:
        client: a Unix socket, which may have a time-out.
        most: how many descriptors are taken; more are lost.
        alone: held while one is here that may be no terminal's: nothing may fork then.

    Raises OSError.
    """
    client.recv(1, socket.MSG_PEEK)  # takes no descriptor
    with alone:
        first, found, *_ = socket.recv_fds(client, 1, most, socket.MSG_CMSG_CLOEXEC)
        terminals = _terminals() if found else set()
        kept = [each for each in found if _device(each) in terminals]
        for each in found:
            if each not in kept:
                _drop(each)
    return first, kept


def _device(descriptor: int) -> int | None:
    """Return the major number of a character device; None: it is none. Asks no file system."""
    buffer = ctypes.create_string_buffer(_STATX_SIZE)
    flags = _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC
    if _libc.statx(descriptor, b"", flags, _STATX_TYPE, buffer) != 0:
        return None
    (mode,) = struct.unpack_from("H", buffer, _MODE)
    (major,) = struct.unpack_from("I", buffer, _RDEV_MAJOR)
    return int(major) if stat.S_ISCHR(mode) else None


_libc = ctypes.CDLL(None)


def _terminals() -> set[int]:
    """Return the major numbers of terminals, those of proc_tty_drivers(5)."""
    lines = Path("/proc/tty/drivers").read_text().splitlines()
    return {int(line.split()[-3]) for line in lines}


def _drop(descriptor: int) -> None:
    """Close it in a thread of its own; return as soon as no process that is forked can have it."""
    what = _what(descriptor)
    threading.Thread(target=_close, args=(descriptor,), daemon=True).start()
    end = time.monotonic() + _GONE
    while _what(descriptor) == what != "" and time.monotonic() < end:
        time.sleep(0.0005)


def _what(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - may be no path
    except OSError:
        return ""


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
