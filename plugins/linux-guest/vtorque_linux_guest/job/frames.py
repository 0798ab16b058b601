"""The frames of the run port, and the errors of the run and status ports (doc/stream.md). No I/O.

The guest is hostile. Any invalid input raises `StreamError` and no other exception.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from vtorque_linux_guest.job.session_state import SessionState

PROTOCOL = 1
HEADER = struct.Struct("<BBHI")
"""Header of a frame: type, stream, reserved (0), length of the payload in bytes."""
HELLO = struct.Struct("<8s8sHHI")
"""Payload of a HELLO: magic, nonce, protocol version, flags, window in bytes (with RESUMES: bytes
received so far)."""
KEEPS, RESUMES = 1, 2
"""Flags of a HELLO. KEEPS: the sender can resume a session. RESUMES: it resumes one."""
FLAG_BITS = 2
"""Number of bits for flags. The agent echoes the bits above them, to show which RESUME it
answers."""
POSITION_MASK = 0xFFFFFFFF
MAGIC = b"vTorque\n"
PAYLOAD_MAX = 65536
WINDOW_MAX = 1 << 30
TEXT_SHOWN = 4096


class StreamError(Exception):
    """The guest violated the protocol; also the base class of all stream errors."""


class ConnectionEnded(StreamError):
    """The connection ended, because the guest or its QEMU has ended."""


class GuestSilent(StreamError):
    """The guest did not answer before the deadline."""


class GuestFailed(StreamError):
    """The guest's setup failed; `reason` is printable text from the guest."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the guest could not be set up: {reason}")
        self.reason = reason


class StartFailed(StreamError):
    """The agent could not start the program. The session remains usable."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AgentError(StreamError):
    """The agent rejected a request and has ended the session."""


class BadStart(StreamError):
    """The program to start exceeds the protocol's limits. Nothing was sent."""


class RunAbandoned(StreamError):
    """A call of `Events.stop` ended the session before the program in the guest ended.

    When the socket is closed, the agent kills the job, unless root has sent the agent a HOLD on the
    status port. After a HOLD, this job shell can send ``state`` to root (`handover.send_state`).
    Root gives ``state`` to the job shell of the restored job, which resumes the session.
    """

    state: SessionState | None = None


class FrameKind(IntEnum):
    """Frame types."""

    HELLO = 1
    FILE = 2
    START = 3
    DATA = 4
    EOF = 5
    CREDIT = 6
    SIGNAL = 7
    WINSIZE = 8
    EXIT = 9
    ERROR = 10
    ACK = 11


class Tag(IntEnum):
    """Tags of the elements in a START frame."""

    ARG = 1
    FILEARG = 2
    ENV = 3
    CWD = 4
    UMASK = 5
    RLIMIT = 6
    PTY = 7
    MERGE = 8
    MODE = 9


class Frame(NamedTuple):
    """One frame from the guest."""

    kind: FrameKind
    stream: int
    payload: bytes


_RULES: dict[int, tuple[int, int, int]] = {
    # Frames that a guest may send, by kind: number of streams, minimum and maximum length.
    FrameKind.HELLO: (1, HELLO.size, HELLO.size),
    FrameKind.DATA: (3, 1, PAYLOAD_MAX),
    FrameKind.EOF: (3, 0, 0),
    FrameKind.CREDIT: (1, 4, 4),
    FrameKind.EXIT: (1, 4, 4 + TEXT_SHOWN),
    FrameKind.ERROR: (1, 0, TEXT_SHOWN),
    FrameKind.ACK: (2, 4, 4),
}


def frame(kind: FrameKind, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return one frame; `payload` is at most `PAYLOAD_MAX` bytes."""
    return HEADER.pack(kind, stream, 0, len(payload)) + payload


def split_frames(kind: FrameKind, stream: int, payload: bytes) -> bytes:
    """Return `payload` as one or more consecutive frames of this kind and stream."""
    parts = range(0, len(payload), PAYLOAD_MAX)
    return b"".join(frame(kind, stream, payload[at : at + PAYLOAD_MAX]) for at in parts)


def hello_frame(nonce: bytes, window: int, flags: int = 0) -> bytes:
    """Return a HELLO. Its sender accepts `window` bytes per stream before it sends a CREDIT."""
    return frame(FrameKind.HELLO, 0, HELLO.pack(MAGIC, nonce, PROTOCOL, flags, window))


def ack_frame(taken: int) -> bytes:
    """Return an ACK of all frames up to position ``taken`` (bytes since the session began)."""
    return frame(FrameKind.ACK, 0, struct.pack("<I", taken & POSITION_MASK))


def hello_prefix(nonce: bytes) -> bytes:
    """Return the first bytes of the answer to a HELLO with this nonce."""
    return HEADER.pack(FrameKind.HELLO, 0, 0, HELLO.size) + MAGIC + nonce


def printable_text(text: bytes) -> str:
    """Return the first 4096 bytes of a text from the guest in printable form."""
    decoded = text[:TEXT_SHOWN].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in decoded).strip()


def element(tag: Tag, value: bytes) -> bytes:
    """Return one element of a START frame: tag, length, value."""
    return struct.pack("<BI", tag, len(value)) + value


def winsize(rows: int, columns: int) -> bytes:
    """Encode the size of a terminal: rows and columns, then 0 for width and height in pixels."""
    return struct.pack("<HHHH", min(max(rows, 0), 65535), min(max(columns, 0), 65535), 0, 0)


class Decoder:
    """Splits a byte stream into frames. It buffers at most one incomplete frame.

    `taken` is the total size of the returned frames.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.taken = 0

    def reset(self, data: bytes) -> None:
        """Replace the buffered bytes by ``data``."""
        self._buffer = bytearray(data)

    def frames(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes. Raises StreamError at an invalid frame."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= HEADER.size:
                kind, stream, reserved, length = HEADER.unpack_from(buffer, at)
                _check_header(kind, stream, reserved, length)
                end = at + HEADER.size + length
                if len(buffer) < end:
                    return
                payload = bytes(memoryview(buffer)[at + HEADER.size : end])
                self.taken += end - at
                at = end
                yield Frame(FrameKind(kind), stream, payload)
        finally:
            del buffer[:at]


def _check_header(kind: int, stream: int, reserved: int, length: int) -> None:
    if kind not in _RULES:
        raise StreamError(f"the guest sent a frame of unknown type {kind}")
    streams, least, greatest = _RULES[kind]
    if stream >= streams or reserved != 0 or not least <= length <= greatest:
        name = FrameKind(kind).name
        raise StreamError(
            f"the guest sent an invalid {name} frame: stream {stream}, length {length}"
        )
