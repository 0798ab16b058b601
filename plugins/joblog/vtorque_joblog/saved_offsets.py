"""Save the offset in each job's log up to which a sink has received the log.

After a restart or kill, the log follower continues at this offset.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection
from pathlib import Path

_MAX_BYTES = 1 << 20  # size of the file at which outdated lines are removed
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
log = logging.getLogger("joblog")


class SavedOffsets:
    """A file of lines ``<offset> <name>``. The last line of each ``name`` is valid.

    If the disk is full, progress is only in memory, and each call of :meth:`mark` retries the
    write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._size = 0
        self._at: dict[str, int] = {}
        self._lock = threading.Lock()
        self._said = ""
        self.is_new = not path.exists()
        if not self.is_new:
            for line in path.read_text("utf-8", "replace").splitlines():
                offset, _, name = line.partition(" ")
                if name and offset.isdecimal():
                    self._at[name] = int(offset)

    def offset_of(self, name: str) -> int:
        """Return the offset of the first byte that was not delivered; 0 for an unknown log."""
        return self._at.get(name, 0)

    def mark(self, name: str, offset: int) -> None:
        """Record that all bytes before the offset were delivered."""
        with self._lock:
            self._at[name] = offset
            line = f"{offset} {name}\n".encode()
            try:
                if self._file < 0 or self._size > _MAX_BYTES:
                    self._rewrite()
                    return
                if os.write(self._file, line) < len(line):
                    raise OSError(28, os.strerror(28))
                self._size += len(line)
            except OSError as error:
                self._close()
                self._log_error(error)

    def start_at(self, name: str, offset: int) -> None:
        """Set the offset of a log that is older than this sink; :meth:`keep` saves the offset."""
        self._at[name] = offset

    def keep(self, names: Collection[str]) -> None:
        """Forget all logs except ``names``, and rewrite the file."""
        with self._lock:
            self._at = {name: at for name, at in self._at.items() if name in names}
            try:
                self._rewrite()
            except OSError as error:
                self._log_error(error)

    def _rewrite(self) -> None:
        self._close()
        new = self._path.with_name(f"{self._path.name}.new")
        new.unlink(missing_ok=True)
        content = "".join(f"{at} {name}\n" for name, at in self._at.items()).encode()
        descriptor = os.open(new, _FLAGS, 0o600)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            if os.write(descriptor, content) < len(content):
                raise OSError(28, os.strerror(28))
            new.replace(self._path)
            undo.pop_all()
        self._file, self._size, self._said = descriptor, 0, ""

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _log_error(self, error: OSError) -> None:
        if not self._said:
            log.warning(
                "cannot write %s: %s. After a restart, vTorque sends some lines to the sink again",
                self._path,
                error.strerror,
            )
        self._said = str(error)
