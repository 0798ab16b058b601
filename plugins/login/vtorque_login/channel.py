"""Connection between a job and a command that waits on another host for the job's answer.

Both sides have a 256-bit key made for this connection. The waiting side first proves that it has
the key (HMAC-SHA256, RFC 2104), so the job's side sends nothing to a host named by a forged
request. Then each side authenticates the other's random bytes. Input, output and exit code follow
in frames. Each frame has an HMAC, so that nobody can add, drop or change frames. As with
``qsub -I``, nothing is encrypted.
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
HANDSHAKE = 2.0  # seconds in which both sides must be authenticated
LARGEST = 1 << 16  # bytes of a frame's content
IN, OUT, ERR, SIZE, END = 1, 2, 3, 4, 5
"""Frame types: input (empty at its end), standard output, standard error, rows and columns of the
terminal (16 bits each), exit code (one byte; empty if the job's script ended before)."""

_NONCE, _SUM, _TAG = 32, 32, 16  # bytes
_HEAD = struct.Struct(">BI")


class ChannelBroken(VtorqueError):
    """An error of the connection: the other side is not authentic, or has disconnected."""


class Stream:
    """Authenticated frames over a connection."""

    def __init__(self, connection: socket.socket, sends: bytes, receives: bytes) -> None:
        self._connection, self._sends, self._receives = connection, sends, receives
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, kind: int, data: bytes) -> None:
        """Send one frame. Thread-safe."""
        with self._lock:
            head = _HEAD.pack(kind, len(data))
            self._connection.sendall(head + data + _tag(self._sends, self._sent, head + data))
            self._sent += 1

    def receive(self) -> tuple[int, bytes] | None:
        """Return the next frame, or None if the other side has closed the connection.

        Raise ChannelBroken if the frame is invalid.
        """
        first = self._connection.recv(1)
        if not first:
            return None
        head = first + read_exactly(self._connection, _HEAD.size - 1)
        kind, length = _HEAD.unpack(head)
        if length > LARGEST:
            raise ChannelBroken(f"received a frame of {length} bytes, and the limit is {LARGEST}")
        data = read_exactly(self._connection, length)
        tag = read_exactly(self._connection, _TAG)
        if not hmac.compare_digest(tag, _tag(self._receives, self._received, head + data)):
            raise ChannelBroken("received data that was modified in transit")
        self._received += 1
        return kind, data


def greet(connection: socket.socket, key: bytes, until: float) -> Stream:
    """Return the stream to the job, after both sides have proved to have ``key``.

    Raises ChannelBroken if the other side is not the job. ``until`` is the deadline by the
    monotonic clock.
    """
    mine = os.urandom(_NONCE)
    connection.sendall(mine + _sum(key, b"waiting", mine))
    answer = read_exactly(connection, _NONCE + _SUM, until)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _sum(key, b"job", mine, theirs)):
        raise ChannelBroken("the peer that connected failed authentication: wrong key")
    connection.sendall(_sum(key, b"waiting too", mine, theirs))
    return Stream(
        connection, _sum(key, b"to job", mine, theirs), _sum(key, b"from job", mine, theirs)
    )


def answer(connection: socket.socket, key: bytes, until: float) -> Stream:
    """Return the stream to the requesting host, after both sides have proved to have ``key``.

    The requesting host proves it first. Raises ChannelBroken if a proof is wrong or missing.
    ``until`` is the deadline by the monotonic clock.
    """
    first = read_exactly(connection, _NONCE + _SUM, until)
    theirs, proof = first[:_NONCE], first[_NONCE:]
    if not hmac.compare_digest(proof, _sum(key, b"waiting", theirs)):
        raise ChannelBroken("the peer failed authentication: wrong key")
    mine = os.urandom(_NONCE)
    connection.sendall(mine + _sum(key, b"job", theirs, mine))
    proof = read_exactly(connection, _SUM, until)
    if not hmac.compare_digest(proof, _sum(key, b"waiting too", theirs, mine)):
        raise ChannelBroken("the peer replayed the authentication of another connection")
    return Stream(
        connection, _sum(key, b"from job", theirs, mine), _sum(key, b"to job", theirs, mine)
    )


def read_exactly(connection: socket.socket, count: int, until: float | None = None) -> bytes:
    """Return exactly ``count`` bytes. Raise ChannelBroken if the connection ends first.

    ``until`` is the deadline for all bytes by the monotonic clock, because a socket's timeout would
    restart with each byte.
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
            raise ChannelBroken("the peer has closed the connection")
        data += part
    return data


def _sum(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"vtorque-login 1\0" + b"\0".join(parts), "sha256")


def _tag(key: bytes, number: int, frame: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + frame, "sha256")[:_TAG]
