"""The host side of both ports against a scripted guest, which is hostile in most tests."""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from patience import LONG, with_more_time
from vtorque_linux_guest.job.connection import RESYNCED
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.frames import (
    HEADER,
    HELLO,
    MAGIC,
    PAYLOAD_MAX,
    AgentError,
    BadStart,
    ConnectionEnded,
    FrameKind,
    GuestFailed,
    GuestSilent,
    RunAbandoned,
    StartFailed,
    StreamError,
    frame,
    hello_frame,
    printable_text,
)
from vtorque_linux_guest.job.start_request import FileArg, GuestFileData, StartRequest
from vtorque_linux_guest.job.status_port import StatusReader
from vtorque_linux_guest.job.stream import Session

START = StartRequest(argv=("/bin/true",), env={})
NULL = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
EXIT_3 = frame(FrameKind.EXIT, 0, struct.pack("<BBH", 0, 0, 3))


def recv_exact(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part
        data += part
    return data


class SessionEnd:
    """The guest's end of a session: `answer` the HELLO, then send the test's data."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.nonce = b""

    def read_hello(self) -> bytes:
        self.nonce = recv_exact(self.sock, HEADER.size + HELLO.size)[16:24]
        return self.nonce

    def read_start(self) -> None:
        while True:
            kind, stream, _, length = HEADER.unpack(recv_exact(self.sock, HEADER.size))
            recv_exact(self.sock, length)
            if (kind, stream) == (FrameKind.START, 1):
                return


@pytest.fixture
def pair() -> Iterator[tuple[Session, SessionEnd]]:
    host, guest = socket.socketpair()
    guest.settimeout(LONG)
    yield Session(host), SessionEnd(guest)
    host.close()
    guest.close()


def play(part: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=part)
    thread.start()
    return thread


def opened(pair: tuple[Session, SessionEnd], window: int = 65536) -> tuple[Session, SessionEnd]:
    session, guest = pair
    thread = play(lambda: guest.sock.sendall(hello_frame(guest.read_hello(), window)))
    session.hello(time.monotonic() + LONG)
    thread.join(LONG)
    return session, guest


def answer(
    pair: tuple[Session, SessionEnd], out: list[bytes], *data: bytes, close: bool = False
) -> int:
    """The exit code of a run in which the guest sends `data` after START; its stdout in `out`."""
    session, guest = opened(pair)

    def part() -> None:
        guest.read_start()
        try:
            for piece in data:
                guest.sock.sendall(piece)
        except (BrokenPipeError, TimeoutError):
            return
        if close:
            guest.sock.shutdown(socket.SHUT_RDWR)

    thread = play(part)
    read, write = os.pipe()
    reader = play(lambda: out.extend(iter(lambda: os.read(read, 65536), b"")))
    try:
        return session.run(START, None, write, NULL).code
    finally:
        os.close(write)
        reader.join(LONG)
        os.close(read)
        thread.join(LONG)


def test_program_runs_to_its_exit_code(pair: tuple[Session, SessionEnd]) -> None:
    data = (
        frame(FrameKind.DATA, 1, b"hello\n")
        + frame(FrameKind.EOF, 1)
        + frame(FrameKind.EOF, 2)
        + EXIT_3
    )
    out: list[bytes] = []
    assert (answer(pair, out, data), b"".join(out)) == (3, b"hello\n")


def test_frames_cut_into_single_bytes(pair: tuple[Session, SessionEnd]) -> None:
    data = frame(FrameKind.DATA, 1, b"slow\n") + EXIT_3
    out: list[bytes] = []
    code = answer(pair, out, *(data[i : i + 1] for i in range(len(data))))
    assert (code, b"".join(out)) == (3, b"slow\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\0" * 8, "unknown type 0"),
        (b"\xff" * 64, "unknown type 255"),
        (frame(FrameKind.START, 0, b"x"), "unknown type 3"),
        (HEADER.pack(FrameKind.DATA, 1, 0, PAYLOAD_MAX + 1), "invalid DATA frame"),
        (HEADER.pack(FrameKind.DATA, 1, 0, 0xFFFFFFFF), "invalid DATA frame"),
        (HEADER.pack(FrameKind.DATA, 1, 7, 1) + b"x", "invalid DATA frame"),
        (frame(FrameKind.DATA, 1, b""), "invalid DATA frame"),
        (frame(FrameKind.DATA, 0, b"x"), "than allowed"),
        (frame(FrameKind.DATA, 3, b"x"), "invalid DATA frame"),
        (frame(FrameKind.EOF, 1) + frame(FrameKind.EOF, 1), "twice"),
        (frame(FrameKind.EOF, 1) + frame(FrameKind.DATA, 1, b"x"), "than allowed"),
        (frame(FrameKind.CREDIT, 0, b"\1\0\0\0"), "more standard input"),
        (
            frame(FrameKind.EXIT, 0, struct.pack("<BBH", 9, 0, 0)),
            "the guest sent an invalid exit status:",
        ),
        (
            frame(FrameKind.EXIT, 0, struct.pack("<BBH", 1, 0, 65)),
            "the guest sent an invalid exit status:",
        ),
        (
            frame(FrameKind.EXIT, 0, struct.pack("<BBH", 0, 0, 256)),
            "the guest sent an invalid exit status:",
        ),
        (EXIT_3 + frame(FrameKind.DATA, 1, b"x"), "another frame after EXIT"),
        (hello_frame(b"12345678", 1), "out of order"),
        (frame(FrameKind.ERROR, 0, RESYNCED), "unknown frame type"),  # no HELLO was sent twice
    ],
)
def test_protocol_violation_raises_stream_error(
    pair: tuple[Session, SessionEnd], data: bytes, message: str
) -> None:
    with pytest.raises(StreamError, match=message):
        answer(pair, [], data)
    with pytest.raises(StreamError, match="no session"):
        pair[0].run(START, None, NULL, NULL)


def test_flood_beyond_the_credit_ends_the_run(pair: tuple[Session, SessionEnd]) -> None:
    session, guest = opened(pair)
    read, write = os.pipe()  # never read: no window is granted

    def flood() -> None:
        guest.read_start()
        try:
            while True:
                guest.sock.sendall(frame(FrameKind.DATA, 1, b"x" * PAYLOAD_MAX))
        except (BrokenPipeError, TimeoutError, ConnectionResetError):
            return

    thread = play(flood)
    with pytest.raises(StreamError, match="than allowed"):
        session.run(START, None, write, NULL)
    guest.sock.shutdown(socket.SHUT_RDWR)
    thread.join(LONG)
    os.close(read)
    os.close(write)


def test_death_mid_run_is_named_and_the_last_words_are_written(
    pair: tuple[Session, SessionEnd],
) -> None:
    out: list[bytes] = []
    with pytest.raises(ConnectionEnded):
        answer(pair, out, frame(FrameKind.DATA, 1, b"last words"), close=True)
    assert b"".join(out) == b"last words"


def test_error_and_not_started_are_printable(pair: tuple[Session, SessionEnd]) -> None:
    session, guest = opened(pair)
    text = b"no\x1b[2J such\n\xff file"
    thread = play(
        lambda: (
            guest.read_start(),
            guest.sock.sendall(frame(FrameKind.EXIT, 0, struct.pack("<BBH", 2, 0, 0) + text)),
            guest.read_start(),
            guest.sock.sendall(frame(FrameKind.ERROR, 0, text)),
        )
    )
    with pytest.raises(StartFailed) as not_started:
        session.run(START, None, NULL, NULL)
    with pytest.raises(AgentError) as error:
        session.run(START, None, NULL, NULL)
    thread.join(LONG)
    assert not_started.value.reason == "no?[2J such?\ufffd file"
    assert str(error.value).isprintable()


def test_stop_ends_a_silent_run(pair: tuple[Session, SessionEnd]) -> None:
    session, _ = opened(pair)
    with Events() as events:
        timer = threading.Timer(0.2, events.stop, ("walltime",))
        timer.start()
        with pytest.raises(RunAbandoned, match="walltime"):
            session.run(START, None, NULL, NULL, events)
        timer.join()


def test_stdin_is_sent_only_within_the_window(pair: tuple[Session, SessionEnd]) -> None:
    session, guest = opened(pair, window=1000)
    got: list[int] = []

    def read_frame() -> None:
        kind, _, _, length = HEADER.unpack(recv_exact(guest.sock, HEADER.size))
        recv_exact(guest.sock, length)
        got.append(length if kind == FrameKind.DATA else -1)

    def part() -> None:
        guest.read_start()
        while sum(got) < 1000:
            read_frame()
        guest.sock.settimeout(0.3)
        try:
            while True:
                read_frame()
        except TimeoutError:
            guest.sock.sendall(EXIT_3)

    thread = play(part)
    read, write = os.pipe()
    os.write(write, b"x" * 5000)
    assert session.run(START, read, NULL, NULL).code == 3
    thread.join(LONG)
    os.close(read)
    os.close(write)
    assert sum(got) == 1000


def test_hello_is_answered_despite_older_bytes(pair: tuple[Session, SessionEnd]) -> None:
    session, guest = pair
    old = os.urandom(300_000) + hello_frame(b"87654321", 5) + MAGIC * 3

    def part() -> None:
        nonce = guest.read_hello()
        guest.sock.sendall(old + hello_frame(nonce, 4096))

    thread = play(part)
    session.hello(time.monotonic() + LONG)
    thread.join(LONG)


@pytest.mark.parametrize("between", [b"", frame(FrameKind.ERROR, 0, RESYNCED)])
def test_hello_is_repeated_after_padding_and_answered_twice(
    pair: tuple[Session, SessionEnd], between: bytes
) -> None:
    session, guest = pair

    def part() -> None:
        nonce = guest.read_hello()
        padding = recv_exact(guest.sock, PAYLOAD_MAX + 2 * HEADER.size)
        assert padding == bytes(len(padding))
        assert guest.read_hello() == nonce
        answer = hello_frame(nonce, 4096)
        guest.sock.sendall(answer + between + answer)
        guest.read_start()
        guest.sock.sendall(EXIT_3)

    thread = play(part)
    session.hello(time.monotonic() + LONG)
    assert session.run(START, None, NULL, NULL).code == 3
    thread.join(LONG)


def test_hello_has_a_deadline(pair: tuple[Session, SessionEnd]) -> None:
    session, guest = pair
    deadline = time.monotonic() + 0.3
    with pytest.raises(GuestSilent):
        session.hello(deadline)
    assert time.monotonic() >= deadline - 0.01  # its timeouts are whole milliseconds
    guest.read_hello()


def test_hello_to_a_flood_ends(pair: tuple[Session, SessionEnd]) -> None:
    session, guest = pair
    stop = threading.Event()

    def flood() -> None:
        try:
            while not stop.is_set():
                guest.sock.sendall(b"\1" * 65536)
        except OSError:
            return

    thread = play(flood)
    with pytest.raises(StreamError):
        session.hello(time.monotonic() + LONG)
    stop.set()
    guest.sock.shutdown(socket.SHUT_RDWR)
    thread.join(LONG)


def test_other_protocol_version_is_refused(pair: tuple[Session, SessionEnd]) -> None:
    session, guest = pair
    nonce: list[bytes] = []

    def part() -> None:
        nonce.append(guest.read_hello())
        payload = HELLO.pack(MAGIC, nonce[0], 2, 0, 100)
        guest.sock.sendall(frame(FrameKind.HELLO, 0, payload))

    thread = play(part)
    with pytest.raises(StreamError, match="rebuild the image"):
        session.hello(time.monotonic() + LONG)
    thread.join(LONG)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: {"argv": ()},
        lambda: {"argv": ("a\0b",)},
        lambda: {"env": {"A=B": "c"}},
        lambda: {"env": {"": "c"}},
        lambda: {"env": {"A": "y" * (3 << 20)}},
        lambda: {"argv": (FileArg("nope"),)},
        lambda: {"files": (GuestFileData("../etc", b""),)},
        lambda: {"files": (GuestFileData("a\nb", b""),)},
        lambda: {"files": (GuestFileData("a", bytes(17 << 20)),)},
        lambda: {"files": (GuestFileData("a", b""),) * 17},
        lambda: {"limits": {99: (1, 1)}},
    ],
)
def test_invalid_start_is_refused(
    pair: tuple[Session, SessionEnd], wrong: Callable[[], dict[str, Any]]
) -> None:
    session, _ = opened(pair)
    with pytest.raises(BadStart):
        session.run(StartRequest(**{"argv": ("x",), "env": {}, **wrong()}), None, NULL, NULL)


def status_pair(data: bytes, close: bool = False) -> tuple[StatusReader, list[socket.socket]]:
    host, guest = socket.socketpair()
    guest.setblocking(False)
    while data:
        data = data[guest.send(data) :]
    if close:
        guest.shutdown(socket.SHUT_WR)
    return StatusReader(host), [host, guest]


def wait_ready(data: bytes, close: bool = False, seconds: float = LONG) -> list[str]:
    steps: list[str] = []
    reader, ends = status_pair(data, close)
    try:
        steps += reader.steps(time.monotonic() + seconds)
        assert ends[1].recv(100).startswith(b"STATUS\n")
    finally:
        for end in ends:
            end.close()
    return steps


def test_status_steps_and_ready() -> None:
    data = b"STEP agent\nSTEP agent\nSTEP mount /home\nsomething\nREADY 1\n"
    assert wait_ready(data) == ["agent", "mount /home"]


def test_status_failed_is_printable() -> None:
    with pytest.raises(GuestFailed) as caught:
        wait_ready(b"FAILED mount: \x1b]0;evil\x07 \xff denied\n")
    assert caught.value.reason == "mount: ?]0;evil? \ufffd denied"


def test_status_death_and_deadline_name_the_last_step() -> None:
    with pytest.raises(ConnectionEnded, match="last step: network"):
        wait_ready(b"STEP network\n", close=True)

    def silent(seconds: float) -> None:
        with pytest.raises(GuestSilent, match="last step: disk"):
            wait_ready(b"STEP disk\nREAD", seconds=seconds)

    with_more_time(silent, 0.3, 5, 20)
    with pytest.raises(GuestSilent, match="no step seen"):
        wait_ready(b"", seconds=0.1)


@pytest.mark.parametrize("data", [b"x" * 5000, b"x" * 5000 + b"\nREADY 1\n", b"\n" * 20_000])
def test_status_floods_are_refused(data: bytes) -> None:
    with pytest.raises(StreamError, match="status"):
        wait_ready(data)


def test_shown_has_no_control_characters() -> None:
    assert printable_text(bytes(range(256)) * 3).isprintable()
    assert printable_text("ok ä\u202e".encode()) == "ok ä?"
