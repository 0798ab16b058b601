"""Contract that every guest type passes: wait until a guest is ready, and run a job in it.

A test module subclasses :class:`GuestContract` and provides a double of the guest::

    class TestMine(GuestContract):
        @pytest.fixture
        def harness(self):
            return MyHarness()

For guests with vtorque-agent, use :class:`vtorque_testing.agent_guest.AgentHarness`, which runs the
real agent. The contract calls the driver's ``run`` in the test process, as the job shell does, and
sends signals to that process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import pytest

from vtorque_core.api import HostFault
from vtorque_core.api.guest_driver import GuestDied, GuestDriver, ReadyGuest, Script, Streams
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_testing.wires import Wires, flood, send_data, send_nothing

PROPERTIES = {
    "ready": "root waits for a message of the guest before its job runs",
    "signals": "the script gets the signals that the job shell gets",
    "terminal": "an interactive job has a terminal of the size of the user's terminal",
    "stdin": "the script can read the job's input",
    "stderr": "stderr of the script is separate from its stdout",
    "killed": "a script that a signal ended returns 128 plus its number",
}
"""Optional properties of a guest type. :attr:`GuestHarness.lacks` names the missing ones."""

SHORT = 0.5  # seconds until the deadline of a guest that must not become ready
_PASSED_ON = (
    signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT,
)  # fmt: skip
FULL = pytest.mark.full
_OURS = (*_PASSED_ON, signal.SIGTERM, signal.SIGWINCH, signal.SIGALRM)
_GARBAGE: tuple[Callable[[], Iterable[bytes]], ...] = (
    lambda: [b"\0" * 70_000],
    lambda: [_noise(1, 70_000)],
    lambda: [b"no such word\n" * 20_000],
    lambda: flood(b"a" * 65536),
    lambda: flood(b"\n" * 65536, 1 << 19),
)


def _noise(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)  # noqa: S311 - no secret


class GuestHarness(Protocol):
    """The driver of a guest type, and a double of its guest."""

    driver: GuestDriver
    plan: GuestPlan
    """Plan of the guest. ``run_dir`` and ``state_dir`` exist and have short paths (unix(7))."""
    ready_port: str
    """Socket in ``run_dir`` on which root waits; empty if the guest type lacks ``ready``."""
    ready_mark: bytes
    """The guest is ready once these bytes have arrived completely on ``ready_port``."""
    run_port: str
    """Socket in ``run_dir`` through which the job runs."""
    lacks: Mapping[str, str]
    """Names of missing :data:`PROPERTIES`, each with the reason."""
    scripts: ShellScripts
    patience: float
    """Seconds after which a call of the driver counts as hung; use a large value."""

    def boot(self, fails: str = "") -> contextlib.AbstractContextManager[None]:
        """Boot a guest that runs until the context ends.

        Args:
            fails: if not empty, the guest's setup fails with this message.
        """
        ...

    def connect(self, port: str) -> socket.socket:
        """Return a socket that is connected to this port of the guest."""
        ...


class ShellScripts:
    """The contract's job scripts, for guests with a POSIX shell."""

    def exit_with(self, code: int) -> bytes:
        """Return a script that exits with this status."""
        return b"#!/bin/sh\nexit %d\n" % code

    def print_text(self, text: str) -> bytes:
        """Return a script that prints this text, which consists of complete lines."""
        return f"#!/bin/sh\ncat <<'END'\n{text}END\n".encode()

    def counts(self, lines: int) -> bytes:
        """Return a script that prints the numbers from 1 to ``lines``, one per line."""
        return b"#!/bin/sh\nseq %d\n" % lines

    def wait_for_signal(self) -> bytes:
        """Return a script that prints ``up``, and runs until a signal ends it."""
        return b"#!/bin/sh\necho up\nexec sleep 1000\n"

    def die_of_signal(self, number: int) -> bytes:
        """Return a script that kills itself with this signal."""
        return b"#!/bin/sh\nkill -%d $$\n" % number

    def copies(self) -> bytes:
        """Return a script that copies standard input to standard output."""
        return b"#!/bin/sh\nexec cat\n"

    def prints_both(self, out: str, err: str) -> bytes:
        """Return a script that prints a line to stdout and one to stderr."""
        return f"#!/bin/sh\necho {out}\necho {err} >&2\n".encode()

    def tells_signals(self) -> bytes:
        """Return a script that prints ``up`` and the name of each signal that it gets.

        It exits with 7 at SIGTERM.
        """
        traps = "".join(f"trap 'echo {n.name}' {n.name[3:]}\n" for n in _PASSED_ON)
        more = "trap 'exit 7' TERM\necho up\nwhile :; do sleep 1000 & wait; done\n"
        return f"#!/bin/sh\n{traps}{more}".encode()

    def outlives_term(self) -> bytes:
        """Return a script that prints ``up``, and ignores SIGTERM until SIGKILL."""
        return b"#!/bin/sh\ntrap '' TERM\necho up\nwhile :; do sleep 1000; done\n"

    def tells_size(self) -> bytes:
        """Return a script that prints ``ROWS COLUMNS`` of the terminal at its start.

        When the size changes, the script prints the new size and exits with 5.
        """
        more = b"stty size\nwhile :; do sleep 1000 & wait; done\n"
        return b"#!/bin/sh\ntrap 'stty size; exit 5' WINCH\n" + more


class CallTimeout(BaseException):
    """A call of the driver did not return within ``GuestHarness.patience``."""


@dataclass(frozen=True)
class JobResult:
    """Result of a job: its exit status, or the exception that the driver raised."""

    code: int | None
    died: Exception | None
    out: bytes
    err: bytes


Then = tuple[bytes, Callable[[], None]]
"""Text in the job's output, and an action to run when it appears."""


class GuestContract:
    """Tests of a guest type. Subclass as ``Test...`` and override the fixture ``harness``."""

    @pytest.fixture
    def harness(self) -> GuestHarness:
        """Return the harness of the guest type under test."""
        raise NotImplementedError("override the fixture harness() in the subclass")

    def test_missing_capabilities_are_declared(self, harness: GuestHarness) -> None:
        """``harness.lacks`` must contain only names of :data:`PROPERTIES`, each with a reason."""
        assert not harness.lacks.keys() - PROPERTIES.keys()
        assert all(len(why) > 10 for why in harness.lacks.values()), harness.lacks
        assert bool(harness.ready_port) != ("ready" in harness.lacks)

    # -- before the guest is ready -------------------------------------------------------------

    def test_guest_is_ready_after_its_message(self, harness: GuestHarness) -> None:
        """``await_ready()`` must return after the guest has sent READY, not before.

        The names of the reported steps must be printable.
        """
        _needs(harness, "ready")
        steps: list[str] = []
        with harness.boot(), _wires(harness) as wires:
            wires.watch(harness.ready_port)
            assert _await(harness, steps=steps) is None
            assert harness.ready_mark in wires.passed
        assert all(step and step.isprintable() for step in steps), steps

    def test_ready_message_may_arrive_byte_by_byte(self, harness: GuestHarness) -> None:
        """``await_ready()`` must accept a READY message that arrives byte by byte."""
        _needs(harness, "ready")
        with harness.boot(), _wires(harness) as wires:
            wires.watch(harness.ready_port, chunk=1)
            assert _await(harness) is None

    def test_silence_is_a_host_fault_at_the_deadline(self, harness: GuestHarness) -> None:
        """A guest that sends nothing must cause a HostFault at the deadline."""
        _needs(harness, "ready")
        with _wires(harness) as wires:
            wires.instead[harness.ready_port] = send_nothing
            error = _await(harness, SHORT)
        assert isinstance(error, HostFault), error

    @pytest.mark.parametrize("garbage", range(len(_GARBAGE)))
    def test_garbage_is_not_ready(self, harness: GuestHarness, garbage: int) -> None:
        """Invalid data, even an endless stream of it, must cause a HostFault."""
        _needs(harness, "ready")
        with _wires(harness) as wires:
            wires.instead[harness.ready_port] = send_data(_GARBAGE[garbage]())
            error = _await(harness, SHORT)
        assert isinstance(error, HostFault), error

    def test_failed_setup_reports_the_reason(self, harness: GuestHarness) -> None:
        """The error of a failed setup must contain the guest's text, but no control characters."""
        _needs(harness, "ready")
        with harness.boot(fails="no disk \033[31m here"), _wires(harness):
            error = _await(harness)
        assert isinstance(error, Exception) and "no disk" in str(error), error
        assert str(error).isprintable(), error

    def test_missing_guest_is_a_host_fault(self, harness: GuestHarness) -> None:
        """A missing guest must cause a HostFault before the deadline."""
        _needs(harness, "ready")
        error = _await(harness)
        assert isinstance(error, HostFault), error

    def test_guest_killed_during_boot_is_a_host_fault(self, harness: GuestHarness) -> None:
        """If the guest is killed after any byte of its READY message, HostFault must be raised.

        Success is allowed only if the guest has already sent the complete message.
        """
        _needs(harness, "ready")
        with harness.boot(), _wires(harness) as wires:
            wires.watch(harness.ready_port)
            assert _await(harness) is None
            total = len(wires.passed)
        for cut in range(total):
            with harness.boot(), _wires(harness) as wires:
                wires.watch(harness.ready_port, cut=cut)
                error = _await(harness)
                said = harness.ready_mark in wires.passed
            assert error is not None or said, (cut, bytes(wires.passed))
            assert error is None or isinstance(error, HostFault), (cut, error)

    # -- the job -------------------------------------------------------------------------------

    @pytest.mark.parametrize("code", [0, 1, 3, 127, 128, 255])
    def test_exit_code_is_that_of_the_script(self, harness: GuestHarness, code: int) -> None:
        """``run()`` must return the exit status of the script."""
        assert _job(harness, harness.scripts.exit_with(code)).code == code

    def test_output_is_that_of_the_script(self, harness: GuestHarness) -> None:
        """The output must be exactly that of the script."""
        text = "one\n  two \u00e9 %s \\n\n\nlast\n"
        ran = _job(harness, harness.scripts.print_text(text))
        assert (ran.code, ran.out, ran.err) == (0, text.encode(), b"")

    def test_output_may_arrive_byte_by_byte(self, harness: GuestHarness) -> None:
        """The output must be complete if it arrives byte by byte."""
        ran = _job(harness, harness.scripts.print_text("one\ntwo\n"), chunk=1)
        assert (ran.code, ran.out, ran.err) == (0, b"one\ntwo\n", b"")

    def test_large_output_to_a_late_reader_is_complete(self, harness: GuestHarness) -> None:
        """Large output must be complete even if the reader starts late and all buffers fill."""
        ran = _job(harness, harness.scripts.counts(200_000), late=True)
        assert ran.code == 0
        assert ran.out == b"".join(b"%d\n" % n for n in range(1, 200_001))

    def test_stderr_is_separate(self, harness: GuestHarness) -> None:
        """Standard error must be separate from standard output."""
        _needs(harness, "stderr")
        ran = _job(harness, harness.scripts.prints_both("to-out", "to-err"))
        assert (ran.code, ran.out, ran.err) == (0, b"to-out\n", b"to-err\n")

    def test_standard_input_reaches_the_script(self, harness: GuestHarness) -> None:
        """The script must read all of its standard input, up to the end of file."""
        _needs(harness, "stdin")
        data = _noise(2, 1 << 20)
        ran = _job(harness, harness.scripts.copies(), stdin=data)
        assert (ran.code, ran.out == data) == (0, True)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
    def test_script_ended_by_a_signal_returns_128_plus_its_number(
        self, harness: GuestHarness, number: int
    ) -> None:
        """If a signal ends the script, ``run()`` must return 128 plus the signal's number."""
        _needs(harness, "killed")
        assert _job(harness, harness.scripts.die_of_signal(number)).code == 128 + number

    def test_each_signal_reaches_the_script(self, harness: GuestHarness) -> None:
        """The script must receive every signal that a batch system sends to the job shell."""
        _needs(harness, "signals")
        told = [b"up", *(each.name.encode() for each in _PASSED_ON)]
        then = [(line, _signal_sender(n)) for line, n in zip(told, _PASSED_ON, strict=False)]
        then.append((told[-1], _signal_sender(signal.SIGTERM)))
        ran = _job(harness, harness.scripts.tells_signals(), then=then)
        assert (ran.code, ran.out.split()) == (7, told)

    def test_term_ends_the_job(self, harness: GuestHarness) -> None:
        """SIGTERM must end the job with status 143 (128 plus 15)."""
        then = [(b"up", _signal_sender(signal.SIGTERM))]
        ran = _job(harness, harness.scripts.wait_for_signal(), then=then)
        assert (ran.code, ran.out) == (128 + signal.SIGTERM, b"up\n")

    def test_script_that_ignores_sigterm_is_killed_after_the_grace(
        self, harness: GuestHarness
    ) -> None:
        """A script that ignores SIGTERM must get SIGKILL ``Script.grace`` seconds later."""
        _needs(harness, "signals")
        then = [(b"up", _signal_sender(signal.SIGTERM))]
        ran = _job(harness, harness.scripts.outlives_term(), then=then, grace=0.3)
        assert ran.code == 128 + signal.SIGKILL

    def test_terminal_has_the_size_of_the_users(self, harness: GuestHarness) -> None:
        """The script's terminal must have the size of the user's terminal, even after a resize."""
        _needs(harness, "terminal")
        ran = _run_on_terminal(harness, harness.scripts.tells_size(), (33, 101), (40, 120))
        assert (ran.code, ran.out.split(b"\r\n")[:2]) == (5, [b"33 101", b"40 120"])

    def test_missing_guest_raises_before_the_job(self, harness: GuestHarness) -> None:
        """If the guest is missing, ``run()`` must raise GuestDied or HostFault."""
        with harness.boot():
            ran = _run(harness, harness.scripts.exit_with(0))
        assert isinstance(ran.died, GuestDied | HostFault), ran

    @pytest.mark.parametrize("garbage", range(len(_GARBAGE)))
    def test_garbage_gives_no_exit_code(self, harness: GuestHarness, garbage: int) -> None:
        """If the guest sends invalid data instead of running the job, GuestDied must be raised."""
        with harness.boot(), _wires(harness) as wires:
            wires.instead[harness.run_port] = send_data(_GARBAGE[garbage](), stays=False)
            ran = _run(harness, harness.scripts.exit_with(0))
        assert isinstance(ran.died, GuestDied), ran

    def test_garbage_during_the_script_gives_no_success(self, harness: GuestHarness) -> None:
        """Invalid data after the start of the script must not yield exit status 0."""
        ran = _run_killed_guest(harness, harness.scripts.print_text("one\n"), 1 << 20)
        for cut in range(1, len(ran[1]), 1 + len(ran[1]) // 5):
            after, _ = _run_killed_guest(
                harness, harness.scripts.print_text("one\n"), cut, b"\xff\0no" * 9
            )
            assert after.code != 0, (cut, after)

    @pytest.mark.parametrize(
        "at", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 8))]
    )
    def test_guest_killed_during_the_script_gives_no_success(
        self, harness: GuestHarness, at: int
    ) -> None:
        """If the guest is killed after any byte that it sends, ``run()`` must not report success.

        Exit status 0 is allowed only with the complete output.
        """
        content = harness.scripts.print_text("one\n")
        whole, passed = _run_killed_guest(harness, content, 1 << 20)
        assert (whole.code, whole.out) == (0, b"one\n")
        for cut in range(at, len(passed), 8):
            ran, _ = _run_killed_guest(harness, content, cut)
            good = isinstance(ran.died, GuestDied | HostFault) or ran.code != 0
            assert good or (ran.code, ran.out) == (0, b"one\n"), (cut, ran)
        for cut in (0, len(passed) // 4, len(passed) // 2):
            assert _run_killed_guest(harness, content, cut)[0].code != 0, cut


# -- calls of the driver -------------------------------------------------------------------------


def _needs(harness: GuestHarness, what: str) -> None:
    if what in harness.lacks:
        pytest.skip(f"the guest type lacks {what!r} ({PROPERTIES[what]}): {harness.lacks[what]}")


def _wires(harness: GuestHarness) -> Wires:
    ports = dict.fromkeys(filter(None, (harness.ready_port, harness.run_port)))
    return Wires(harness.plan.run_dir, ports, harness.connect)


@contextlib.contextmanager
def _limit_time(harness: GuestHarness) -> Iterator[None]:
    def hung(_number: int, _frame: FrameType | None) -> None:
        raise CallTimeout(f"the call did not return within {harness.patience:g} s")

    main = threading.main_thread().ident or 0
    before = signal.signal(signal.SIGPROF, hung)
    timer = threading.Timer(harness.patience, signal.pthread_kill, (main, signal.SIGPROF))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGPROF, before)


def _await(
    harness: GuestHarness, seconds: float | None = None, steps: list[str] | None = None
) -> Exception | None:
    told = [] if steps is None else steps
    limit = harness.patience if seconds is None else seconds
    with _limit_time(harness):
        try:
            harness.driver.await_ready(harness.plan, time.monotonic() + limit, told.append)
        except Exception as error:
            return error
    return None


def _job(
    harness: GuestHarness, content: bytes, *, chunk: int = 1 << 16, **more: object
) -> JobResult:
    with harness.boot(), _wires(harness) as wires:
        _await_ready(harness)
        wires.watch(harness.run_port, chunk=chunk)
        ran = _run(harness, content, **more)  # type: ignore[arg-type]
    assert ran.died is None, f"{ran.died!r}: {ran}"
    return ran


def _run_killed_guest(
    harness: GuestHarness, content: bytes, cut: int, last: bytes = b""
) -> tuple[JobResult, bytes]:
    """Run a job whose guest dies after sending ``cut`` bytes; return result and all sent bytes."""
    with harness.boot(), _wires(harness) as wires:
        _await_ready(harness)
        wires.watch(harness.run_port, cut=cut, last=last)
        return _run(harness, content), bytes(wires.passed)


def _await_ready(harness: GuestHarness) -> None:
    if "ready" not in harness.lacks:
        error = _await(harness)
        assert error is None, error


def _signal_sender(number: int) -> Callable[[], None]:
    main = threading.main_thread().ident or 0
    return lambda: signal.pthread_kill(main, number)


def _run(
    harness: GuestHarness,
    content: bytes,
    *,
    stdin: bytes | None = None,
    then: Sequence[Then] = (),
    late: bool = False,
    grace: float = 600.0,
) -> JobResult:
    """Call the driver's ``run`` as the job shell does, and read the job's output meanwhile."""
    with contextlib.ExitStack() as stack:
        out, err = _Reader(then, late=late), _Reader(())
        source = _Feeder(stdin) if stdin is not None else None
        streams = Streams(source.read if source else None, out.write, err.write)
        stack.callback(out.close)
        stack.callback(err.close)
        if source is not None:
            stack.callback(source.close)
        code, died = _call_run(harness, content, streams, grace)
        return JobResult(code, died, out.close(), err.close())


def _call_run(
    harness: GuestHarness, content: bytes, streams: Streams, grace: float
) -> tuple[int | None, Exception | None]:
    """Call ``run`` with all signals ignored; check that ``run`` restores handlers and timers."""
    plan = harness.plan
    guest = ReadyGuest(plan.name, plan.hostname, plan.rank, plan.run_dir)
    environ = {"PATH": os.environ["PATH"], "TERM": "dumb"}
    script = Script("42.srv.SC", content, environ, "/", grace=grace)
    before = {number: signal.signal(number, _ignore_signal) for number in _OURS}
    code, died = None, None
    try:
        with _limit_time(harness):
            try:
                code = harness.driver.run(guest, script, streams)
            except Exception as error:
                died = error
        left = [n.name for n in _OURS if signal.getsignal(n) is not _ignore_signal]
        assert not left, f"signal handlers that the driver has left: {left}"
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "the driver left a timer"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code, died


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Do nothing, as a signal handler."""


def _run_on_terminal(
    harness: GuestHarness, content: bytes, size: tuple[int, int], then: tuple[int, int]
) -> JobResult:
    """Run a script on a terminal of this ``size``. Resize it to ``then`` after the first output."""
    master, terminal = os.openpty()
    resize = _signal_sender(signal.SIGWINCH)

    def change() -> None:
        _set_size(master, then)
        resize()

    _set_size(master, size)
    reader = _Reader([(b"%d %d" % size, change)], (master, terminal))
    try:
        with harness.boot(), _wires(harness):
            _await_ready(harness)
            streams = Streams(terminal, terminal, terminal, terminal=True)
            code, died = _call_run(harness, content, streams, 600.0)
    finally:
        out = reader.close()
    assert died is None, died
    return JobResult(code, died, out, b"")


def _set_size(terminal: int, size: tuple[int, int]) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


class _Reader(threading.Thread):
    """Reads what a job writes to the pipe ``write``. Runs an action after each expected text."""

    def __init__(
        self, then: Sequence[Then], ends: tuple[int, int] | None = None, *, late: bool = False
    ) -> None:
        super().__init__(daemon=True)
        self._read, self.write = ends or os.pipe()
        self._then, self._at, self._late = list(then), 0, late
        self._got = bytearray()
        self._closed = False
        self.start()

    def run(self) -> None:
        """Read until the write end is closed."""
        if self._late:
            time.sleep(0.3)  # by then the pipe and all buffers behind it are full
        with contextlib.suppress(OSError):  # a closed terminal
            while data := os.read(self._read, 1 << 16):
                self._got += data
                self._run_actions()

    def _run_actions(self) -> None:
        while self._then and (found := self._got.find(self._then[0][0], self._at)) >= 0:
            marker, action = self._then.pop(0)
            self._at = found + len(marker)
            action()

    def close(self) -> bytes:
        """Close the pipe; return all data."""
        if not self._closed:
            self._closed = True
            os.close(self.write)
            self.join(60)
            os.close(self._read)
        return bytes(self._got)


class _Feeder(threading.Thread):
    """Writes data to a pipe. A job reads the data from the pipe's end ``read``."""

    def __init__(self, data: bytes) -> None:
        super().__init__(daemon=True)
        self.read, self._write = os.pipe()
        self._data = data
        self.start()

    def run(self) -> None:
        """Write the data; stop early if the read end is closed."""
        left = memoryview(self._data)
        with contextlib.suppress(BrokenPipeError):
            while left:
                left = left[os.write(self._write, left[: 1 << 16]) :]
        os.close(self._write)

    def close(self) -> None:
        """Close the read end and wait for the thread."""
        os.close(self.read)
        self.join(60)
