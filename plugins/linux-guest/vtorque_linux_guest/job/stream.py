"""The host side of the run port, a virtio-serial port with which the host runs guest programs.

Runs in the job shell, as the job's user. The guest is hostile. For any input, these functions
return, raise a `StreamError`, or wait for more input.
"""

import select
import struct
import time
from dataclasses import dataclass

from vtorque_linux_guest.job.connection import RESYNCED, WINDOW, FramesDropped, GuestConnection
from vtorque_linux_guest.job.descriptors import CHUNK, InputSource, OutputQueue
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.frames import (
    AgentError,
    BadStart,
    ConnectionEnded,
    Frame,
    FrameKind,
    GuestSilent,
    RunAbandoned,
    StartFailed,
    StreamError,
    frame,
    printable_text,
)
from vtorque_linux_guest.job.session_state import SessionState
from vtorque_linux_guest.job.start_request import StartRequest

LAST_WORDS = 5.0
"""Time limit for writing output that was received before the guest died."""
_TELLS = 0.05  # seconds between two checks whether root requests the session's state


@dataclass(frozen=True)
class ExitStatus:
    """How a program ended: `exit_code` or `signal` is set. `lost` lists output errors."""

    exit_code: int | None
    signal: int | None
    lost: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """The exit status as in a shell: 128+n for signal n."""
        return 128 + self.signal if self.signal is not None else self.exit_code or 0


class Session(GuestConnection):
    """A session with the guest's agent; not thread-safe.

    Call `hello` first, then `run` any number of times, one after another. After any StreamError
    except StartFailed and BadStart, call `hello` for a new session or close the socket.

    Args:
        sock: The run port's Unix socket.
        again: Called as ``again(stopped)`` if the connection breaks during a run. It returns a new
            connection and its deadline (time.monotonic() seconds), or None if the guest has ended.
            It gives up when ``stopped()`` returns a reason instead of "".
        tell: Called as ``tell(state)`` after each ACK, because the agent sends an ACK when root is
            about to request the session's state. Returns True while root's request exists, so the
            session calls ``tell`` again at least every 0.05 s. ``state()`` returns the session's
            state, with which the job shell of a restored job resumes the session.
    """

    def resume(self, state: SessionState, deadline: float) -> None:
        """Resume the session of a saved job's shell from `state`. Then call `run` with `state`.

        Raises as `hello`.
        """
        self._nonce, self._stdin_window = state.nonce, state.stdin_window
        self._kept[:] = state.unacknowledged
        self._acked = state.acknowledged
        self._decoder.taken = self._told = state.taken
        self._resumes = True
        self._check_resume(self._ask_resume(deadline, str))

    def run(
        self,
        start: StartRequest | SessionState,
        stdin: int | None,
        stdout: int,
        stderr: int,
        events: Events | None = None,
    ) -> ExitStatus:
        """Run one program and return when it has ended and all its output is written.

        If `start` is the state of a resumed session, continue its program. If `stdin` is None, the
        input is empty. The descriptors stay open and unchanged. If output cannot be written (a
        closed pipe, a full disk), the stream is closed in the guest, so the program gets SIGPIPE.
        `ExitStatus.lost` then contains the error.

        Raises StartFailed, BadStart, RunAbandoned, AgentError, ConnectionEnded, GuestSilent, or
        StreamError if the guest violates the protocol.
        """
        if self._stdin_window == 0:
            raise StreamError("no session with the guest: call hello() first")
        state = start if isinstance(start, SessionState) else None
        if isinstance(start, StartRequest):
            self._out += start.encode()
        run = _Run(self, stdin, (stdout, stderr), events, state)
        try:
            return run.loop()
        except RunAbandoned as error:
            error.state = run.state() if self._resumes else None
            self._stdin_window = 0
            raise
        except (StartFailed, BadStart):
            raise
        except BaseException:
            self._stdin_window = 0
            raise
        finally:
            run.close()


class _Run:
    def __init__(
        self,
        session: Session,
        stdin: int | None,
        outputs: tuple[int, int],
        events: Events | None,
        state: SessionState | None,
    ) -> None:
        self._s = session
        self._events = events
        self._source = InputSource(stdin) if stdin is not None else None
        self._stdin_credit = session._stdin_window
        self._sinks = tuple(OutputQueue(fd) for fd in outputs)
        self._granted = [WINDOW, WINDOW]
        self._owed = [0, 0]
        self._ended = [False, False]
        self._lost: list[str] = []
        self._exit: ExitStatus | None = None
        self._fresh = True  # frames may have come with the answer to a HELLO
        self._telling = False
        self._stdin_read = 0
        self._written = [0, 0]
        if state is not None:
            self._restore_state(state)
        if stdin is None and (state is None or state.stdin_open):
            session._out += frame(FrameKind.EOF, 0)

    def _restore_state(self, state: SessionState) -> None:
        self._stdin_credit, self._stdin_read = state.stdin_credit, state.stdin_read
        self._source = self._source if state.stdin_open else None
        self._granted, self._owed = list(state.granted), list(state.owed)
        self._ended, self._written = list(state.ended), list(state.written)
        self._lost = list(state.lost)
        self._exit = ExitStatus(*state.exit) if state.exit else None
        for sink, data in zip(self._sinks, state.pending, strict=True):
            sink.add(data)

    def state(self) -> SessionState:
        session = self._s
        pending, lost = (bytes(sink.pending) for sink in self._sinks), tuple(self._lost)
        return SessionState(
            session._nonce,
            session._stdin_window,
            session._decoder.taken,
            session._acked,
            bytes(session._kept + session._out[session._before :]),
            self._stdin_read,
            self._stdin_credit,
            self._source is not None,
            (self._granted[0], self._granted[1]),
            (self._owed[0], self._owed[1]),
            (self._ended[0], self._ended[1]),
            (self._written[0], self._written[1]),
            (next(pending), next(pending)),
            lost,
            (self._exit.exit_code, self._exit.signal) if self._exit else None,
        )

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def loop(self) -> ExitStatus:
        while self._exit is None or any(sink.pending for sink in self._sinks):
            if self._events is not None:
                self._take_events(self._events)
            try:
                try:
                    self._turn()
                except (ConnectionEnded, FramesDropped) as why:
                    self._s.resume_session(
                        why if isinstance(why, ConnectionEnded) else None, self._stop_reason
                    )
                    self._fresh = True
            except (ConnectionEnded, GuestSilent):
                self._last_words()
                raise
        return ExitStatus(self._exit.exit_code, self._exit.signal, tuple(self._lost))

    def _stop_reason(self) -> str:
        return self._events.stopped if self._events is not None else ""

    def _take_events(self, events: Events) -> None:
        if events.stopped:
            raise RunAbandoned(events.stopped)
        taken = events.take()
        if self._exit is None and len(self._s._out) < WINDOW * 32:
            self._s._out += taken

    def _turn(self) -> None:
        if self._telling:
            self._telling = self._s._tell(self.state)
        ready = self._poll(0 if self._fresh else _TELLS if self._telling else None)
        live = self._exit is None
        if live:
            self._s._send()
            if self._fresh or ready.get(self._s._sock.fileno()):
                self._fresh = False
                for item in self._s._decoder.frames(self._s._receive()):
                    self._take(item)
                self._s.acknowledge()
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

    def _read_stdin(self, source: InputSource) -> None:
        data = source.read(self._stdin_credit)
        if data is None:
            return
        if data:
            self._s._out += frame(FrameKind.DATA, 0, data)
            self._stdin_credit -= len(data)
            self._stdin_read += len(data)
        else:
            self._s._out += frame(FrameKind.EOF, 0)
            self._source = None

    def _flush(self, index: int) -> None:
        """Write pending output. Grant the guest new credit after each quarter of the window."""
        sink = self._sinks[index]
        written = sink.flush()
        self._owed[index] += written
        self._written[index] += written
        if sink.error is not None:
            self._lose(index, sink.error)
        enough = self._owed[index] >= WINDOW // 4 and len(self._s._out) < CHUNK
        if enough and self._exit is None and not self._ended[index]:
            self._s._out += frame(FrameKind.CREDIT, index + 1, struct.pack("<I", self._owed[index]))
            self._granted[index] += self._owed[index]
            self._owed[index] = 0

    def _lose(self, index: int, error: OSError) -> None:
        name = ("stdout", "stderr")[index]
        self._lost.append(f"{name}: {error.strerror}")
        self._sinks[index].error = None
        self._sinks[index].discard = True
        if self._exit is None and not self._ended[index]:
            self._s._out += frame(FrameKind.EOF, index + 1)

    def _take(self, item: Frame) -> None:
        if item.kind is FrameKind.ACK:
            self._telling = True
            self._s.handle_ack(item)
        elif self._exit is not None:
            raise StreamError("the guest sent another frame after EXIT")
        elif item.kind is FrameKind.DATA:
            self._data(item)
        elif item.kind is FrameKind.EOF:
            self._eof(item.stream)
        elif item.kind is FrameKind.CREDIT:
            self._stdin_credit += int.from_bytes(item.payload, "little")
            if self._stdin_credit > self._s._stdin_window:
                raise StreamError("the guest requested more standard input than its window holds")
        elif item.kind is FrameKind.EXIT:
            self._exit = _exit_status(item.payload)
        elif item.kind is FrameKind.ERROR and self._s._hellos > 0 and item.payload == RESYNCED:
            return
        elif item.kind is FrameKind.ERROR:
            raise AgentError(f"the guest's agent: {printable_text(item.payload)}")
        else:
            self._old_hello(item.payload)

    def _data(self, item: Frame) -> None:
        index = item.stream - 1
        if index < 0 or self._ended[index] or len(item.payload) > self._granted[index]:
            raise StreamError(f"the guest sent more output on stream {item.stream} than allowed")
        self._granted[index] -= len(item.payload)
        self._sinks[index].add(item.payload)

    def _eof(self, stream: int) -> None:
        if stream == 0:
            self._source = None
        elif self._ended[stream - 1]:
            raise StreamError(f"the guest closed stream {stream} twice")
        else:
            self._ended[stream - 1] = True

    def _old_hello(self, payload: bytes) -> None:
        """Ignore the second answer to a HELLO that was sent twice.

        The agent sends both answers before any frame of a run.
        """
        if self._s._hellos <= 0 or payload[8:16] != self._s._nonce:
            raise StreamError("the guest sent a HELLO out of order")
        self._s._hellos -= 1
        self._s._decoder.taken = 0

    def _last_words(self) -> None:
        """Write output that the guest sent before it died, for at most ``LAST_WORDS`` seconds."""
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
    """Decode an EXIT: kind u8, reserved u8, value u16, text."""
    kind, _, value = struct.unpack_from("<BBH", payload)
    if kind == 0 and value <= 255:
        return ExitStatus(value, None)
    if kind == 1 and 1 <= value <= 64:
        return ExitStatus(None, value)
    if kind == 2:
        raise StartFailed(printable_text(payload[4:]) or "the guest could not start the program")
    raise StreamError(f"the guest sent an invalid exit status: kind {kind}, value {value}")
