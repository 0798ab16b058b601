"""A session with the agent: handshake, send buffer and resumption."""

import os
import select
import socket
import time
from collections.abc import Callable

from vtorque_linux_guest.job.descriptors import CHUNK
from vtorque_linux_guest.job.frames import (
    FLAG_BITS,
    HEADER,
    HELLO,
    KEEPS,
    PAYLOAD_MAX,
    POSITION_MASK,
    PROTOCOL,
    RESUMES,
    WINDOW_MAX,
    ConnectionEnded,
    Decoder,
    Frame,
    GuestSilent,
    RunAbandoned,
    StreamError,
    ack_frame,
    hello_frame,
    hello_prefix,
)
from vtorque_linux_guest.job.session_state import SessionState

WINDOW = 1 << 20
"""Maximum number of bytes buffered for a slow reader, for stdout and for stderr each."""
RESYNC = b"\0" * (HEADER.size + PAYLOAD_MAX + HEADER.size)
RESYNC_FIRST = 0.5
RESYNCED = b"unknown frame type"
"""Text of the agent's ERROR for an unneeded RESYNC. RESYNC precedes a repeated HELLO; if the agent
was only slow, it answers the first HELLO, sends this error, and answers the second HELLO."""
DISCARD_MAX = 64 << 20
ACK_EVERY = 262144
"""Send an ACK after receiving this many bytes. The guest keeps at most 512 KiB of unacknowledged
output."""
KEPT_MAX = 32 << 20
"""Maximum number of sent bytes that await the guest's ACK. More than the largest START and its
files."""
RESUME_SECONDS = 60.0
LOOK_UP = 0.5

Reconnect = Callable[[Callable[[], str]], tuple[socket.socket, float] | None]
Tell = Callable[[Callable[[], SessionState]], bool]


class FramesDropped(Exception):
    """Raised if the guest has dropped frames of the job shell, which must resume the session."""


class GuestConnection:
    """The connection of a session with the agent. A session can continue over a new connection."""

    def __init__(
        self,
        sock: socket.socket,
        again: Reconnect | None = None,
        tell: Tell = lambda _state: False,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reconnect = again
        self._tell = tell
        self._decoder = Decoder()
        self._out = bytearray()
        self._before = 0  # bytes at the start of _out that do not belong to the session
        self._kept = bytearray()  # sent, and not acknowledged
        self._acked = self._told = 0
        self._resumes = False
        self._stdin_window = 0
        self._hellos = 0
        self._nonce = b""

    def hello(self, deadline: float) -> None:
        """Begin a session. Wait for the agent until `deadline` (time.monotonic() seconds).

        Bytes that the guest sent before its answer are skipped. The agent ends the programs of an
        older session. Raises GuestSilent, ConnectionEnded, or StreamError for another protocol
        version.
        """
        self._nonce = os.urandom(8)
        self._stdin_window = 0
        self._out.clear()
        self._kept.clear()
        self._decoder.taken = self._acked = self._told = 0
        answer = self._ask(hello_frame(self._nonce, WINDOW, KEEPS), deadline, RESYNC_FIRST)
        _, _, version, flags, window = HELLO.unpack_from(answer, HEADER.size)
        if version != PROTOCOL or not 0 < window <= WINDOW_MAX:
            raise StreamError(
                f"the guest's agent uses protocol {version} (window {window}), but this vTorque "
                f"uses {PROTOCOL}: rebuild the image"
            )
        self._resumes = bool(flags & KEEPS)
        self._stdin_window = window

    def _ask(
        self, hello: bytes, deadline: float, pause: float, stopped: Callable[[], str] = str
    ) -> bytes:
        """Send a HELLO; repeat it after ``pause`` seconds, and double ``pause`` each time.

        Returns the answer. Raises RunAbandoned if ``stopped()`` returns a reason.
        """
        prefix = hello_prefix(self._nonce)
        seen, skipped = bytearray(), 0
        again = time.monotonic()
        self._hellos = 0
        while True:
            now = time.monotonic()
            if stopped():
                raise RunAbandoned(stopped())
            if now >= deadline:
                raise GuestSilent("the guest's agent does not answer")
            if now >= again and not self._out:
                self._out += (RESYNC if self._hellos else b"") + hello
                self._before = len(self._out)
                self._hellos += 1
                again, pause = now + pause, pause * 2
            until = min(deadline, again if not self._out else deadline, now + LOOK_UP)
            self._wait(max(0.0, until - now))
            seen += self._receive()
            at = seen.find(prefix)
            end = at + HEADER.size + HELLO.size
            while (
                at >= 0
                and end <= len(seen)
                and _session_flags(seen[at:end]) != _session_flags(hello)
            ):
                at = seen.find(prefix, at + 1)  # skip an answer to an earlier RESUME
                end = at + HEADER.size + HELLO.size
            if at >= 0 and end <= len(seen):
                self._hellos -= 1
                self._decoder.reset(bytes(seen[end:]))
                return bytes(seen[at:end])
            drop = at if at >= 0 else max(0, len(seen) - len(prefix))
            skipped += drop
            del seen[:drop]
            if skipped > DISCARD_MAX:
                raise StreamError(f"the guest sent {skipped} bytes, but no HELLO")

    def resume_session(self, broken: ConnectionEnded | None, stopped: Callable[[], str]) -> None:
        """Resume the session; if `broken` is set, open a new connection first.

        Raises `broken` if the guest cannot be reached again, ConnectionEnded if the guest has ended
        the job, RunAbandoned if ``stopped()`` returns a reason, GuestSilent or StreamError.
        """
        deadline = time.monotonic() + RESUME_SECONDS
        while True:
            if broken is not None:
                found = self._reconnect(stopped) if self._reconnect and self._resumes else None
                if stopped():
                    raise RunAbandoned(stopped())
                if found is None:
                    raise broken
                self.close()
                self._sock, deadline = found
                self._sock.setblocking(False)
            try:
                answer = self._ask_resume(deadline, stopped)
            except ConnectionEnded as error:
                broken = error
            else:
                return self._check_resume(answer)

    def _ask_resume(self, deadline: float, stopped: Callable[[], str]) -> bytes:
        unsent, self._out = self._out[self._before :], bytearray()
        flags = RESUMES | int.from_bytes(os.urandom(2), "little") << FLAG_BITS & 0xFFFF
        hello = hello_frame(self._nonce, self._decoder.taken & POSITION_MASK, flags)
        try:
            return self._ask(hello, deadline, float("inf"), stopped)
        finally:
            self._out, self._before = unsent, 0

    def _check_resume(self, answer: bytes) -> None:
        _, _, _, flags, taken = HELLO.unpack_from(answer, HEADER.size)
        if not flags & RESUMES:
            raise ConnectionEnded(
                "the guest ended the job because the job shell was disconnected for too long"
            )
        self._forget(taken)
        self._out[:0] = self._kept
        self._kept.clear()

    def _forget(self, taken: int) -> None:
        more = (taken - self._acked) & POSITION_MASK
        if more > POSITION_MASK // 2:  # a late ACK: a resume has acknowledged more since
            return
        if more > len(self._kept):
            raise StreamError("the guest acknowledged data that was not sent")
        del self._kept[:more]
        self._acked += more

    def handle_ack(self, item: Frame) -> None:
        """Handle an ACK. Raises FramesDropped if the ACK reports that the guest drops frames."""
        if not self._resumes:
            raise StreamError("the guest sent an ACK out of order")
        self._forget(int.from_bytes(item.payload, "little"))
        if item.stream:
            raise FramesDropped

    def acknowledge(self) -> None:
        """Send an ACK if at least ACK_EVERY bytes were received since the last ACK."""
        if self._resumes and self._decoder.taken - self._told >= ACK_EVERY:
            self._told = self._decoder.taken
            self._out += ack_frame(self._told)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

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
                    if self._resumes:
                        self._kept += view[min(sent, self._before) : sent]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ConnectionEnded(
                    f"the connection to the guest broke: {error.strerror}"
                ) from error
            del self._out[:sent]
            self._before -= min(sent, self._before)
            if len(self._kept) > KEPT_MAX:
                raise StreamError(
                    f"the guest has not acknowledged {len(self._kept)} bytes; the limit is "
                    f"{KEPT_MAX}"
                )

    def _receive(self) -> bytes:
        try:
            data = self._sock.recv(8 * CHUNK)
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as error:
            raise ConnectionEnded(f"the connection to the guest broke: {error.strerror}") from error
        if not data:
            raise ConnectionEnded("the guest died: its connection ended")
        return data


def _session_flags(hello: bytes | bytearray) -> int:
    flags: int = HELLO.unpack_from(hello, HEADER.size)[3]
    return flags >> FLAG_BITS
