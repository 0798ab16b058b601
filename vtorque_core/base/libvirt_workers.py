"""How many calls for guests may wait in libvirtd at once: no user keeps all of its workers.

A worker waits as long as a QEMU does that starts. libvirtd has 20 (libvirtd.conf, max_workers), of
which starts get 18. Eight are whose comes first, and one user's job may have them all; of the ten
others a user has one at most.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator

from vtorque_core.base.errors import HostFault
from vtorque_core.base.names import Paths

ANYBODYS, ONE_EACH = range(8), range(8, 18)
_POLL = 0.01  # seconds; no lock tells that it is free before a time limit


@contextlib.contextmanager
def worker(paths: Paths, uid: int, deadline: float, failed: threading.Event) -> Iterator[None]:
    """Hold the right to have one of libvirtd's workers wait for a start of this user's.

    As root, in any thread: a lock on one byte of the node's lock file, which ends with its holder
    (fcntl(2), open file description locks: flock(2) has nothing to do with them). ``deadline``: of
    the start, time.monotonic(); ``failed``: another guest of the job has failed. Raises HostFault
    then.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(paths.node_lock, flags, 0o600)
    except OSError as error:
        raise HostFault(f"{paths.node_lock}: {error.strerror}", stage="boot") from None
    try:
        own = len(ANYBODYS) + len(ONE_EACH) + uid
        alone = False
        while not any(_locked(file, byte) for byte in ANYBODYS):
            alone = alone or _locked(file, own)
            if alone and any(_locked(file, byte) for byte in ONE_EACH):
                break
            if failed.is_set():
                raise HostFault("another guest of the job has not started", stage="boot")
            if time.monotonic() >= deadline:
                raise HostFault("no time left: too many guests start now", stage="boot")
            time.sleep(_POLL)
        yield
    finally:
        os.close(file)


def _locked(file: int, byte: int) -> bool:
    """Return whether this byte could be locked at once."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, byte, 1, 0))
    except BlockingIOError:
        return False
    return True
