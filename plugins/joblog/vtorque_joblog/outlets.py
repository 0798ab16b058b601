"""One thread per sink, which reads the logs from the sink's last position.

Undelivered lines wait only in the logs, and a sink that hangs or fails does not delay other sinks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vtorque_core.api import ConfigError, HostFault, printable
from vtorque_core.api.log_levels import LEVELS, TRACE

Entry = Mapping[str, Any]
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds until a failed sink is retried
_BLOCK = 1 << 16  # bytes that are read at once
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
log = logging.getLogger("joblog")


@dataclass(frozen=True)
class JobLog:
    """The log of one job attempt on this node. ``key`` is the job key."""

    uid: int
    key: str
    path: Path

    @property
    def name(self) -> str:
        """The name in :class:`vtorque_joblog.saved_offsets.SavedOffsets`: ``<uid>/<job key>``."""
        return f"{self.uid}/{self.key}"

    @property
    def size(self) -> int:
        """The size in bytes; 0 if the file is missing."""
        try:
            return self.path.lstat().st_size
        except OSError:
            return 0

    def open(self) -> int:
        """Return a descriptor for :func:`read_lines`. Raises OSError."""
        return os.open(self.path, _FLAGS)


class Offsets(Protocol):
    """A sink's progress in each log: ``saved_offsets.SavedOffsets`` or a proxy of it."""

    def offset_of(self, name: str) -> int:
        """Return the offset of the first byte that was not delivered."""
        ...

    def mark(self, name: str, offset: int) -> None:
        """Record that all bytes before the offset were delivered."""
        ...


class SinkThread:
    """One sink and its thread.

    ``wants`` selects the entries for the sink. The thread calls ``idle`` after it has
    delivered all entries.
    """

    def __init__(
        self,
        name: str,
        opening: Callable[[], logging.Handler],
        told: Offsets,
        idle: Callable[[], None] = lambda: None,
        wants: Callable[[Entry], bool] = lambda entry: True,
    ) -> None:
        self.name = name
        self._opening = opening
        self._told = told
        self._idle = idle
        self._wants = wants
        self._handler: logging.Handler | None = None
        self._changed = threading.Condition()
        self._logs: dict[str, JobLog] = {}
        self._torn: dict[str, int] = {}  # sizes of logs whose last line is incomplete
        self._working = False
        self._closing = False
        self._pause = _FIRST_PAUSE
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def give(self, job: JobLog) -> None:
        """Notify the sink's thread that a log may have more lines. Never blocks."""
        if not self.is_behind(job) or self._torn.get(job.name) == job.size:
            return
        with self._changed:
            self._logs[job.name] = job
            self._changed.notify()

    def is_behind(self, job: JobLog) -> bool:
        """Return whether a log has undelivered bytes."""
        return job.size > self._told.offset_of(job.name)

    @property
    def is_busy(self) -> bool:
        """True if entries remain to be delivered."""
        with self._changed:
            return bool(self._logs) or self._working

    def close(self, until: float) -> None:
        """Tell the thread to deliver the remaining entries and to close the sink.

        Wait for the end of the thread, at most until the monotonic time ``until``.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._logs or self._closing)
                logs, self._logs = self._logs, {}
                self._working = bool(logs)
                closing = self._closing
            if self._deliver_all(logs):
                self._wait_for_retry(logs)
            if closing:
                self._close_sink()
            with self._changed:
                self._working = False
            if not self.is_busy:
                self._idle()

    def _deliver_all(self, logs: Mapping[str, JobLog]) -> bool:
        """Deliver these logs; return whether the sink failed and needs a retry."""
        for job in logs.values():
            try:
                self._deliver(job)
            except Exception as error:  # a sink may be third-party code
                self._log_once(f"{type(error).__name__}: {error}")
                return True
        if logs and self._trouble:
            log.info("sink %s works again", self.name)
            self._trouble, self._pause = "", _FIRST_PAUSE
        return False

    def _wait_for_retry(self, logs: Mapping[str, JobLog]) -> None:
        with self._changed:
            self._logs = {**logs, **self._logs}
            self._changed.wait_for(lambda: self._closing, self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _deliver(self, job: JobLog) -> None:
        offset = self._told.offset_of(job.name)
        try:
            descriptor = job.open()
        except FileNotFoundError:  # deleted as too old
            return
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            for line in read_lines(descriptor, offset, job.size):
                if not line.endswith(b"\n"):
                    self._torn[job.name] = offset + len(line)
                    return  # the rest of the line may arrive later, or never
                self._give_line(line, job)
                offset += len(line)
                self._told.mark(job.name, offset)
        self._torn.pop(job.name, None)

    def _give_line(self, line: bytes, job: JobLog) -> None:
        """Deliver a line. Raises only errors that a retry may fix."""
        try:
            entry = json.loads(line)
            record = record_of(entry, job)
        except (ValueError, TypeError, KeyError, AttributeError):  # torn by a full disk
            return
        if not self._wants(entry):
            return
        if self._handler is None:
            self._handler = self._opening()
            self._handler.handleError = _raise  # type: ignore[method-assign]
        try:
            self._handler.handle(record)
        except (OSError, HostFault, ConfigError):
            raise
        except Exception as error:
            self._log_once(f"{type(error).__name__}: {error}; one line is lost")

    def _close_sink(self) -> None:
        handler, self._handler = self._handler, None
        try:
            if handler is not None:
                handler.close()
        except Exception as error:
            self._log_once(f"{type(error).__name__}: {error}")

    def _log_once(self, trouble: str) -> None:
        if not self._trouble:
            log.warning("sink %s: %s", self.name, printable(trouble, 500))
        self._trouble = trouble


def read_lines(descriptor: int, offset: int, end: int) -> Iterator[bytes]:
    """Yield the lines of a file between two offsets; the last may lack its newline.

    The file position does not change, because other threads may share the descriptor. Raises
    OSError.
    """
    rest = b""
    while block := os.pread(descriptor, min(_BLOCK, max(0, end - offset)), offset):
        offset += len(block)
        *whole, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def _raise(record: logging.LogRecord) -> None:
    raise  # noqa: PLE0704 - handlers call this inside their except block


def record_of(entry: Entry, job: JobLog) -> logging.LogRecord:
    """Convert an entry to a log record. Raises KeyError or TypeError for an incomplete entry."""
    own = {k: entry[k] for k in ("job", "node", "guest", "phase", "plugin")}
    own |= {"name": entry["logger"], "levelno": level_of(entry), "levelname": entry["level"]}
    own |= {"msg": entry["message"], "args": None, "created": entry["t"]}
    return logging.makeLogRecord(own | {"entry": entry, "uid": job.uid, "key": job.key})


def level_of(entry: Entry) -> int:
    """Return the numeric level of an entry."""
    return LEVELS.get(entry["level"], TRACE)
