"""Watch directories for changes (inotify(7))."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NAMES = 0x80 | 0x100 | 0x200  # IN_MOVED_TO, IN_CREATE, IN_DELETE
_CONTENT = 0x2  # IN_MODIFY


def events() -> int:
    """Return a nonblocking descriptor that becomes readable after a change in a watched directory.

    The events do not identify the change.
    """
    return int(ctypes.CDLL(None, use_errno=True).inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))


def watch(descriptor: int, directory: Path, *, content: bool = True) -> int:
    """Watch a directory for new and removed files and, with ``content``, for writes.

    Returns a number for :func:`unwatch`. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    mask = _NAMES | (_CONTENT if content else 0)
    number = int(libc.inotify_add_watch(descriptor, os.fsencode(directory), mask))
    if number < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot watch {directory}: {os.strerror(code)}")
    return number


def unwatch(descriptor: int, number: int) -> None:
    """Stop watching a directory. Not needed for a removed directory."""
    ctypes.CDLL(None).inotify_rm_watch(descriptor, number)
