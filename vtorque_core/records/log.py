"""Write a job's log on this node. As root. Functions ignore all errors.

While :func:`open_log` is active, messages of ``vtorque_*`` loggers of this process and its children
go to ``log.jsonl`` in the job's kept records.
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
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vtorque_core.api import kept_records, log_levels
from vtorque_core.base.errors import HostFault, printable
from vtorque_core.base.names import JobAttempt, Paths

MAX_MESSAGE = 4096  # characters of one message
MAX_DETAIL = 60  # lines after it (a traceback, a console's end), of 200 characters
MAX_LOG = 4 << 20  # bytes of a job's log on one node
_END = 256 << 10  # bytes beyond that for errors and the last line
LAST = "vtorque_core.timings"  # the logger of the last line

_guest: ContextVar[int | None] = ContextVar("guest", default=None)
_plugin: ContextVar[str] = ContextVar("plugin", default="")
_open: list[Log] = []
logging.addLevelName(log_levels.TRACE, "TRACE")


@dataclass
class Log:
    paths: Paths
    job: JobAttempt
    site: log_levels.Levels
    asked: log_levels.Levels = log_levels.NOTHING
    phase: str = ""
    _file: int | None = field(default=None, repr=False)
    _torn: bool = field(default=False, repr=False)
    _told: set[str] = field(default_factory=set, repr=False)

    @property
    def place(self) -> kept_records.Place:
        return kept_records.place(self.paths, self.job)

    def begin(self) -> None:
        try:
            self._file = self.place.append(kept_records.LOG)
        except (OSError, HostFault) as error:
            self.complain(f"{self.place.directory / kept_records.LOG}: {error}")

    def end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def write_record(self, record: logging.LogRecord) -> None:
        try:
            if not record.name.startswith("vtorque_"):
                return
            plugin = _plugin_of(record)
            wanted = record.levelno >= self.site.minimum(plugin, self.phase)
            if not wanted and record.levelno < self.asked.minimum(plugin, self.phase):
                return
            line = json.dumps(entry(record, self), ensure_ascii=False).encode() + b"\n"
            self._write(line, record)
            if record.levelno >= logging.CRITICAL:
                to_syslog(f"{self.job.id}: {line.decode().strip()}")
        except Exception as error:  # a plugin's arguments may raise anything
            self.complain(f"a record of {printable(record.name)} is lost: {type(error).__name__}")

    def _write(self, line: bytes, record: logging.LogRecord) -> None:
        if self._file is None:
            return
        try:
            size = os.fstat(self._file).st_size
            if size >= MAX_LOG:
                urgent = record.levelno >= log_levels.ERROR or record.name == LAST
                if size >= MAX_LOG + _END or (not urgent and "full" in self._told):
                    return
                if "full" not in self._told:
                    self._told.add("full")
                    line = (line if urgent else b"") + self._full_message()
            data = b"\n" + line if self._torn else line
            self._torn = os.write(self._file, data) < len(data)
            if self._torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.complain(f"{self.place.directory / kept_records.LOG}: {error.strerror}")

    def _full_message(self) -> bytes:
        text = f"the log has {MAX_LOG >> 20} MiB: only errors and its end are added"
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None)
        return json.dumps(entry(record, self)).encode() + b"\n"

    def complain(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            to_syslog(f"{self.job.id}: log: {text}")


def teardown_log(paths: Paths, job: JobAttempt) -> Log:
    """Return the log for the teardown of a job, with the log levels of the job if known."""
    log = Log(paths, job, log_levels.parse("INFO"))
    known = log.place.facts()
    log.job = replace(job, node=str(known.get("node") or socket.gethostname()))
    texts = known.get("log")
    if isinstance(texts, list) and len(texts) == 2:
        site, log.asked = map(_levels, texts)
        log.site = site or log.site
    return log


def _levels(text: object) -> log_levels.Levels:
    try:
        return log_levels.parse(str(text))
    except ValueError:
        return log_levels.NOTHING


def facts() -> dict[str, Any]:
    return {"log": [_open[-1].site.text, _open[-1].asked.text] if _open else []}


class _JobLogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if _open:
            _open[-1].write_record(record)


_handler = _JobLogHandler()


@contextlib.contextmanager
def open_log(log: Log) -> Iterator[Log]:
    """Direct log messages to ``log``. If this attempt's log is already open, use the open log."""
    if _open and _open[-1].job.key == log.job.key:
        yield _open[-1]
        return
    before = logging.getLogger().level
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
        logging.getLogger().setLevel(before)
        if not _open:
            logging.getLogger().removeHandler(_handler)


@contextlib.contextmanager
def reopen_log() -> Iterator[None]:
    """Reopen the current log in a forked process that outlives its parent."""
    before = _open.copy()
    _open.clear()
    mine = [open_log(replace(log, _file=None, _torn=False, _told=set())) for log in before[-1:]]
    with mine[0] if mine else contextlib.nullcontext():
        yield


def enter(phase: str) -> None:
    if _open:
        _open[-1].phase = phase


def apply_request(asked: log_levels.Levels) -> None:
    if _open:
        _open[-1].asked = asked
        set_levels()


def log_defect(job_id: str) -> None:
    error = sys.exc_info()[1]
    if _open:
        what = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).critical("%s", what, exc_info=error)
    else:
        to_syslog(f"{job_id}: {traceback.format_exc()}")


@contextlib.contextmanager
def log_context(guest: int | None = None, plugin: str = "") -> Iterator[None]:
    """Attribute this thread's log messages to a guest (index on this node) or plugin."""
    tokens = _guest.set(guest), _plugin.set(plugin)
    try:
        yield
    finally:
        _guest.reset(tokens[0])
        _plugin.reset(tokens[1])


def set_levels() -> None:
    if _open:
        levels = [*_open[-1].site.of.values(), *_open[-1].asked.of.values()]
        logging.getLogger().setLevel(min(levels, default=log_levels.QUIET))


def _plugin_of(record: logging.LogRecord) -> str:
    plugin = log_levels.plugin_of(record.name)
    return (_plugin.get() or plugin) if plugin == "core" else plugin


def entry(record: logging.LogRecord, log: Log) -> dict[str, Any]:
    own = record.__dict__
    guest = own.get("guest", _guest.get())
    found: dict[str, Any] = {
        "t": round(record.created, 6),
        "level": log_levels.name_of(record.levelno),
        "logger": shorten(record.name, 100),
        "plugin": shorten(_plugin_of(record), 100),
        "phase": shorten(log.phase, 100),
        "guest": guest if isinstance(guest, int) else None,
        "node": log.job.node,
        "job": log.job.id,
        "message": shorten(_message(record), MAX_MESSAGE),
    }
    detail = [*map(str, own.get("detail", ())), *_traceback(record)]
    if detail:
        found["detail"] = [shorten(line, 200) for line in detail[-MAX_DETAIL:]]
    return found


def shorten(text: str, limit: int) -> str:
    """Make a text printable. Shorten a text above ``limit`` characters, and append its length."""
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
    """Send one error line to syslog (RFC 3164). Never blocks."""
    line = f"<{3 << 3 | 3}>vtorque[{os.getpid()}]: {shorten(text, MAX_MESSAGE)}"
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection,
    ):
        connection.setblocking(False)
        connection.connect("/dev/log")
        connection.send(line.encode())
