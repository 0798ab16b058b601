"""The connection between a waiting command and its job: who the other is, then framed streams.

Both have a key of 256 bits that was made for this connection. The waiting side speaks first and
proves that it has the key (HMAC-SHA256, RFC 2104); so the job's side says nothing at all to a host
that a forged request names. Then each answers the other's random bytes. Every frame after that has
a tag, so that nobody on the way can add one, leave one out or change one; they can read them, as
they can what ``qsub -I`` sends.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
import time

from vtorque_core.api import VtorqueError

KEY = 32  # bytes
HANDSHAKE = 2.0  # seconds for both sides to say who they are, however they say it
LARGEST = 1 << 16  # bytes of a frame's content
IN, OUT, ERR, SIZE, END = 1, 2, 3, 4, 5
"""What a frame has: input (empty: its end), output, error output, a terminal's rows and columns
(two numbers of 16 bits), the exit code (one byte; none: the job's script has ended before)."""

_NONCE, _SUM, _TAG = 32, 32, 16  # bytes
_HEAD = struct.Struct(">BI")


class Broken(VtorqueError):
    """The other side is not who it should be, or has gone."""


class Stream:
    """Frames over a connection, after both sides have proved who they are."""

    def __init__(self, connection: socket.socket, sends: bytes, receives: bytes) -> None:
        self._connection, self._sends, self._receives = connection, sends, receives
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Stream:
        """Return the stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._connection.close()

    def send(self, kind: int, data: bytes) -> None:
        """Send one frame; any thread may. Raises OSError."""
        with self._lock:
            head = _HEAD.pack(kind, len(data))
            self._connection.sendall(head + data + _tag(self._sends, self._sent, head + data))
            self._sent += 1

    def receive(self) -> tuple[int, bytes] | None:
        """Return the next frame; None: the other side has closed. Raises Broken, OSError."""
        first = self._connection.recv(1)
        if not first:
            return None
        head = first + exactly(self._connection, _HEAD.size - 1)
        kind, length = _HEAD.unpack(head)
        if length > LARGEST:
            raise Broken(f"the other side sent a frame of {length} bytes: the most is {LARGEST}")
        data = exactly(self._connection, length)
        tag = exactly(self._connection, _TAG)
        if not hmac.compare_digest(tag, _tag(self._receives, self._received, head + data)):
            raise Broken("what came was changed on its way")
        self._received += 1
        return kind, data


def greet(connection: socket.socket, key: bytes, until: float) -> Stream:
    """Prove that we wait, and see that the other side is the job. Raises Broken, OSError.

    ``until``: when the other side must have said all, by the monotonic clock.
    """
    mine = os.urandom(_NONCE)
    connection.sendall(mine + _sum(key, b"waiting", mine))
    answer = exactly(connection, _NONCE + _SUM, until)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _sum(key, b"job", mine, theirs)):
        raise Broken("who has connected does not know the key of this request")
    connection.sendall(_sum(key, b"waiting too", mine, theirs))
    return Stream(
        connection, _sum(key, b"to job", mine, theirs), _sum(key, b"from job", mine, theirs)
    )


def answer(connection: socket.socket, key: bytes, until: float) -> Stream:
    """See that the other side waits, without a word to it before; prove that we are the job.

    ``until``: as of :func:`greet`. Raises Broken, OSError.
    """
    first = exactly(connection, _NONCE + _SUM, until)
    theirs, proof = first[:_NONCE], first[_NONCE:]
    if not hmac.compare_digest(proof, _sum(key, b"waiting", theirs)):
        raise Broken("who answers there does not know the key of this request")
    mine = os.urandom(_NONCE)
    connection.sendall(mine + _sum(key, b"job", theirs, mine))
    proof = exactly(connection, _SUM, until)
    if not hmac.compare_digest(proof, _sum(key, b"waiting too", theirs, mine)):
        raise Broken("who answers there has the proof of another connection")
    return Stream(
        connection, _sum(key, b"from job", theirs, mine), _sum(key, b"to job", theirs, mine)
    )


def exactly(connection: socket.socket, count: int, until: float | None = None) -> bytes:
    """Return so many bytes. Raises Broken: the connection was closed before; OSError.

    ``until``: when all must have come, by the monotonic clock; a socket's own timeout starts anew
    with each byte.
    """
    data = b""
    while len(data) < count:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            raise Broken("the other side has closed the connection")
        data += part
    return data


def _sum(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"vtorque-login 1\0" + b"\0".join(parts), "sha256")


def _tag(key: bytes, number: int, frame: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + frame, "sha256")[:_TAG]
