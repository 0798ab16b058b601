"""Root's side of the unprivileged sink process: starts it and validates its answers.

Root sends each log as a read-only descriptor, with each sink's start offset and one end offset.
Root receives fixed-size records through a pipe and checks each record. Root also receives the
process's own log lines, and parses neither these lines nor the job logs. The other side is
:mod:`vtorque_joblog.sinks_process`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vtorque_core.api import HostFault, guard_command, printable
from vtorque_joblog.outlets import JobLog
from vtorque_joblog.saved_offsets import SavedOffsets

RECORD = struct.Struct("=HIQ")
"""Format of a sink's progress: the sink's number, the log's number, the delivered offset.

A record with the number after the last sink is about the process: log 0, number of received logs.
"""

MAX_WORD = 1 << 16  # bytes of one message to the process
_AGAIN = 5.0  # minimum seconds between two starts of the process
_PATIENCE = 30.0  # seconds until it must have received a log; it may still open its sinks
_KILL = 0.1  # seconds before the end that are reserved for killing it
_DEATH = 1.0  # seconds to wait for a killed process
_AT_ONCE = 256  # records to read before sending again
_LONGEST = 1 << 18  # bytes that contain a line end, because the core limits its lines
_MAX_SAID = 2000  # characters of a line for the follower's log
_MAX_LINES = 100  # such lines that are remembered, so that a new process does not repeat them
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
log = logging.getLogger("joblog")


class _ProcessEnded(Exception):
    """The unprivileged process has ended or must be ended."""


class _SinksProcess:
    """One run of the unprivileged process, and the logs that were sent to it."""

    def __init__(self, argv: tuple[str, ...]) -> None:
        """Start the process; the kernel kills it when the calling thread ends. Raises OSError."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            self.socket, socket_of_it = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.enter_context(self.socket).setblocking(False)
            theirs.enter_context(socket_of_it)
            self.socket.shutdown(socket.SHUT_RD)  # received descriptors could be slow to close
            self.answers, pipe_of_it = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
            undo.callback(os.close, self.answers)
            theirs.callback(os.close, pipe_of_it)
            # The pipe holds one record (pipe(7), O_DIRECT), so few lines are repeated after a kill.
            fcntl.fcntl(self.answers, fcntl.F_SETPIPE_SZ, 1)
            os.set_blocking(self.answers, False)
            self.process = subprocess.Popen(
                guard_command(*argv),
                stdin=socket_of_it.fileno(),
                stdout=pipe_of_it,
                stderr=subprocess.PIPE,
                env=_ENVIRON,
                cwd="/",
            )
            self._ours = undo.pop_all()
        self.numbers: dict[str, int] = {}  # the number of each log, by name
        self.logs: dict[int, tuple[str, int]] = {}  # by number: the name, and the end that was sent
        self.sent = self.taken = 0
        self.since = math.inf  # monotonic seconds of the last message or answer
        self.is_full = False
        self.is_ending = False
        self.said: set[str] = set()

    def send(self, job: JobLog, descriptor: int, end: int, told: list[int]) -> None:
        """Send a log up to the offset ``end``. ``told`` has the start offset for each sink.

        Raises OSError: BlockingIOError if the socket is full.
        """
        number = self.numbers.get(job.name, len(self.numbers))
        word = {"number": number, "uid": job.uid, "key": job.key, "end": end, "told": told}
        socket.send_fds(self.socket, [json.dumps(word).encode()], [descriptor])
        self.numbers[job.name] = number
        self.logs[number] = job.name, end
        if self.sent == self.taken:
            self.since = time.monotonic()
        self.sent += 1

    def record(self) -> tuple[int, int, int]:
        """Return the three fields of the next record that the process sent; see :data:`RECORD`.

        Raises:
            BlockingIOError: there is no record yet.
            OSError: the pipe cannot be read.
            _ProcessEnded: the process has ended, or has sent an invalid record.
        """
        record = os.read(self.answers, RECORD.size + 1)
        if not record:
            raise _ProcessEnded("")
        if len(record) != RECORD.size:
            raise _ProcessEnded(f"sent an answer of {len(record)} bytes instead of {RECORD.size}")
        sink, number, offset = RECORD.unpack(record)
        return sink, number, offset

    def note_received(self, count: int) -> None:
        """Record how many logs the process has received.

        Raises _ProcessEnded for an impossible number.
        """
        if not self.taken < count <= self.sent:
            raise _ProcessEnded(f"reports that it received {count} of {self.sent} logs")
        self.taken = count
        self.since = time.monotonic()

    def end(self) -> None:
        if not self.is_ending:
            self.socket.shutdown(socket.SHUT_WR)
            self.is_ending = True

    def close(self) -> None:
        self._ours.close()


class UnprivilegedSinks:
    """All sinks of the unprivileged process. The log follower uses this object as a ``SinkThread``.

    A thread starts the process, waits for its answers and kills it. Therefore the log follower
    never waits for a sink.

    Args:
        config: path of the site config.
        progress: each sink's offsets, by the sink's name. Only this object changes the offsets.
        idle: called by the thread after the sinks have received all entries.
    """

    def __init__(
        self,
        config: Path,
        progress: Mapping[str, SavedOffsets],
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = "outside"
        module = "vtorque_joblog.sinks_process"
        self._argv = (sys.executable, "-I", "-m", module, str(config), *progress)
        self._progress = list(progress.values())
        self._idle = idle
        self._lock = threading.Lock()
        self._given: dict[str, int] = {}  # sizes of logs that are completely handled
        self._due: dict[str, JobLog] = {}
        self._out: dict[str, tuple[JobLog, int]] = {}  # sent to the process, up to this offset
        # The process needs a descriptor for each log, and one for each sink that works or hangs.
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 4
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._next = 0.0  # monotonic seconds of the earliest next start
        self._until = math.inf
        self._said: set[str] = set()  # lines of earlier processes
        self._life: _SinksProcess | None = None
        self._logs: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="sinks' process", daemon=True)
        self._thread.start()

    def give(self, job: JobLog) -> None:
        """Notify the thread that a log may have more lines. Never waits for a sink."""
        size = job.size
        with self._lock:
            if self._given.get(job.name) == size or not self.is_behind(job):
                return
            self._given[job.name] = size
            self._due[job.name] = job
        os.eventfd_write(self._wake, 1)

    def is_behind(self, job: JobLog) -> bool:
        """Return whether a log has undelivered bytes."""
        return any(job.size > told.offset_of(job.name) for told in self._progress)

    @property
    def is_busy(self) -> bool:
        """True if a sink has something to deliver."""
        with self._lock:
            return bool(self._due or self._out)

    def close(self, until: float) -> None:
        """End the process after it has delivered all entries, at the latest at ``until``."""
        self._until = until
        os.eventfd_write(self._wake, 1)
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while self._life is not None or self._until == math.inf:
            try:
                self._start()
                self._send_due()
                self._wait()
                self._read_answers()
            except Exception as error:  # the follower must continue after any error
                self._end_process(error)
            if not self.is_busy:
                self._idle()

    def _start(self) -> None:
        now = time.monotonic()
        if self._life is None and self.is_busy and self._until == math.inf and now >= self._next:
            self._next = now + _AGAIN
            if self._logs is not None and self._logs.is_alive():
                raise HostFault("a child process still has its standard error open: no restart yet")
            self._life = life = _SinksProcess(self._argv)
            self._logs = threading.Thread(target=self._log, args=(life,), daemon=True)
            self._logs.start()

    def _send_due(self) -> None:
        if self._life is None or self._life.is_ending:
            return
        with self._lock:
            self._life.is_full = False
            for job in list(self._due.values()):
                if len(self._out) >= self._most:
                    break
                try:
                    self._send(self._life, job)
                except BlockingIOError:
                    self._life.is_full = True
                    break
                except ConnectionError:
                    raise _ProcessEnded("") from None
                del self._due[job.name]
        if self._until < math.inf and not self._life.is_full:
            self._life.end()

    def _send(self, life: _SinksProcess, job: JobLog) -> None:
        try:
            descriptor = job.open()
        except OSError:
            self._given.pop(job.name, None)
            return
        try:
            end = _end_of_lines(descriptor)
            told = [each.offset_of(job.name) for each in self._progress]
            if end > min(told):
                life.send(job, descriptor, end, told)
                self._out[job.name] = job, end
        finally:
            os.close(descriptor)

    def _wait(self) -> None:
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        until = self._until - _KILL
        if self._life is not None:
            until = min(until, self._life.since + _PATIENCE if self.is_busy else math.inf)
            waiting.register(self._life.answers, select.POLLIN)
            if self._life.is_full:
                waiting.register(self._life.socket, select.POLLOUT)
        elif self.is_busy:
            until = min(until, self._next)
        lasts = max(0.0, until - time.monotonic())
        waiting.poll(None if lasts == math.inf else lasts * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _read_answers(self) -> None:
        """Record the offsets up to which the process has delivered logs.

        Raises _ProcessEnded or OSError if the process must be ended.
        """
        if (life := self._life) is None:
            return
        with contextlib.suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                self._note(life)
        if time.monotonic() >= self._until - _KILL:
            raise _ProcessEnded("")
        if self.is_busy and time.monotonic() >= life.since + _PATIENCE:
            self._ask(life)

    def _ask(self, life: _SinksProcess) -> None:
        """Test whether the process hangs, after it has not answered for a long time.

        The process confirms each log that it receives. If a confirmation is missing, the process
        hangs: raise _ProcessEnded. Otherwise the sinks may only be slow. Therefore send a log again
        as a test; the next call of this method fails if the process has not confirmed this log.
        """
        if life.sent > life.taken:
            raise _ProcessEnded(f"has received no logs for {_PATIENCE:g} s")
        life.since = time.monotonic()
        with self._lock:
            for name, (job, _) in list(self._out.items())[:1]:
                self._due.setdefault(name, job)

    def _note(self, life: _SinksProcess) -> None:
        sink, number, offset = life.record()
        if (sink, number) == (len(self._progress), 0):
            life.note_received(offset)
            return
        name, end = life.logs.get(number, ("", 0))
        if sink >= len(self._progress) or not self._progress[sink].offset_of(name) < offset <= end:
            raise _ProcessEnded(
                f"reports an invalid offset {offset} of log {number} for sink {sink}"
            )
        self._progress[sink].mark(name, offset)
        if all(told.offset_of(name) >= end for told in self._progress):
            with self._lock:
                self._out.pop(name, None)

    def _end_process(self, error: Exception) -> None:
        """Kill the process and read its last answers; the next process gets undelivered logs."""
        life, self._life = self._life, None
        if life is None:
            self._log_new_line(f"the sinks' process: {error}", self._said)
            return
        life.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
            life.process.wait(_DEATH)
        with contextlib.suppress(BlockingIOError, _ProcessEnded):
            while True:
                self._note(life)
        life.close()
        with self._lock:
            self._due = {name: job for name, (job, _) in self._out.items()} | self._due
            self._out = {}
        code = life.process.returncode
        why = str(error) or (f"ended ({code})" if code else "")
        if why and self._until == math.inf:
            self._log_new_line(f"the sinks' process {why}", life.said)
        self._said = life.said

    def _log(self, life: _SinksProcess) -> None:
        assert life.process.stderr is not None  # noqa: S101 - a pipe
        with life.process.stderr as lines:
            while line := lines.readline(_MAX_SAID):
                self._log_new_line(line.decode("utf-8", "replace").rstrip(), life.said)

    def _log_new_line(self, line: str, said: set[str]) -> None:
        if line not in self._said:
            log.warning("%s", printable(line, _MAX_SAID))
        if len(said) < _MAX_LINES:
            said.add(line)


def _end_of_lines(descriptor: int) -> int:
    """Return the size of a log without an incomplete last line."""
    size = os.fstat(descriptor).st_size
    begin = max(0, size - _LONGEST)
    return begin + os.pread(descriptor, size - begin, begin).rfind(b"\n") + 1
