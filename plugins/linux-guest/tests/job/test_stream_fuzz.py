"""Random bytes and random frames, to the host side and to the real agent under its sanitizers."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from local_agent import HostedAgent, run, sh
from patience import LONG
from vtorque_linux_guest.job.frames import (
    HEADER,
    KEEPS,
    Decoder,
    FrameKind,
    StreamError,
    frame,
    hello_frame,
)
from vtorque_linux_guest.job.start_request import StartRequest
from vtorque_linux_guest.job.status_port import StatusReader
from vtorque_linux_guest.job.stream import ExitStatus, Session

NULL = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
EXIT = frame(FrameKind.EXIT, 0, struct.pack("<BBH", 0, 0, 3))

sizes = st.one_of(st.integers(0, 32), st.sampled_from([4, 8, 24, 4096, 65535, 65536]))
payloads = st.one_of(st.binary(max_size=64), sizes.map(lambda n: b"\1" * n))
well_formed = st.builds(frame, st.sampled_from(FrameKind), st.integers(0, 3), payloads)
raw_headers = st.builds(
    HEADER.pack,
    st.integers(0, 255),
    st.integers(0, 255),
    st.sampled_from([0, 0, 0, 1, 65535]),
    st.integers(0, 2**32 - 1),
)
pieces = st.lists(
    st.one_of(well_formed, well_formed, raw_headers, st.binary(max_size=100), st.just(EXIT)),
    max_size=12,
).map(b"".join)
quick = settings(
    deadline=None,
    max_examples=settings().max_examples * 3 // 2,
    suppress_health_check=list(HealthCheck),
    database=None,
)


class HostileGuest:
    """Answers the HELLO, sends its bytes, reads all input and closes."""

    def __init__(self, sock: socket.socket, data: bytes) -> None:
        self.sock, self.data = sock, data
        self.thread = threading.Thread(target=self.play)
        self.thread.start()

    def play(self) -> None:
        try:
            nonce = self.sock.recv(65536)[16:24]
            self.sock.sendall(hello_frame(nonce, 65536, KEEPS) + self.data)
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(65536):
                pass
        except OSError:
            return


@quick
@given(pieces)
def test_session_returns_or_raises_stream_error(data: bytes) -> None:
    host, end = socket.socketpair()
    with host, end:
        guest = HostileGuest(end, data)
        session = Session(host)
        session.hello(time.monotonic() + LONG)
        try:
            status = session.run(StartRequest(argv=("x",), env={}), None, NULL, NULL)
            assert isinstance(status, ExitStatus) and 0 <= status.code <= 255
        except StreamError as error:
            assert str(error).isprintable()
        host.shutdown(socket.SHUT_RDWR)
        guest.thread.join(LONG)


@quick
@given(pieces, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_decoder_does_not_depend_on_how_bytes_are_cut(data: bytes, cuts: list[int]) -> None:
    def decode(chunks: list[bytes]) -> tuple[list[object], str]:
        decoder, found = Decoder(), []
        try:
            for chunk in chunks:
                found.extend(iter_into(decoder, chunk, found))
        except StreamError as error:
            return found, str(error)
        return found, ""

    def iter_into(decoder: Decoder, chunk: bytes, found: list[object]) -> list[object]:
        for item in decoder.frames(chunk):
            found.append(item)
        return []

    chunks, at = [], 0
    for cut in cuts * (len(data) // sum(cuts) + 1):
        chunks.append(data[at : at + cut])
        at += cut
    assert decode([data]) == decode(chunks)


@quick
@given(st.binary(max_size=3000))
def test_hello_returns_or_raises_stream_error(data: bytes) -> None:
    host, end = socket.socketpair()
    with host, end:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        with pytest.raises(StreamError):
            Session(host).hello(time.monotonic() + LONG)


lines = st.lists(
    st.one_of(
        st.binary(max_size=50),
        st.sampled_from([b"STEP x", b"READY 1", b"FAILED y", b"STEP", b"SYNCED", b"\xff\x1b"]),
    ),
    max_size=20,
).map(b"\n".join)


@quick
@given(lines)
def test_status_returns_or_raises_stream_error(data: bytes) -> None:
    host, end = socket.socketpair()
    with host, end:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        try:
            assert all(
                step.isprintable() for step in StatusReader(host).steps(time.monotonic() + LONG)
            )
        except StreamError as error:
            assert str(error).isprintable()


@pytest.fixture(scope="module")
def agent(binary: Path) -> Iterator[HostedAgent]:
    with HostedAgent(binary) as running:
        running.ready()
        yield running


def element(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


elements = st.lists(
    st.builds(element, st.integers(0, 10), st.one_of(st.binary(max_size=20), st.just(b"a=b\0"))),
    max_size=8,
).map(b"".join)
# A job that these may start is always /bin/true: its first argument is the test's.
starts = elements.map(lambda more: frame(FrameKind.START, 1, element(1, b"/bin/true\0") + more))
to_agent = st.lists(
    st.one_of(
        well_formed,
        raw_headers,
        st.binary(max_size=100),
        starts,
        starts,
        st.just(hello_frame(b"abcdefgh", 4096)),
        st.builds(
            hello_frame,
            st.sampled_from([b"abcdefgh", b"hgfedcba"]),
            st.one_of(st.integers(0, 200), st.integers(0, 2**32 - 1)),
            st.integers(0, 8),
        ),
        st.just(frame(FrameKind.FILE, 0, b"name")),
        st.just(frame(FrameKind.CREDIT, 1, b"\1\0\0\0")),
    ),
    max_size=15,
).map(b"".join)


def send_and_leave(agent: HostedAgent, data: bytes) -> None:
    """Send without reading an answer for a while, like a host that then dies."""
    with agent.connect() as connection:
        connection.settimeout(LONG)
        connection.sendall(hello_frame(b"abcdefgh", 65536, KEEPS) + data)
        connection.shutdown(socket.SHUT_WR)
        try:
            while connection.recv(65536):
                pass
        except OSError:
            return


@settings(quick, max_examples=2 * settings().max_examples)
@given(to_agent)
def test_agent_survives_random_bytes_and_frames(agent: HostedAgent, data: bytes) -> None:
    send_and_leave(agent, data)
    assert agent.process.poll() is None, agent.log()


def test_agent_still_works_after_the_fuzzing(agent: HostedAgent) -> None:
    send_and_leave(agent, b"\xff" * 1000)
    status, out, _ = run(agent.session(), sh("echo alive"))
    assert (status.code, out) == (0, b"alive\n")
