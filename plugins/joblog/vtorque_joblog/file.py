"""A file of JSON lines for all jobs of the node. logrotate(8) rotates it.

Only root can write the directory, and only a root process has the file open: any process with the
file's descriptor could truncate or overwrite it, because fcntl(2) can clear O_APPEND. The root
process reads only logs that root has written.

A line is one write(2). After the file was renamed or removed, the next line starts a new file
(``logging.handlers.WatchedFileHandler``).
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import stat
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, require_root_owned
from vtorque_joblog.api import entry_of

_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_LINE = 1 << 20


class JsonFile(WatchedFileHandler):
    """Appends one JSON object per line.

    The log follower may be killed after it has written a line and before it has saved its progress.
    The next follower then delivers the line's entry again, before other entries of the job.
    Therefore a new JsonFile reads the last line of the file. Of the job in this line, it skips the
    first entry that it is to write, if this entry equals the line.
    """

    def __init__(self, path: str) -> None:
        if os.geteuid() == 0:
            require_root_owned(Path(path).parent)
        super().__init__(path)
        self._last = _last_line(self._open_raw())

    def _open(self) -> Any:
        """Open the file unbuffered: otherwise a retry after a full disk would repeat a line."""
        descriptor = os.open(self.baseFilename, _FLAGS, 0o640)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise HostFault(f"{self.baseFilename} is not a regular file")
            undo.pop_all()
        return io.FileIO(descriptor, "a+")

    def _open_raw(self) -> int:
        assert self.stream is not None  # noqa: S101 - opened by __init__
        return self.stream.fileno()

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line, completely or not at all. Raises OSError, HostFault."""
        entry = entry_of(record)
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        last = self._last
        if last and entry["job"] == _job_of(last):
            self._last = b""
            if line == last:
                return
        if self.stream is None:  # the last attempt to reopen the file failed
            self.stream = self._open()
            self._statstream()
        self.reopenIfNeeded()
        before = os.fstat(self._open_raw()).st_size
        written = os.write(self._open_raw(), line)
        if written < len(line):
            if os.fstat(self._open_raw()).st_size == before + written:
                os.ftruncate(self._open_raw(), before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _job_of(line: bytes) -> object:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return json.loads(line)["job"]
    return None


def _last_line(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    end = os.pread(descriptor, _MAX_LINE, max(0, size - _MAX_LINE))
    return end[end.rfind(b"\n", 0, -1) + 1 :]
