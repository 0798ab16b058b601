"""Plugins' log handlers, in a process of their own: whatever they do, the job does not wait.

The process has a thread for each plugin's hook and for each handler, with a bounded queue. Lines
come over a socket that loses them when it is full. At the end of a log its handlers have a second
for what they still have; then the process is killed, and what was lost is told. As root.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vtorque_core import locks
from vtorque_core.api_log import LogJob
from vtorque_core.errors import printable
from vtorque_core.plugins import Contribution, Plugins

HOOK = "vtorque_log_handlers"
END = 1.0  # seconds from the end of a log until its handlers are given up
_OWN_END = 0.8  # of these, so that the process can still say which
_MOST = 2000  # records that wait for one handler, or for a plugin's hook to return
_BUFFER = 1 << 20  # bytes in the socket
_MAX_REPORT = 16384
_LEVELS = {"ERROR": 40, "WARN": 30, "INFO": 20, "DEBUG": 10, "TRACE": 5}

Load = Callable[[], tuple[Plugins, LogJob]]
_missed: list[str] = []  # a second is lost once in a process, not with each log that it writes
_ended: list[int] = []


def wanted(plugins: Plugins) -> bool:
    """Return whether any plugin has handlers."""
    return any(HOOK in plugins.hooks_of(name) for name in plugins.names)


class SinkProcess:
    """See :class:`vtorque_core.log.Sinks`. ``load`` is called in the new process."""

    def __init__(self, load: Load) -> None:
        """Fork. Raises OSError if the host cannot."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._answer, told = os.pipe()
        self._lost = 0
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _Server(theirs, parent).run(load, told)
            finally:
                os._exit(1)
        os.close(told)
        theirs.close()

    def send(self, line: bytes, *, asked: bool) -> None:
        """Give it a line, or lose it if it does not keep up."""
        try:
            self._ours.send((b"-" if asked else b"+") + line)
        except OSError:
            self._lost += 1

    def end(self) -> list[str]:
        """Wait for its end for at most END seconds; return what went wrong."""
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_WR)
        self._ours.close()
        troubles = self._report()
        _ended.append(self._pid)
        os.close(self._answer)
        if troubles is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            troubles = [f"log sinks: no answer after {END:g} s: what they still had is lost"]
            _missed.append(troubles[0])
        if self._lost:
            troubles.append(f"log sinks: {self._lost} records lost: they did not keep up")
        return troubles

    def _report(self) -> list[str] | None:
        """Return what the process says at its end; None if it says nothing in time."""
        data, end = b"", time.monotonic() + END
        while True:
            ready, _, _ = select.select([self._answer], [], [], max(0, end - time.monotonic()))
            part = os.read(self._answer, _MAX_REPORT) if ready else b""
            if not part:
                break
            data += part
        with contextlib.suppress(ValueError):
            said = json.loads(data)
            if said.get("late"):
                _missed.append("late")
            return [printable(str(line), 500) for line in said["troubles"]]
        return None


def start(load: Load) -> SinkProcess | None:
    """Start the handlers, unless some did not end in time before in this process."""
    _reap()
    return None if _missed else SinkProcess(load)


def _reap() -> None:
    """Forget processes that have ended; the last is init's, since nobody waits for it."""
    for pid in list(_ended):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        _ended.remove(pid)


class _Sink(threading.Thread):
    """One handler with its queue."""

    def __init__(self, plugin: str, handler: logging.Handler) -> None:
        super().__init__(daemon=True)
        self.label = f"log sink {type(handler).__name__} of {plugin}"
        self.handler = handler
        self.queue: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self.lost = 0
        self.error = ""
        handler.handleError = self._failed  # type: ignore[method-assign]

    def put(self, record: logging.LogRecord) -> None:
        if self.queue.qsize() < _MOST:
            self.queue.put(record)
        else:
            self.lost += 1

    def run(self) -> None:
        while (record := self.queue.get()) is not None:
            try:
                if record.levelno >= self.handler.level:
                    self.handler.handle(record)
            except Exception:
                self._failed(record)
        try:
            self.handler.flush()
            self.handler.close()
        except Exception:
            self._failed(None)

    def _failed(self, record: logging.LogRecord | None) -> None:
        self.lost += record is not None
        error = sys.exc_info()[1]
        self.error = self.error or f"{type(error).__name__}: {error}"

    def trouble(self) -> str:
        """Return what is wrong with it once its time is up; empty if nothing."""
        why = f"no end after {_OWN_END:g} s" if self.is_alive() else self.error
        lost = self.lost + self.queue.qsize() if self.is_alive() else self.lost
        if not why and not lost:
            return ""
        return f"{self.label}: {why or 'too slow'}; {lost} records lost"


class _Server:
    """What the process does."""

    def __init__(self, source: socket.socket, parent: int) -> None:
        self.source = source
        self.parent = parent
        self.lock = threading.Lock()
        self.before: deque[logging.LogRecord] = deque(maxlen=_MOST)
        self.sinks: list[_Sink] = []
        self.over = False
        self.troubles: list[str] = []

    def run(self, load: Load, told: int) -> None:
        locks.forget()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        loading = threading.Thread(target=self.load, args=(load,), daemon=True)
        loading.start()
        self.serve()
        end = time.monotonic() + _OWN_END
        with self.lock:
            self.over = True
            for sink in self.sinks:
                sink.queue.put(None)
        loading.join(max(0, end - time.monotonic()))
        for sink in self.sinks:
            sink.join(max(0, end - time.monotonic()))
        if loading.is_alive():
            self.troubles.append(f"log sinks: a plugin's {HOOK} has not returned")
        late = loading.is_alive() or any(sink.is_alive() for sink in self.sinks)
        troubles = [*self.troubles, *filter(None, (sink.trouble() for sink in self.sinks))]
        report = {"late": late, "troubles": [t[:500] for t in troubles[:20]]}
        os.write(told, json.dumps(report).encode())
        os._exit(0)

    def load(self, load: Load) -> None:
        try:
            plugins, job = load()
        except Exception as error:  # the config is broken by now: the epilogue says it
            self.troubles.append(f"log sinks: {type(error).__name__}: {error}")
            return
        names = [name for name in plugins.names if HOOK in plugins.hooks_of(name)]
        asked = [
            threading.Thread(target=self.ask, args=(plugins, n, job), daemon=True) for n in names
        ]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join()

    def ask(self, plugins: Plugins, name: str, job: LogJob) -> None:
        for found in plugins.each(HOOK, only=name, job=job):
            self.add(found)

    def add(self, found: Contribution) -> None:
        if found.error is not None:
            what = f"{type(found.error).__name__}: {found.error}"
            self.troubles.append(f"plugin {found.plugin}, {HOOK}: {what}")
        elif isinstance(found.item, logging.Handler):
            sink = _Sink(found.plugin, found.item)
            with self.lock:
                for record in self.before:
                    sink.put(record)
                if self.over:
                    sink.queue.put(None)
                self.sinks.append(sink)
                sink.start()

    def serve(self) -> None:
        """Pass on what comes until the log ends, or the process that writes it."""
        while True:
            ready, _, _ = select.select([self.source], [], [], 1.0)
            if not ready:
                if os.getppid() != self.parent:
                    return
                continue
            data = self.source.recv(1 << 20)
            if not data:
                return
            record = _record(data)
            with self.lock:
                self.before.append(record)
                for sink in self.sinks:
                    sink.put(record)


def _record(data: bytes) -> logging.LogRecord:
    entry: dict[str, Any] = json.loads(data[1:])
    level = _LEVELS[entry["level"]]
    own = {k: entry[k] for k in ("job", "node", "guest", "phase", "plugin")}
    own |= {"name": entry["logger"], "levelno": level, "levelname": entry["level"]}
    own |= {"msg": entry["message"], "args": None, "created": entry["t"]}
    return logging.makeLogRecord(own | {"entry": entry, "asked": data[:1] == b"-"})
