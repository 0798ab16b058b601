"""A process that only holds the lock file of a user's daemon."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLDS = """
import fcntl, signal, sys
lock = open(sys.argv[1], "r+")
fcntl.flock(lock, fcntl.LOCK_EX)
fcntl.lockf(lock, fcntl.LOCK_EX)
print(flush=True)
signal.pause()
"""


@contextmanager
def holding(lock: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process that has the lock; it is killed at the end."""
    argv = (sys.executable, "-c", _HOLDS, str(lock))
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process
        finally:
            process.kill()
