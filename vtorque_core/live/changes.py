"""Public, for a plugin's node-wide process: be told when a directory changes (inotify(7))."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NAMES = 0x80 | 0x100 | 0x200  # IN_MOVED_TO, IN_CREATE, IN_DELETE
_CONTENT = 0x2  # IN_MODIFY


def events() -> int:
    """Return a non-blocking descriptor that is readable when what it watches has changed.

    What is read from it says nothing but that; look again.
    """
    return int(ctypes.CDLL(None, use_errno=True).inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))


def watch(descriptor: int, directory: Path, *, content: bool = True) -> int:
    """Watch a directory: which files it has and, with ``content``, what is written to them.

    Return a number for :func:`unwatch`; a directory that is removed needs none. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    mask = _NAMES | (_CONTENT if content else 0)
    number = int(libc.inotify_add_watch(descriptor, os.fsencode(directory), mask))
    if number < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot watch {directory}: {os.strerror(code)}")
    return number


def unwatch(descriptor: int, number: int) -> None:
    """Watch a directory no more; nothing happens if it is gone."""
    ctypes.CDLL(None).inotify_rm_watch(descriptor, number)
