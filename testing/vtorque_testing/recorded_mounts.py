"""What the processes of a recorded node find elsewhere than the rest of this host."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000  # unshare(2)
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18  # mount(2)


def cover(covers: Mapping[Path, Path]) -> None:
    """Mount what is to be found elsewhere, for this process and its children alone.

    Without root in a user namespace, in which all ids but the caller's are nobody's.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    _check(libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if uid else 0)), "unshare")
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")
    for target, source in covers.items():
        flags = _MS_BIND | _MS_REC
        done = libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None)
        _check(done, f"mount --bind {source} {target}")


def _check(code: int, what: str) -> None:
    if code:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
