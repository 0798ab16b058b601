"""File locks of this node (flock(2)).

Acquire the job's lock before the node's lock. A process that holds a job's lock may acquire it
again. The node's lock excludes other threads of the process, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.names import Paths

_POLL = 0.01  # seconds between two tries; flock(2) has no time limit
_held: dict[str, int] = {}  # path to descriptor, of this process
# Re-entrant, so that a child can acquire it that is forked while this thread holds it.
_node_threads = threading.RLock()


def lock_holder(descriptor: int) -> int | None:
    """Return the pid of the holder of a file's POSIX lock (fcntl(2), F_GETLK), or None."""
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
    kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(pid)


def holder_of(path: Path | str) -> int | None:
    """Return the pid of the holder of a POSIX lock on a path. Ignores locks of other machines."""
    with safefs.closing(_open_lock(path)) as descriptor:
        pid = lock_holder(descriptor)
    return pid if pid and pid > 0 else None


def _open_lock(path: Path | str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def open_daemon_lock(path: str) -> int | None:
    with safefs.name_errors(f"lock {path}"), contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None


class Busy(HostFault):
    """Another process holds the lock."""


def take_lock(path: Path, wait: float) -> int:
    """Acquire a lock file within ``wait`` seconds and return its descriptor.

    Creates the file and its directory (0700).
    """
    end = time.monotonic() + wait
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with safefs.name_errors(f"lock {path}"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, flags, 0o600)
            try:
                if not try_flock(descriptor, fcntl.LOCK_EX, end):
                    owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                    raise Busy(f"{path} is held by another process (pid {owner or 'unknown'})")
                if _is_file(descriptor, path):
                    # fixed length: ext4 would flush a truncated and rewritten file to disk
                    os.pwrite(descriptor, f"{os.getpid():<31}\n".encode(), 0)
                    return descriptor
            except BaseException:
                os.close(descriptor)  # otherwise this process holds the lock
                raise
            os.close(descriptor)  # the last holder has removed the file


def try_flock(descriptor: int, kind: int, end: float) -> bool:
    """Try to acquire LOCK_EX or LOCK_SH until ``end`` (monotonic)."""
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL)
        else:
            return True


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


@contextlib.contextmanager
def job_lock(paths: Paths, job_id: str, wait: float = 60.0) -> Iterator[None]:
    """Hold the lock of a job (of all attempts), then remove the lock file. Raises Busy."""
    path = paths.job_lock(job_id)
    if str(path) in _held:
        yield
        return
    descriptor = take_lock(path, wait)
    _held[str(path)] = descriptor
    try:
        yield
    finally:
        if _held.pop(str(path), None) is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def job_lock_holder(paths: Paths, job_id: str) -> int | None:
    with (
        contextlib.suppress(FileNotFoundError),
        safefs.closing(_open_lock(paths.job_lock(job_id))) as lock,
    ):
        if not try_flock(lock, fcntl.LOCK_SH, 0.0):
            return int(os.pread(lock, 32, 0) or 0)
    return None


@contextlib.contextmanager
def node_lock(paths: Paths, wait: float = 60.0) -> Iterator[None]:
    """Hold the node's lock, which protects leases and node-wide resources. Raises Busy."""
    if not _node_threads.acquire(timeout=max(wait, 0)):
        raise Busy(f"{paths.node_lock} is held by another thread")
    try:
        descriptor = take_lock(paths.node_lock, wait)
        _held[str(paths.node_lock)] = descriptor
        try:
            yield
        finally:
            if _held.pop(str(paths.node_lock), None) is not None:
                os.close(descriptor)
    finally:
        _node_threads.release()


def close_inherited() -> None:
    """Close inherited lock files in a forked child, so that only the parent holds the locks."""
    for descriptor in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


ANYBODYS, ONE_EACH = range(8), range(8, 18)
"""Bytes of the node's lock file, one for each reservable worker (:func:`libvirt_worker`)."""


@contextlib.contextmanager
def libvirt_worker(
    paths: Paths, uid: int, deadline: float, failed: threading.Event
) -> Iterator[None]:
    """Reserve one of libvirtd's worker threads for an operation, within the user's limit.

    vTorque reserves at most 18 of libvirtd's 20 workers (libvirtd.conf, max_workers). Eight of them
    have no limit per user. A user can reserve only one of the other ten. Thread-safe.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with safefs.name_errors(paths.node_lock, stage="boot"):
        file = os.open(paths.node_lock, flags, 0o600)
    with safefs.closing(file):
        own = len(ANYBODYS) + len(ONE_EACH) + uid
        alone = False
        while not any(_try_lock(file, byte) for byte in ANYBODYS):
            alone = alone or _try_lock(file, own)
            if alone and any(_try_lock(file, byte) for byte in ONE_EACH):
                break
            if failed.is_set():
                raise HostFault("another guest of the job failed to start", stage="boot")
            if time.monotonic() >= deadline:
                raise HostFault(
                    "no worker of libvirtd became free in time: too many guests of this node are "
                    "being started or suspended at once",
                    stage="boot",
                )
            time.sleep(_POLL)
        yield


def _try_lock(file: int, byte: int) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, byte, 1, 0))
    except BlockingIOError:
        return False
    return True
