"""The host side of the run port: a job's program in the guest with its streams, signals and exit.

Runs in the job shell, as the unprivileged user. The guest is hostile: whatever it sends, these
functions return, raise a `StreamError`, or wait as a silent job would make them wait.
"""

import os
import select
import socket
import struct
import time
from dataclasses import dataclass

from vtorque_linux_guest.job.descriptors import CHUNK, Sink, Source
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.frames import (
    HEADER,
    HELLO,
    PAYLOAD_MAX,
    PROTOCOL,
    WINDOW_MAX,
    AgentError,
    BadStart,
    Decoder,
    Frame,
    GuestDied,
    GuestSilent,
    Kind,
    NotStarted,
    RunAbandoned,
    StreamError,
    frame,
    hello_frame,
    hello_prefix,
    shown,
)
from vtorque_linux_guest.job.start_request import Start

WINDOW = 1 << 20
"""Bytes of stdout and of stderr that may wait here for a slow reader."""
RESYNC = b"\0" * (HEADER.size + PAYLOAD_MAX + HEADER.size)
RESYNC_FIRST = 0.5
RESYNCED = b"unknown frame type"
"""What the agent says of RESYNC if it was only slow: its ERROR comes between its two HELLOs."""
DISCARD_MAX = 64 << 20
LAST_WORDS = 5.0
"""Seconds that output already received may take to be written once the guest has died."""


@dataclass(frozen=True)
class ExitStatus:
    """How the program ended: `exit_code` or `signal`. `lost`: why output could not be written."""

    exit_code: int | None
    signal: int | None
    lost: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """The exit code as a shell gives it: 128+n for signal n."""
        return 128 + self.signal if self.signal is not None else self.exit_code or 0


class Session:
    """A connection to the agent over `sock`, the run port's unix socket; not thread-safe.

    `hello` first, then `run` as often as needed, one after another. After any StreamError but
    NotStarted and BadStart only `hello` (a new session) or closing the socket makes sense.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = Decoder()
        self._out = bytearray()
        self._stdin_window = 0
        self._hellos = 0
        self._nonce = b""

    def hello(self, deadline: float) -> None:
        """Begin a session, until `deadline` (time.monotonic() seconds).

        Raises GuestSilent, GuestDied, or StreamError for another protocol version. What the guest
        sent before its answer is skipped; it ends what it still runs for an older session.
        """
        self._nonce = os.urandom(8)
        self._stdin_window = self._hellos = 0
        self._out.clear()
        prefix = hello_prefix(self._nonce)
        seen, skipped = bytearray(), 0
        again, pause = time.monotonic(), RESYNC_FIRST
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise GuestSilent("the guest's agent does not answer")
            if now >= again and not self._out:
                self._out += (RESYNC if self._hellos else b"") + hello_frame(self._nonce, WINDOW)
                self._hellos += 1
                again, pause = now + pause, pause * 2
            self._wait(max(0.0, min(deadline, again if not self._out else deadline) - now))
            seen += self._receive()
            at = seen.find(prefix)
            if at >= 0 and len(seen) - at >= HEADER.size + HELLO.size:
                self._welcome(bytes(seen[at:]))
                return
            drop = at if at >= 0 else max(0, len(seen) - len(prefix))
            skipped += drop
            del seen[:drop]
            if skipped > DISCARD_MAX:
                raise StreamError(f"no HELLO from the guest among {skipped} bytes")

    def _welcome(self, data: bytes) -> None:
        _, _, version, _, window = HELLO.unpack_from(data, HEADER.size)
        if version != PROTOCOL or not 0 < window <= WINDOW_MAX:
            raise StreamError(
                f"the guest's agent speaks protocol {version} (window {window}), this is "
                f"{PROTOCOL}: rebuild the image"
            )
        self._stdin_window = window
        self._hellos -= 1
        self._decoder.reset(data[HEADER.size + HELLO.size :])

    def run(
        self,
        start: Start,
        stdin: int | None,
        stdout: int,
        stderr: int,
        events: Events | None = None,
    ) -> ExitStatus:
        """Run one program and return when it has ended and all its output is written.

        `stdin` None: empty input. The descriptors stay open and as they are. Output that cannot be
        written (a closed pipe, a full disk) closes that stream in the guest, so that the program
        gets SIGPIPE, and is named in `ExitStatus.lost`. Raises NotStarted, GuestDied, AgentError,
        RunAbandoned, BadStart, or StreamError if the guest breaks the protocol.
        """
        if self._stdin_window == 0:
            raise StreamError("no session: hello() comes first, also after an error")
        self._out += start.encode()
        run = _Run(self, stdin, (stdout, stderr), events)
        try:
            return run.loop()
        except (NotStarted, BadStart):
            raise
        except BaseException:
            self._stdin_window = 0
            raise
        finally:
            run.close()

    def _wait(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
        poller.poll(seconds * 1000)
        self._send()

    def _send(self) -> None:
        while self._out:
            try:
                with memoryview(self._out) as view:
                    sent = self._sock.send(view[: 8 * CHUNK])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise GuestDied(f"the connection to the guest broke: {error.strerror}") from error
            del self._out[:sent]

    def _receive(self) -> bytes:
        try:
            data = self._sock.recv(8 * CHUNK)
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as error:
            raise GuestDied(f"the connection to the guest broke: {error.strerror}") from error
        if not data:
            raise GuestDied("the guest died: its connection ended")
        return data


class _Run:
    """One run of a session: what is in flight and what may be."""

    def __init__(
        self, session: Session, stdin: int | None, outputs: tuple[int, int], events: Events | None
    ) -> None:
        self._s = session
        self._events = events
        self._source = Source(stdin) if stdin is not None else None
        self._stdin_credit = session._stdin_window
        self._sinks = tuple(Sink(fd) for fd in outputs)
        self._granted = [WINDOW, WINDOW]
        self._owed = [0, 0]
        self._ended = [False, False]
        self._lost: list[str] = []
        self._exit: ExitStatus | None = None
        if stdin is None:
            session._out += frame(Kind.EOF, 0)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def loop(self) -> ExitStatus:
        while self._exit is None or any(sink.pending for sink in self._sinks):
            if self._events is not None:
                self._take_events(self._events)
            try:
                self._turn()
            except GuestDied:
                self._last_words()
                raise
        return ExitStatus(self._exit.exit_code, self._exit.signal, tuple(self._lost))

    def _take_events(self, events: Events) -> None:
        if events.stopped:
            raise RunAbandoned(events.stopped)
        taken = events.take()
        if self._exit is None and len(self._s._out) < WINDOW * 32:
            self._s._out += taken

    def _turn(self) -> None:
        """Wait until something can be done, and do all that can be."""
        ready = self._poll(None)
        live = self._exit is None
        if live:
            self._s._send()
            if ready.get(self._s._sock.fileno()):
                for item in self._s._decoder.frames(self._s._receive()):
                    self._take(item)
        for index, sink in enumerate(self._sinks):
            if sink.instant or ready.get(sink.fd, 0) & ~select.POLLIN:
                self._flush(index)
        source = self._source
        stdin_ready = source and (not source.polled or ready.get(source.fd, 0) & ~select.POLLOUT)
        if live and source and stdin_ready and self._may_read():
            self._read_stdin(source)
        if live:
            self._s._send()

    def _may_read(self) -> bool:
        return self._source is not None and self._stdin_credit > 0 and len(self._s._out) < CHUNK

    def _poll(self, timeout: float | None) -> dict[int, int]:
        wanted: dict[int, int] = {}
        idle = True
        if self._exit is None:
            wanted[self._s._sock.fileno()] = select.POLLIN | (select.POLLOUT if self._s._out else 0)
            if self._source is not None and self._may_read():
                if self._source.polled:
                    wanted[self._source.fd] = select.POLLIN
                else:
                    idle = False
        for sink in self._sinks:
            if sink.pending and sink.polled:
                wanted[sink.fd] = wanted.get(sink.fd, 0) | select.POLLOUT
            elif sink.pending:
                idle = False
        if self._events is not None:
            wanted[self._events.fileno()] = select.POLLIN
        poller = select.poll()
        for fd, mask in wanted.items():
            poller.register(fd, mask)
        limit = 0 if not idle else None if timeout is None else timeout * 1000
        return dict(poller.poll(limit))

    def _read_stdin(self, source: Source) -> None:
        data = source.read(self._stdin_credit)
        if data is None:
            return
        if data:
            self._s._out += frame(Kind.DATA, 0, data)
            self._stdin_credit -= len(data)
        else:
            self._s._out += frame(Kind.EOF, 0)
            self._source = None

    def _flush(self, index: int) -> None:
        """Write what waits; grant the guest what has been written, a quarter window at a time."""
        sink = self._sinks[index]
        self._owed[index] += sink.flush()
        if sink.error is not None:
            self._lose(index, sink.error)
        enough = self._owed[index] >= WINDOW // 4 and len(self._s._out) < CHUNK
        if enough and self._exit is None and not self._ended[index]:
            self._s._out += frame(Kind.CREDIT, index + 1, struct.pack("<I", self._owed[index]))
            self._granted[index] += self._owed[index]
            self._owed[index] = 0

    def _lose(self, index: int, error: OSError) -> None:
        name = ("stdout", "stderr")[index]
        self._lost.append(f"{name}: {error.strerror}")
        self._sinks[index].error = None
        self._sinks[index].discard = True
        if self._exit is None and not self._ended[index]:
            self._s._out += frame(Kind.EOF, index + 1)

    def _take(self, item: Frame) -> None:
        if self._exit is not None:
            raise StreamError("the guest sent more after EXIT")
        if item.kind is Kind.DATA:
            self._data(item)
        elif item.kind is Kind.EOF:
            self._eof(item.stream)
        elif item.kind is Kind.CREDIT:
            self._stdin_credit += int.from_bytes(item.payload, "little")
            if self._stdin_credit > self._s._stdin_window:
                raise StreamError("the guest grants more stdin than its window")
        elif item.kind is Kind.EXIT:
            self._exit = _exit_status(item.payload)
        elif item.kind is Kind.ERROR and self._s._hellos > 0 and item.payload == RESYNCED:
            return
        elif item.kind is Kind.ERROR:
            raise AgentError(f"the guest's agent: {shown(item.payload)}")
        else:
            self._old_hello(item.payload)

    def _data(self, item: Frame) -> None:
        index = item.stream - 1
        if index < 0 or self._ended[index] or len(item.payload) > self._granted[index]:
            raise StreamError(f"the guest sent output (stream {item.stream}) that was not granted")
        self._granted[index] -= len(item.payload)
        self._sinks[index].add(item.payload)

    def _eof(self, stream: int) -> None:
        if stream == 0:
            self._source = None
        elif self._ended[stream - 1]:
            raise StreamError(f"the guest ended stream {stream} twice")
        else:
            self._ended[stream - 1] = True

    def _old_hello(self, payload: bytes) -> None:
        """A HELLO sent twice is answered twice; both answers come before anything of a run."""
        if self._s._hellos <= 0 or payload[8:16] != self._s._nonce:
            raise StreamError("the guest sent a HELLO out of order")
        self._s._hellos -= 1

    def _last_words(self) -> None:
        """The guest died: write what it had sent, for at most LAST_WORDS seconds."""
        self._exit = ExitStatus(None, None)
        deadline = time.monotonic() + LAST_WORDS
        while any(sink.pending for sink in self._sinks):
            left = deadline - time.monotonic()
            if left <= 0 or (self._events is not None and self._events.stopped):
                return
            ready = self._poll(left)
            for index, sink in enumerate(self._sinks):
                if sink.instant or ready.get(sink.fd, 0) & ~select.POLLIN:
                    self._flush(index)
            if self._events is not None:
                self._events.take()


def _exit_status(payload: bytes) -> ExitStatus:
    """EXIT: kind u8, reserved u8, value u16, text."""
    kind, _, value = struct.unpack_from("<BBH", payload)
    if kind == 0 and value <= 255:
        return ExitStatus(value, None)
    if kind == 1 and 1 <= value <= 64:
        return ExitStatus(None, value)
    if kind == 2:
        raise NotStarted(shown(payload[4:]) or "the guest could not start the program")
    raise StreamError(f"the guest sent a bad exit status: kind {kind}, value {value}")
