"""The real agent's session over a connection that breaks, loses bytes and is restored."""

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from local_agent import HostedAgent, run, sh
from patience import LONG, eventually
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.frames import (
    HEADER,
    HELLO,
    ConnectionEnded,
    RunAbandoned,
    StreamError,
)
from vtorque_linux_guest.job.session_state import SessionState
from vtorque_linux_guest.job.start_request import Pty, StartRequest
from vtorque_linux_guest.job.status_port import StatusReader
from vtorque_linux_guest.job.stream import ExitStatus, Session

pytestmark = pytest.mark.e2e

PYTHON = "/usr/bin/python3" if os.getuid() == 0 else sys.executable
HELLO_SIZE = HEADER.size + HELLO.size
DEVNULL = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
quick = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


@dataclass(frozen=True)
class BreakPoint:
    """The place of a break: after this many bytes to the host (1) or to the guest (0)."""

    way: int
    after: int
    noticed: bool = True
    """Whether the guest notices it. QEMU's port may be open again before the guest has checked."""


class Wire:
    """Between sessions and the agent, like QEMU; it breaks at each of the cuts."""

    def __init__(self, agent: HostedAgent, status: StatusReader) -> None:
        self.agent, self.status = agent, status
        self.held = 600
        self.at_cut: Callable[[], object] = lambda: None
        self._near: queue.Queue[socket.socket | None] = queue.Queue()
        self._cuts: queue.Queue[BreakPoint] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._near.put(None)
        self._thread.join(LONG)

    def connect(self) -> socket.socket:
        host, near = socket.socketpair()
        self._near.put(near)
        return host

    def again(self, stopped: Callable[[], str]) -> tuple[socket.socket, float] | None:
        return None if stopped() else (self.connect(), time.monotonic() + LONG)

    def session(self, *cuts: BreakPoint) -> Session:
        """Start a session; ``cuts`` has one entry for each of its connections."""
        assert self._cuts.empty()
        session = Session(self.connect(), self.again)
        session.hello(time.monotonic() + LONG)
        for cut in cuts:
            self._cuts.put(cut)
        return session

    def hold(self, seconds: int) -> None:
        self.status.hold(seconds, time.monotonic() + LONG)

    def _serve(self) -> None:
        guest = self.agent.connect()
        while (near := self._near.get()) is not None:
            cut = self._relay(near, guest)
            near.close()
            if cut is None or cut.noticed:
                guest.close()
                guest = self.agent.connect()
        guest.close()

    def _relay(self, near: socket.socket, guest: socket.socket) -> BreakPoint | None:
        """Forward bytes until an end closes, or until the cut; bytes in transit are lost then."""
        ends, passed, cut, hellos = (near, guest), [0, 0], None, [HELLO_SIZE, HELLO_SIZE]
        poller = select.poll()
        for end in ends:
            poller.register(end, select.POLLIN)
        while True:
            if cut is None and not any(hellos):
                with contextlib.suppress(queue.Empty):
                    cut = self._cuts.get_nowait()
                    passed = [0, 0]
            if cut is not None and passed[cut.way] >= cut.after:
                self.hold(self.held)
                self.at_cut()
                for end in ends:
                    end.setblocking(False)
                    with contextlib.suppress(OSError):
                        end.recv(1 << 20)
                    end.setblocking(True)
                return cut
            for fd, _ in poller.poll():
                way = [end.fileno() for end in ends].index(fd)
                left = hellos[way] or (
                    cut.after - passed[way] if cut and cut.way == way else 1 << 16
                )
                try:
                    data = ends[way].recv(min(left, 1 << 16)) if left else b""
                    if left and not data:
                        return None
                    ends[1 - way].sendall(data)
                except OSError:
                    return None
                hellos[way] -= min(hellos[way], len(data))
                passed[way] += len(data)
                if cut is not None and passed[cut.way] >= cut.after:
                    break


@pytest.fixture(scope="module")
def wire(binary: Path) -> Iterator[Wire]:
    with HostedAgent(binary) as agent:
        status = StatusReader(agent.status())
        list(status.steps(time.monotonic() + LONG))
        wire = Wire(agent, status)
        yield wire
        wire.close()


SMALL = sh("cat; echo error >&2; exit 7")


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "unnoticed"])
@pytest.mark.parametrize("way", [0, 1], ids=["to-guest", "to-host"])
def test_break_after_each_byte_loses_nothing(wire: Wire, way: int, noticed: bool) -> None:
    every = 5
    size = (len(SMALL.encode()) + 60, 130)[way]
    for after in range(0, size, every):
        session = wire.session(BreakPoint(way, after, noticed))
        status, out, err = run(session, SMALL, b"input\n")
        session.close()
        assert (status.code, out, err) == (7, b"input\n", b"error\n"), after
        while not wire._cuts.empty():  # the run was over before
            wire._cuts.get()


cuts = st.lists(
    st.builds(
        BreakPoint,
        st.integers(0, 1),
        st.one_of(st.integers(0, 200), st.integers(0, 400_000)),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)
BOTH = """
import os, sys, threading
def errors():
    for i in range(30000): os.write(2, b'%d\\n' % i)
thread = threading.Thread(target=errors); thread.start()
while data := os.read(0, 70000):
    while data: data = data[os.write(1, data):]
thread.join()
sys.exit(9)
"""
DATA = Random(16).randbytes(1_500_000)  # noqa: S311 - the same in each run


@settings(quick, max_examples=max(10, settings().max_examples // 5))
@given(cuts)
def test_no_byte_is_lost_or_doubled_with_much_in_flight(wire: Wire, cuts: list[BreakPoint]) -> None:
    session = wire.session(*cuts)
    start = StartRequest(argv=(PYTHON, "-c", BOTH), env={})
    status, out, err = run(session, start, DATA)
    assert status.code == 9
    assert out == DATA
    assert err == b"".join(b"%d\n" % i for i in range(30000))
    assert run(session, sh("echo next; exit 3"))[:2] == (ExitStatus(3, None), b"next\n")
    session.close()
    while not wire._cuts.empty():
        wire._cuts.get()


COUNTS = """
import signal, sys
numbers = {signal.SIGRTMIN, signal.SIGRTMIN + 1}  # the lower one comes first
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print('up', flush=True)
count = 0
while signal.sigwait(numbers) == signal.SIGRTMIN: count += 1
print(count, flush=True)
sys.exit(count % 100)
"""


@settings(quick, max_examples=max(10, settings().max_examples // 5))
@given(st.lists(st.tuples(st.integers(0, 120), st.booleans()), min_size=1, max_size=5))
def test_each_signal_arrives_once(wire: Wire, breaks: list[tuple[int, bool]]) -> None:
    """Signals that the kernel does not merge (signal(7), real-time signals)."""
    session = wire.session()
    read, write = os.pipe()
    with Events() as events, os.fdopen(read, "rb") as said:

        def act() -> None:
            assert said.readline() == b"up\n"
            for after, noticed in breaks:
                wire._cuts.put(BreakPoint(0, after, noticed))
            for _ in range(57):
                events.signal(signal.SIGRTMIN)
                time.sleep(0)
            events.signal(signal.SIGRTMIN + 1)

        thread = threading.Thread(target=act)
        thread.start()
        status = session.run(
            StartRequest(argv=(PYTHON, "-c", COUNTS), env={}), None, write, DEVNULL, events
        )
        os.close(write)
        thread.join(LONG)
        assert (status.code, said.read()) == (57, b"57\n")
    session.close()
    while not wire._cuts.empty():
        wire._cuts.get()


def test_window_size_changed_during_a_break_reaches_the_terminal(wire: Wire) -> None:
    session = wire.session(BreakPoint(0, 0))
    wire.at_cut = lambda: events.winsize(51, 133)
    with Events() as events, tempfile.TemporaryFile() as out:
        script = "until [ \"$(stty size)\" = '51 133' ]; do sleep 0.05; done; exit 8"
        start = sh(script, pty=Pty("dumb", 24, 80))
        try:
            status = session.run(start, None, out.fileno(), DEVNULL, events)
        finally:
            wire.at_cut = lambda: None
    session.close()
    assert status.code == 8


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "unnoticed"])
def test_job_that_ends_during_the_break_keeps_output_and_code(wire: Wire, noticed: bool) -> None:
    done = wire.agent.home / f"done-{noticed}"
    session = wire.session(BreakPoint(1, 10, noticed))

    wire.at_cut = lambda: eventually(done.exists)
    try:
        status, out, _ = run(session, sh(f"echo first; sleep 0.1; echo last; : > {done}; exit 6"))
    finally:
        wire.at_cut = lambda: None
    session.close()
    assert (status.code, out) == (6, b"first\nlast\n")


def test_hold_without_a_break_loses_nothing(wire: Wire) -> None:
    """Output that the agent has dropped is sent again over the same connection."""
    session = wire.session()
    read, write = os.pipe()
    out_read, out_write = os.pipe()

    def act() -> None:
        os.write(write, b"one\n")
        assert os.read(out_read, 100) == b"one\n"
        wire.hold(600)
        os.write(write, b"two\n")
        eventually(lambda: not session._out and session._kept.endswith(b"two\n"))
        wire.hold(0)
        assert os.read(out_read, 100) == b"two\n"
        os.close(write)

    thread = threading.Thread(target=act)
    thread.start()
    status = session.run(sh("cat; exit 5"), read, out_write, DEVNULL)
    thread.join(LONG)
    for fd in (read, out_read, out_write):
        os.close(fd)
    session.close()
    assert status.code == 5


def test_host_that_does_not_return_ends_the_job(binary: Path) -> None:
    """The job is ended as if nothing had been held."""
    with HostedAgent(binary) as agent:
        status = StatusReader(agent.status())
        list(status.steps(time.monotonic() + LONG))
        first = agent.connect()
        session = Session(first)
        session.hello(time.monotonic() + LONG)
        read, write = os.pipe()
        term = agent.home / "term"

        def leave() -> None:
            os.read(read, 3)
            status.hold(1, time.monotonic() + LONG)
            agent.run_listener.close()
            first.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=leave)
        thread.start()
        script = f"trap ': > {term}; exit' TERM; echo up; sleep 600 & wait"
        with pytest.raises(ConnectionEnded):
            session.run(sh(script), None, write, DEVNULL)
        thread.join(LONG)
        eventually(term.exists)
        os.close(read)
        os.close(write)


def test_unexpected_break_ends_the_session(binary: Path) -> None:
    with HostedAgent(binary) as agent:
        agent.ready()
        first = agent.connect()
        session = Session(first)
        session.hello(time.monotonic() + LONG)
        with Events() as events:
            thread = threading.Timer(0.1, first.shutdown, (socket.SHUT_RDWR,))
            thread.start()
            with pytest.raises(ConnectionEnded):
                session.run(sh("sleep 600"), None, DEVNULL, DEVNULL, events)
            thread.join()
        first.close()


def test_hold_without_a_job_shell_is_refused(binary: Path) -> None:
    with HostedAgent(binary) as agent:
        status = StatusReader(agent.status())
        list(status.steps(time.monotonic() + LONG))
        with pytest.raises(StreamError, match="no job shell"):
            status.hold(60, time.monotonic() + LONG)


def test_stop_ends_the_wait_for_a_connection(wire: Wire) -> None:
    session = wire.session(BreakPoint(1, 1))
    with Events() as events:

        def never(stopped: Callable[[], str]) -> None:
            events.stop("killed")
            assert stopped() == "killed"

        session._reconnect = never
        with pytest.raises(RunAbandoned, match="killed"):
            session.run(sh("echo up; sleep 600"), None, DEVNULL, DEVNULL, events)
    session.close()


@settings(quick, max_examples=max(10, settings().max_examples // 5))
@given(cut=st.integers(0, 300_000), noticed=st.booleans())
def test_another_job_shell_continues_the_session(wire: Wire, cut: int, noticed: bool) -> None:
    """The first agent ends with the connection; a second one gets its state as text."""
    session = wire.session(BreakPoint(1, cut, noticed))
    text = b"".join(b"%d\n" % i for i in range(40_000))
    start = sh("seq 0 39999; cat >&2; exit 4")
    read, write = os.pipe()
    os.write(write, b"some input\n")
    os.close(write)
    with Events() as events, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

        def leave(stopped: Callable[[], str]) -> None:
            events.stop("leaves")

        session._reconnect = leave
        try:
            status = session.run(start, read, out.fileno(), err.fileno(), events)
        except RunAbandoned as abandoned:
            session.close()
            assert abandoned.state is not None
            state = SessionState.from_json(abandoned.state.to_json())
            assert state == abandoned.state
            assert os.fstat(out.fileno()).st_size == state.written[0]
            session = Session(wire.connect(), wire.again)
            session.resume(state, time.monotonic() + LONG)
            status = session.run(state, read, out.fileno(), err.fileno())
        session.close()
        os.close(read)
        while not wire._cuts.empty():
            wire._cuts.get()
        out.seek(0)
        err.seek(0)
        assert (status.code, out.read(), err.read()) == (4, text, b"some input\n")


def test_exported_state_lets_another_job_shell_continue(wire: Wire) -> None:
    """The state is exported repeatedly until it is read, while the script runs."""
    said: list[SessionState] = []
    calls = 0

    def tell(state: Callable[[], SessionState]) -> bool:
        nonlocal calls
        calls += 1
        if calls < 3:
            return True
        said.append(state())
        events.stop("as if it went on elsewhere")
        return False

    session = Session(wire.connect(), wire.again, tell)
    session.hello(time.monotonic() + LONG)
    read, write = os.pipe()
    with Events() as events, tempfile.TemporaryFile() as out:

        def act() -> None:
            os.write(write, b"one\n")
            while os.fstat(out.fileno()).st_size < 4:
                time.sleep(0.01)
            assert calls == 0
            wire.hold(600)

        thread = threading.Thread(target=act)
        thread.start()
        with pytest.raises(RunAbandoned):
            session.run(sh("cat; exit 5"), read, out.fileno(), DEVNULL, events)
        thread.join(LONG)
        session.close()
        session = Session(wire.connect(), wire.again)
        session.resume(said[0], time.monotonic() + LONG)
        os.write(write, b"two\n")
        os.close(write)
        status = session.run(said[0], read, out.fileno(), DEVNULL)
        session.close()
        out.seek(0)
        assert (status.code, out.read()) == (5, b"one\ntwo\n")
    os.close(read)
