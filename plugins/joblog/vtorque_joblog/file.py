"""One file of JSON lines for all jobs of the node, which many processes append to and turn over.

The directory is root's alone. A line is one write(2) to a file opened with O_APPEND. Who finds the
file too large or too old renames it under a lock on it; the others see that the name is another
file's now, and open that. The lock is one that only who may write can take (fcntl_locking(2)):
with flock(2) any user who can open the directory would hold up the node's jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import stat
import time
from pathlib import Path

from vtorque_core.api_log import entry_of
from vtorque_core.api_node import HostFault, require_root_owned

_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class JsonFile(logging.Handler):
    """Appends a JSON object a line.

    ``size``: bytes at which a new file is begun; ``seconds``: age of the first record, 0 for never;
    ``count``: how many older ones are kept.
    """

    def __init__(self, path: str, size: int, seconds: float, count: int) -> None:
        """Check the directory. Raises ConfigError if others than root can write it."""
        super().__init__()
        self._path = Path(path)
        if os.geteuid() == 0:
            require_root_owned(self._path.parent)
        self._size, self._seconds, self._count = size, seconds, count
        self._file = -1
        self._begun = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line. Raises OSError, HostFault (it is no regular file)."""
        if not self._is_current():
            self._open()
        if self._is_due():
            self._turn_over()
        line = json.dumps(entry_of(record), ensure_ascii=False).encode() + b"\n"
        if os.write(self._file, line) < len(line):
            os.write(self._file, b"\n")  # the disk is full; what follows shall be a line again
            raise OSError(28, os.strerror(28))

    def _is_current(self) -> bool:
        if self._file < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        self._close()
        self._file = os.open(self._path, _FLAGS, 0o640)
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise HostFault(f"{self._path} is no regular file")
        self._begun = _first(os.pread(self._file, 65536, 0)) or status.st_mtime

    def _is_due(self) -> bool:
        status = os.fstat(self._file)
        old = self._seconds and status.st_size and time.time() - self._begun > self._seconds
        return bool(old) or status.st_size >= self._size

    def _turn_over(self) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            if self._is_current():  # nobody was faster
                names = [self._path, *(self._older(n) for n in range(1, self._count + 1))]
                for old, older in reversed(list(itertools.pairwise(names))):
                    with contextlib.suppress(FileNotFoundError):
                        old.rename(older)
                if self._count == 0:
                    self._path.unlink()
        finally:
            self._close()  # and with it the lock
        self._open()

    def _older(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def close(self) -> None:
        """Close the file."""
        self._close()
        super().close()


def _first(head: bytes) -> float:
    """Return the time of a file's first line in Unix seconds; 0 if it has none."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return float(json.loads(head.partition(b"\n")[0])["t"])
    return 0.0
