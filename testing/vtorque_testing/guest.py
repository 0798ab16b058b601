"""The contract that every guest type passes: how its guests are waited for, and run a job.

A test module subclasses it and gives it a double of the guest::

    class TestMine(GuestContract):
        @pytest.fixture
        def harness(self):
            return MyHarness()

For guests with vtorque-agent :class:`vtorque_testing.agent_guest.AgentHarness` is one, around the
real agent. The driver's ``run`` is called in this process, as in the job shell: signals are this
process's.
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
from vtorque_testing.wires import Wires, babbling, flood, silent

PROPERTIES = {
    "ready": "root waits for what the guest says before its job runs",
    "signals": "the script gets the signals that the job shell gets",
    "terminal": "an interactive job has a terminal, as large as its user's",
    "stdin": "the script can read the job's input",
    "stderr": "what it writes to stderr is apart from stdout",
    "killed": "a script that a signal has ended has 128 and its number",
}
"""What a guest type may lack, each of which :attr:`GuestHarness.lacks` then gives the reason."""

SHORT = 0.5  # seconds that a guest has which is not to become ready
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
    """Return the same random bytes each time."""
    return random.Random(seed).randbytes(length)  # noqa: S311 - no secret


class GuestHarness(Protocol):
    """A guest type's driver, and a double of its guest."""

    driver: GuestDriver
    plan: GuestPlan
    """Its ``run_dir`` and ``state_dir`` are there, and their paths short (unix(7))."""
    ready_port: str
    """The socket in ``run_dir`` by which root waits; empty: the guest type lacks ``ready``."""
    ready_mark: bytes
    """The guest is ready when this, and no less, has come by ``ready_port``."""
    run_port: str
    """The socket by which the job runs."""
    lacks: Mapping[str, str]
    """Of :data:`PROPERTIES`, what this guest type cannot do, and why."""
    scripts: ShellScripts
    patience: float
    """Seconds after which what has not ended counts as hung: long."""

    def boot(self, fails: str = "") -> contextlib.AbstractContextManager[None]:
        """Boot a guest; ``fails``: its setup does, and says this. It ends with the context."""
        ...

    def connect(self, port: str) -> socket.socket:
        """Return the guest's end of a port, as QEMU connects whoever opens the socket."""
        ...


class ShellScripts:
    """The job scripts of the contract, for guests with a POSIX shell."""

    def exits(self, code: int) -> bytes:
        """End with this code."""
        return b"#!/bin/sh\nexit %d\n" % code

    def prints(self, text: str) -> bytes:
        """Write this text, of whole lines."""
        return f"#!/bin/sh\ncat <<'END'\n{text}END\n".encode()

    def counts(self, lines: int) -> bytes:
        """Write the numbers from 1 on, each in a line."""
        return b"#!/bin/sh\nseq %d\n" % lines

    def stays(self) -> bytes:
        """Write ``up``, and stay until something ends it."""
        return b"#!/bin/sh\necho up\nexec sleep 1000\n"

    def dies_of(self, number: int) -> bytes:
        """End by this signal."""
        return b"#!/bin/sh\nkill -%d $$\n" % number

    def copies(self) -> bytes:
        """Write what it reads."""
        return b"#!/bin/sh\nexec cat\n"

    def prints_both(self, out: str, err: str) -> bytes:
        """Write a line to stdout and one to stderr."""
        return f"#!/bin/sh\necho {out}\necho {err} >&2\n".encode()

    def tells_signals(self) -> bytes:
        """Write ``up``, the name of each signal that comes, and end with 7 at TERM."""
        traps = "".join(f"trap 'echo {n.name}' {n.name[3:]}\n" for n in _PASSED_ON)
        more = "trap 'exit 7' TERM\necho up\nwhile :; do sleep 1000 & wait; done\n"
        return f"#!/bin/sh\n{traps}{more}".encode()

    def outlives_term(self) -> bytes:
        """Write ``up``, and stay, whatever can be caught."""
        return b"#!/bin/sh\ntrap '' TERM\necho up\nwhile :; do sleep 1000; done\n"

    def tells_size(self) -> bytes:
        """Write ``rows columns`` of its terminal, again when they change, and end with 5."""
        more = b"stty size\nwhile :; do sleep 1000 & wait; done\n"
        return b"#!/bin/sh\ntrap 'stty size; exit 5' WINCH\n" + more


class Hangs(BaseException):
    """What was called has not ended."""


@dataclass(frozen=True)
class Ran:
    """How a job has ended: its exit code, or what the driver raised."""

    code: int | None
    died: Exception | None
    out: bytes
    err: bytes


Then = tuple[bytes, Callable[[], None]]
"""When the job has written this, do that."""


class GuestContract:
    """Subclass it, name it ``Test...``, and override the fixture ``harness``."""

    @pytest.fixture
    def harness(self) -> GuestHarness:
        """Return the harness of the guest type under test."""
        raise NotImplementedError("override the fixture harness() in the subclass")

    def test_what_it_lacks_is_declared(self, harness: GuestHarness) -> None:
        """By name, and with the reason."""
        assert not harness.lacks.keys() - PROPERTIES.keys()
        assert all(len(why) > 10 for why in harness.lacks.values()), harness.lacks
        assert bool(harness.ready_port) != ("ready" in harness.lacks)

    # -- until it is ready ---------------------------------------------------------------------

    def test_it_is_ready_when_it_says_so(self, harness: GuestHarness) -> None:
        """And its steps are told as they may be printed."""
        _needs(harness, "ready")
        steps: list[str] = []
        with harness.boot(), _wires(harness) as wires:
            wires.watch(harness.ready_port)
            assert _await(harness, steps=steps) is None
            assert harness.ready_mark in wires.passed
        assert all(step and step.isprintable() for step in steps), steps

    def test_ready_in_single_bytes(self, harness: GuestHarness) -> None:
        """How the bytes arrive makes no difference."""
        _needs(harness, "ready")
        with harness.boot(), _wires(harness) as wires:
            wires.watch(harness.ready_port, chunk=1)
            assert _await(harness) is None

    def test_silence_is_a_host_fault_at_the_deadline(self, harness: GuestHarness) -> None:
        """It says which guest."""
        _needs(harness, "ready")
        with _wires(harness) as wires:
            wires.instead[harness.ready_port] = silent
            error = _await(harness, SHORT)
        assert isinstance(error, HostFault), error

    @pytest.mark.parametrize("garbage", range(len(_GARBAGE)))
    def test_garbage_is_not_ready(self, harness: GuestHarness, garbage: int) -> None:
        """Nor is a flood of it that has no end."""
        _needs(harness, "ready")
        with _wires(harness) as wires:
            wires.instead[harness.ready_port] = babbling(_GARBAGE[garbage]())
            error = _await(harness, SHORT)
        assert isinstance(error, HostFault), error

    def test_a_setup_that_fails_says_why(self, harness: GuestHarness) -> None:
        """And nothing that a terminal would take for more than text."""
        _needs(harness, "ready")
        with harness.boot(fails="no disk \033[31m here"), _wires(harness):
            error = _await(harness)
        assert isinstance(error, Exception) and "no disk" in str(error), error
        assert str(error).isprintable(), error

    def test_a_guest_that_is_gone_is_a_host_fault(self, harness: GuestHarness) -> None:
        """At once, not at the deadline."""
        _needs(harness, "ready")
        error = _await(harness)
        assert isinstance(error, HostFault), error

    def test_a_guest_killed_on_its_way_is_a_host_fault(self, harness: GuestHarness) -> None:
        """After each byte that it has sent; or it is ready, but only if it has said so."""
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
    def test_the_exit_code_is_the_scripts(self, harness: GuestHarness, code: int) -> None:
        """Each of them."""
        assert _job(harness, harness.scripts.exits(code)).code == code

    def test_the_output_is_the_scripts(self, harness: GuestHarness) -> None:
        """Every byte of it, once, and nothing else."""
        text = "one\n  two \u00e9 %s \\n\n\nlast\n"
        ran = _job(harness, harness.scripts.prints(text))
        assert (ran.code, ran.out, ran.err) == (0, text.encode(), b"")

    def test_the_output_in_single_bytes(self, harness: GuestHarness) -> None:
        """How the bytes arrive makes no difference."""
        ran = _job(harness, harness.scripts.prints("one\ntwo\n"), chunk=1)
        assert (ran.code, ran.out, ran.err) == (0, b"one\ntwo\n", b"")

    def test_much_output_to_who_reads_late(self, harness: GuestHarness) -> None:
        """More than any window or pipe holds."""
        ran = _job(harness, harness.scripts.counts(200_000), late=True)
        assert ran.code == 0
        assert ran.out == b"".join(b"%d\n" % n for n in range(1, 200_001))

    def test_stderr_is_apart(self, harness: GuestHarness) -> None:
        """From stdout."""
        _needs(harness, "stderr")
        ran = _job(harness, harness.scripts.prints_both("to-out", "to-err"))
        assert (ran.code, ran.out, ran.err) == (0, b"to-out\n", b"to-err\n")

    def test_its_input_reaches_it(self, harness: GuestHarness) -> None:
        """All of it, and its end."""
        _needs(harness, "stdin")
        data = _noise(2, 1 << 20)
        ran = _job(harness, harness.scripts.copies(), stdin=data)
        assert (ran.code, ran.out == data) == (0, True)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
    def test_a_script_that_a_signal_ends(self, harness: GuestHarness, number: int) -> None:
        """Has the code that a shell gives it."""
        _needs(harness, "killed")
        assert _job(harness, harness.scripts.dies_of(number)).code == 128 + number

    def test_each_signal_reaches_the_script(self, harness: GuestHarness) -> None:
        """That a batch system sends, and TERM as one that it can catch."""
        _needs(harness, "signals")
        told = [b"up", *(each.name.encode() for each in _PASSED_ON)]
        then = [(line, _sending(n)) for line, n in zip(told, _PASSED_ON, strict=False)]
        then.append((told[-1], _sending(signal.SIGTERM)))
        ran = _job(harness, harness.scripts.tells_signals(), then=then)
        assert (ran.code, ran.out.split()) == (7, told)

    def test_term_ends_the_job(self, harness: GuestHarness) -> None:
        """With the code that a shell gives it."""
        then = [(b"up", _sending(signal.SIGTERM))]
        ran = _job(harness, harness.scripts.stays(), then=then)
        assert (ran.code, ran.out) == (128 + signal.SIGTERM, b"up\n")

    def test_kill_comes_after_the_grace(self, harness: GuestHarness) -> None:
        """To who does not end at TERM."""
        _needs(harness, "signals")
        then = [(b"up", _sending(signal.SIGTERM))]
        ran = _job(harness, harness.scripts.outlives_term(), then=then, grace=0.3)
        assert ran.code == 128 + signal.SIGKILL

    def test_the_terminal_is_as_large_as_the_users(self, harness: GuestHarness) -> None:
        """Also when they make it larger."""
        _needs(harness, "terminal")
        ran = _on_a_terminal(harness, harness.scripts.tells_size(), (33, 101), (40, 120))
        assert (ran.code, ran.out.split(b"\r\n")[:2]) == (5, [b"33 101", b"40 120"])

    def test_a_guest_that_is_gone_before_the_job(self, harness: GuestHarness) -> None:
        """Is no exit code."""
        with harness.boot():
            ran = _run(harness, harness.scripts.exits(0))
        assert isinstance(ran.died, GuestDied | HostFault), ran

    @pytest.mark.parametrize("garbage", range(len(_GARBAGE)))
    def test_garbage_is_no_exit_code(self, harness: GuestHarness, garbage: int) -> None:
        """In the place of a job."""
        with harness.boot(), _wires(harness) as wires:
            wires.instead[harness.run_port] = babbling(_GARBAGE[garbage](), stays=False)
            ran = _run(harness, harness.scripts.exits(0))
        assert isinstance(ran.died, GuestDied), ran

    def test_garbage_while_the_script_runs_is_no_success(self, harness: GuestHarness) -> None:
        """Whatever it is."""
        ran = _killed(harness, harness.scripts.prints("one\n"), 1 << 20)
        for cut in range(1, len(ran[1]), 1 + len(ran[1]) // 5):
            after, _ = _killed(harness, harness.scripts.prints("one\n"), cut, b"\xff\0no" * 9)
            assert after.code != 0, (cut, after)

    @pytest.mark.parametrize(
        "at", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 8))]
    )
    def test_a_guest_killed_while_the_script_runs(self, harness: GuestHarness, at: int) -> None:
        """Is no success, after each byte; nor is its output cut off with the code of one."""
        content = harness.scripts.prints("one\n")
        whole, passed = _killed(harness, content, 1 << 20)
        assert (whole.code, whole.out) == (0, b"one\n")
        for cut in range(at, len(passed), 8):
            ran, _ = _killed(harness, content, cut)
            good = isinstance(ran.died, GuestDied | HostFault) or ran.code != 0
            assert good or (ran.code, ran.out) == (0, b"one\n"), (cut, ran)
        for cut in (0, len(passed) // 4, len(passed) // 2):
            assert _killed(harness, content, cut)[0].code != 0, cut


# -- what the contract does with a driver --------------------------------------------------------


def _needs(harness: GuestHarness, what: str) -> None:
    if what in harness.lacks:
        pytest.skip(f"declared: {PROPERTIES[what]}: it does not, since {harness.lacks[what]}")


def _wires(harness: GuestHarness) -> Wires:
    ports = dict.fromkeys(filter(None, (harness.ready_port, harness.run_port)))
    return Wires(harness.plan.run_dir, ports, harness.connect)


@contextlib.contextmanager
def _ending(harness: GuestHarness) -> Iterator[None]:
    """Raise Hangs in what does not end. Only in the main thread: the driver sets handlers there."""

    def hung(_number: int, _frame: FrameType | None) -> None:
        raise Hangs(f"timed out after {harness.patience:g} s")

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
    """Wait until the guest is ready; return what the driver raises."""
    told = [] if steps is None else steps
    limit = harness.patience if seconds is None else seconds
    with _ending(harness):
        try:
            harness.driver.await_ready(harness.plan, time.monotonic() + limit, told.append)
        except Exception as error:
            return error
    return None


def _job(harness: GuestHarness, content: bytes, *, chunk: int = 1 << 16, **more: object) -> Ran:
    """Run a job in a guest of its own, once that is ready."""
    with harness.boot(), _wires(harness) as wires:
        _ready(harness)
        wires.watch(harness.run_port, chunk=chunk)
        ran = _run(harness, content, **more)  # type: ignore[arg-type]
    assert ran.died is None, f"{ran.died!r}: {ran}"
    return ran


def _killed(
    harness: GuestHarness, content: bytes, cut: int, last: bytes = b""
) -> tuple[Ran, bytes]:
    """Run a job whose guest is gone after so many bytes; return also what came of it."""
    with harness.boot(), _wires(harness) as wires:
        _ready(harness)
        wires.watch(harness.run_port, cut=cut, last=last)
        return _run(harness, content), bytes(wires.passed)


def _ready(harness: GuestHarness) -> None:
    if "ready" not in harness.lacks:
        error = _await(harness)
        assert error is None, error


def _sending(number: int) -> Callable[[], None]:
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
) -> Ran:
    """Call the driver's ``run``, as the job shell does; read what the job writes meanwhile."""
    with contextlib.ExitStack() as stack:
        out, err = _Reader(then, late=late), _Reader(())
        source = _Feeder(stdin) if stdin is not None else None
        streams = Streams(source.read if source else None, out.write, err.write)
        stack.callback(out.close)
        stack.callback(err.close)
        if source is not None:
            stack.callback(source.close)
        code, died = _called(harness, content, streams, grace)
        return Ran(code, died, out.close(), err.close())


def _called(
    harness: GuestHarness, content: bytes, streams: Streams, grace: float
) -> tuple[int | None, Exception | None]:
    """Call it. The signals that it does not take are taken, and the handlers are looked at."""
    plan = harness.plan
    guest = ReadyGuest(plan.name, plan.hostname, plan.rank, plan.run_dir)
    environ = {"PATH": os.environ["PATH"], "TERM": "dumb"}
    script = Script("42.srv.SC", content, environ, "/", grace=grace)
    before = {number: signal.signal(number, _ignored) for number in _OURS}
    code, died = None, None
    try:
        with _ending(harness):
            try:
                code = harness.driver.run(guest, script, streams)
            except Exception as error:
                died = error
        left = [n.name for n in _OURS if signal.getsignal(n) is not _ignored]
        assert not left, f"signal handlers that the driver has left: {left}"
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "a timer that it has left"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code, died


def _ignored(_number: int, _frame: FrameType | None) -> None:
    """Take a signal: it is not for this process."""


def _on_a_terminal(
    harness: GuestHarness, content: bytes, size: tuple[int, int], then: tuple[int, int]
) -> Ran:
    """Run an interactive job's script on a terminal of this size, which changes."""
    master, terminal = os.openpty()
    resize = _sending(signal.SIGWINCH)

    def change() -> None:
        _set_size(master, then)
        resize()

    _set_size(master, size)
    reader = _Reader([(b"%d %d" % size, change)], (master, terminal))
    try:
        with harness.boot(), _wires(harness):
            _ready(harness)
            streams = Streams(terminal, terminal, terminal, terminal=True)
            code, died = _called(harness, content, streams, 600.0)
    finally:
        out = reader.close()
    assert died is None, died
    return Ran(code, died, out, b"")


def _set_size(terminal: int, size: tuple[int, int]) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


class _Reader(threading.Thread):
    """Reads what is written to ``write``, and does what is to be done when it comes."""

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
        """Read until the other end is closed."""
        if self._late:
            time.sleep(0.3)  # the pipe and what is behind it are full by then
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(self._read, 1 << 16):
                self._got += data
                self._look()

    def _look(self) -> None:
        while self._then and (found := self._got.find(self._then[0][0], self._at)) >= 0:
            marker, action = self._then.pop(0)
            self._at = found + len(marker)
            action()

    def close(self) -> bytes:
        """Close it; return all that was written."""
        if not self._closed:
            self._closed = True
            os.close(self.write)
            self.join(60)
            os.close(self._read)
        return bytes(self._got)


class _Feeder(threading.Thread):
    """Writes these bytes to ``read``'s other end."""

    def __init__(self, data: bytes) -> None:
        super().__init__(daemon=True)
        self.read, self._write = os.pipe()
        self._data = data
        self.start()

    def run(self) -> None:
        """Write until all is written, or nobody reads."""
        left = memoryview(self._data)
        with contextlib.suppress(BrokenPipeError):
            while left:
                left = left[os.write(self._write, left[: 1 << 16]) :]
        os.close(self._write)

    def close(self) -> None:
        """Stop."""
        os.close(self.read)
        self.join(60)
