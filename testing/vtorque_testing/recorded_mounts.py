"""Bind mounts that only the processes of a recorded node see.

A recorded node is a directory that simulates a node (:mod:`vtorque_testing.recorded`). Its
processes are those of the jobs that a test starts on this node.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000  # unshare(2)
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18  # mount(2)


@functools.cache
def user_namespace() -> int | None:
    """Return a descriptor of the user namespace of all recorded nodes; None for root.

    Call it before the nodes' processes are forked, so that they share the namespace. From another
    user namespace, the process that releases a job cannot read /proc of the job's daemons
    (ptrace(2), "Ptrace access mode checking"). Only the caller's ids are mapped.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        return None
    made, wait = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        for end in (made[0], wait[1]):
            os.close(end)
        code = ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER)
        os.write(made[1], bytes([ctypes.get_errno() if code else 0]))
        os.read(wait[0], 1)
        os._exit(0)
    for end in (made[1], wait[0]):
        os.close(end)
    try:
        (error,) = os.read(made[0], 1)
        if error:
            raise OSError(error, f"unshare: {os.strerror(error)}")
        process = Path(f"/proc/{pid}")
        (process / "setgroups").write_text("deny")
        (process / "uid_map").write_text(f"{uid} {uid} 1")
        (process / "gid_map").write_text(f"{gid} {gid} 1")
        return os.open(process / "ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(made[0])
        os.close(wait[1])
        os.waitpid(pid, 0)


def cover(covers: Mapping[Path, Path]) -> None:
    """Bind-mount each source over its target, only for this process and its children.

    Without root, the mounts are in :func:`user_namespace`. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = user_namespace()
    if namespace is not None:
        _check(libc.setns(namespace, _CLONE_NEWUSER), "setns")
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")
    for target, source in covers.items():
        flags = _MS_BIND | _MS_REC
        done = libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None)
        _check(done, f"mount --bind {source} {target}")


def _check(code: int, system_call: str) -> None:
    if code:
        raise OSError(ctypes.get_errno(), f"{system_call}: {os.strerror(ctypes.get_errno())}")
