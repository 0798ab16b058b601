"""A job's log on this node: records of core and plugins, kept as JSON lines for its owner to read.

As root, in prologue, starter, epilogue and reaper: while a log is :func:`opened`, all that is
logged under ``vtorque_*`` goes to ``log.jsonl`` in the job's kept place and to plugins' sinks, from
this process and from those that it forks. An inner log (the reaper's, in a prologue) has all until
it ends.

Nothing here raises, and nothing waits but for the disk. What a guest or a user may have said is
bounded and escaped once, in :func:`entry`, for all readers and sinks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vtorque_core import kept
from vtorque_core.errors import HostFault, printable
from vtorque_core.log_levels import ALL, ERROR, NOTHING, TRACE, Levels, name_of
from vtorque_core.names import Paths, job_key

FILE = "log.jsonl"
MAX_MESSAGE = 4096  # characters of one message
MAX_DETAIL = 60  # lines after it (a traceback, a console's end), of 200 characters
MAX_LOG = 4 << 20  # bytes of a job's log on one node
_END = 256 << 10  # bytes beyond that for errors and the last line
_LAST = "vtorque_core.timings"  # the logger of the last line

_guest: ContextVar[int | None] = ContextVar("guest", default=None)
_plugin: ContextVar[str] = ContextVar("plugin", default="")
_open: list[Log] = []
_forgotten: list[Log] = []
logging.addLevelName(TRACE, "TRACE")


class Sinks(Protocol):
    """Where lines go beside the file."""

    def send(self, line: bytes, *, asked: bool) -> None:
        """Give it a line, or lose it. Never blocks or raises."""
        ...

    def end(self) -> list[str]:
        """End it, within a short deadline; return what went wrong, a line each."""
        ...


@dataclass
class Log:
    """The log of one job attempt on this node.

    ``site`` and ``asked`` are the levels that the site and the job's user want; ``phase`` the one
    that the job is in. ``sinks`` starts what gets the lines too; None if there is nothing.
    """

    paths: Paths
    job: str
    attempt: int
    uid: int
    node: str
    site: Levels
    asked: Levels = NOTHING
    phase: str = ""
    sinks: Callable[[], Sinks | None] | None = field(default=None, repr=False)
    _file: int | None = field(default=None, repr=False)
    _running: Sinks | None = field(default=None, repr=False)
    _torn: bool = field(default=False, repr=False)
    _told: set[str] = field(default_factory=set, repr=False)

    @property
    def key(self) -> str:
        """The name of the attempt, as journal and directories carry it."""
        return job_key(self.job, self.attempt)

    @property
    def place(self) -> kept.Place:
        """Where the job's files are kept."""
        return kept.place(self.paths, self.uid, self.job, self.attempt)

    def again(self) -> Log:
        """Return a log of the same job with nothing open, for a process that goes its own way."""
        return replace(self, _file=None, _running=None, _torn=False, _told=set())

    def begin(self) -> None:
        """Open the file and start the sinks, as well as that can be done."""
        try:
            self._file = self.place.append(FILE)
        except (OSError, HostFault) as error:
            self.complain(f"{self.place.directory / FILE}: {error}")
        try:
            self._running = self.sinks() if self.sinks is not None else None
        except OSError as error:
            self.complain(f"no sinks: {error}")

    def end(self) -> None:
        """End the sinks, close the file."""
        if self._running is not None:
            running, self._running = self._running, None
            for trouble in running.end():
                self.complain(trouble)
                logging.getLogger(__name__).warning("%s", trouble)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def take(self, record: logging.LogRecord) -> None:
        """Write a record to file and sinks if anybody wants it. Never raises."""
        try:
            wanted = record.levelno >= self.site.level(record.name)
            if not record.name.startswith("vtorque_"):
                return
            if not wanted and record.levelno < self.asked.level(record.name):
                return
            line = json.dumps(entry(record, self), ensure_ascii=False).encode() + b"\n"
            self._write(line, record)
            if self._running is not None:
                self._running.send(line, asked=not wanted)
            if record.levelno >= logging.CRITICAL:
                to_syslog(f"{self.job}: {line.decode().strip()}")
        except Exception as error:  # what a plugin gives to show may raise anything
            self.complain(f"a record of {printable(record.name)} is lost: {type(error).__name__}")

    def _write(self, line: bytes, record: logging.LogRecord) -> None:
        if self._file is None:
            return
        try:
            size = os.fstat(self._file).st_size
            if size >= MAX_LOG:
                urgent = record.levelno >= ERROR or record.name == _LAST
                if size >= MAX_LOG + _END or (not urgent and "full" in self._told):
                    return
                if "full" not in self._told:
                    self._told.add("full")
                    line = (line if urgent else b"") + self._full()
            data = b"\n" + line if self._torn else line
            self._torn = os.write(self._file, data) < len(data)
            if self._torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.complain(f"{self.place.directory / FILE}: {error.strerror}")

    def _full(self) -> bytes:
        text = f"the log has {MAX_LOG >> 20} MiB: only errors and its end are added"
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None)
        return json.dumps(entry(record, self)).encode() + b"\n"

    def complain(self, text: str) -> None:
        """Tell syslog what is wrong with the log, each thing once."""
        if text not in self._told:
            self._told.add(text)
            to_syslog(f"{self.job}: log: {text}")


class _Handler(logging.Handler):
    """What the root logger has: gives records to the innermost open log."""

    def emit(self, record: logging.LogRecord) -> None:
        if _open:
            _open[-1].take(record)


_handler = _Handler()


@contextlib.contextmanager
def opened(log: Log) -> Iterator[Log]:
    """Have this log, or the one of the same job attempt that is open, get what is logged.

    Call it with no other thread running: sinks are forked.
    """
    if _open and _open[-1].key == log.key:
        yield _open[-1]
        return
    before = {name: logger.level for name, logger in _loggers()}
    log.begin()
    _open.append(log)
    logging.getLogger().addHandler(_handler)
    set_levels()
    try:
        yield log
    finally:
        log.end()
        if log in _open:
            _open.remove(log)
        for name, logger in _loggers():
            logger.setLevel(before.get(name, logging.NOTSET))
        if not _open:
            logging.getLogger().removeHandler(_handler)


def forget() -> None:
    """Have no log open, in a forked process that goes its own way. Nothing is closed.

    Descriptors may be another's here by now: what has them stays referenced for ever.
    """
    _forgotten.extend(_open)
    _open.clear()


def current() -> Log | None:
    """Return the log that gets what is logged now."""
    return _open[-1] if _open else None


def enter(phase: str) -> None:
    """Have what is logged from now on be of this phase of the job."""
    if _open:
        _open[-1].phase = phase


def ask(asked: Levels) -> None:
    """Log also what the job's user wants; the site's policy has granted it."""
    if _open:
        _open[-1].asked = asked
        set_levels()


def defect(job_id: str) -> None:
    """Log the exception that is being handled, with its traceback, and tell syslog of it."""
    error = sys.exc_info()[1]
    if _open:
        what = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).critical("%s", what, exc_info=error)
    else:
        to_syslog(f"{job_id}: {traceback.format_exc()}")


@contextlib.contextmanager
def about(guest: int | None = None, plugin: str = "") -> Iterator[None]:
    """Have what this thread logs be of a guest (index on this node), or of a plugin."""
    tokens = _guest.set(guest), _plugin.set(plugin)
    try:
        yield
    finally:
        _guest.reset(tokens[0])
        _plugin.reset(tokens[1])


def set_levels() -> None:
    """Have each logger make the records that the innermost open log may want."""
    if _open:
        one = _open[-1]
        for name in {ALL, *one.site.of, *one.asked.of}:
            level = min(one.site.level(name), one.asked.level(name))
            logging.getLogger("" if name == ALL else name).setLevel(level)


def _loggers() -> list[tuple[str, logging.Logger]]:
    known = list(logging.root.manager.loggerDict.items())
    found = [(name, each) for name, each in known if isinstance(each, logging.Logger)]
    return [("", logging.getLogger()), *(x for x in found if x[0].startswith("vtorque_"))]


def entry(record: logging.LogRecord, log: Log) -> dict[str, Any]:
    """Return a record as the log has it: bounded, without what a terminal would obey."""
    own = record.__dict__
    guest = own.get("guest", _guest.get())
    package = record.name.partition(".")[0].removeprefix("vtorque_").replace("_", "-")
    plugin = (_plugin.get() or package) if package == "core" else package
    found: dict[str, Any] = {
        "t": round(record.created, 6),
        "level": name_of(record.levelno),
        "logger": shown(record.name, 100),
        "plugin": shown(plugin, 100),
        "phase": shown(log.phase, 100),
        "guest": guest if isinstance(guest, int) else None,
        "node": log.node,
        "job": log.job,
        "message": shown(_message(record), MAX_MESSAGE),
    }
    detail = [*map(str, own.get("detail", ())), *_traceback(record)]
    if detail:
        found["detail"] = [shown(line, 200) for line in detail[-MAX_DETAIL:]]
    return found


def shown(text: str, limit: int) -> str:
    """Return text as :func:`vtorque_core.errors.printable` does, fast also for a long one."""
    whole = printable(text[:limit], limit)
    return whole if len(text) <= limit else f"{whole}... ({len(text)} characters)"


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # %d of a text, an object that cannot be shown
        return f"a message that cannot be shown ({type(error).__name__}): {str(record.msg)[:200]}"


def _traceback(record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[1] is None:
        return []
    text = "".join(traceback.format_exception(record.exc_info[1], limit=-15))
    return text[-64 * MAX_DETAIL * 4 :].splitlines()


def to_syslog(text: str) -> None:
    """Send one line to the host's syslog as an error. Never blocks: if it is full the line is lost.

    Format: RFC 3164, facility daemon (3), severity error (3), as syslog(3) of glibc sends it.
    """
    line = f"<{3 << 3 | 3}>vtorque[{os.getpid()}]: {shown(text, MAX_MESSAGE)}"
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection,
    ):
        connection.setblocking(False)
        connection.connect("/dev/log")
        connection.send(line.encode())
