"""Untrusted data is parsed in a process without privileges, in bounded time and memory."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from patience import LONG
from vtorque_core.api import unprivileged_parser as module
from vtorque_core.api.unprivileged_parser import (
    MAX_VALUE,
    HelperDied,
    Unreadable,
    helper_process,
    parse_unprivileged,
)
from vtorque_core.base.errors import Refused
from vtorque_core.base.run_tool import NOBODY

SECRET = b""


def later(seconds=LONG):
    return time.monotonic() + seconds


def encoded(*words):
    for word in words:
        yield word.encode()


def status():
    yield Path("/proc/self/status").read_bytes()
    yield " ".join(os.listdir("/proc/self/fd")).encode()  # noqa: PTH208 - without a descriptor
    yield os.readlink("/proc/self/fd/1").encode()  # noqa: PTH115


def first_line(descriptor):
    yield os.read(descriptor, 100).partition(b"\n")[0]


def secret():
    yield SECRET


def refuses():
    yield b"half"
    raise Refused("it is \x1b[2J damaged")


def sleeps(*held):
    yield b""
    time.sleep(1000)


def forks():
    yield str(os.fork()).encode()


def kills_all():
    os.kill(-1, signal.SIGKILL)
    yield b"alive"


def terminal():
    yield str(os.getsid(0) == os.getpgid(0) != int(os.environ.get("ASKING", "0"))).encode()
    with open("/dev/tty", "rb"):  # noqa: PTH123
        yield b"there is one"


def floods():
    while True:
        yield bytes(1000)


def empties():
    while True:
        yield b""


def sends_a_descriptor():
    for number in range(3, 100):
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(number)) as found:
                socket.send_fds(found, [b"x"], [0])
            yield b"sent"


def spins():
    while True:
        yield from ()


def eats():
    yield bytes(2 << 30)


def dies():
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)


def writes(descriptor):
    os.write(descriptor, b"x")
    yield b""


def opens(path):
    os.close(os.open(path, os.O_RDONLY))
    yield b""


def too_long():
    yield bytes(4 * MAX_VALUE)


def test_values_are_streamed_and_open_files_are_passed(tmp_path):
    (tmp_path / "f").write_text("one\ntwo")
    with helper_process(), (tmp_path / "f").open() as file:
        assert list(parse_unprivileged(encoded, "a", "", "ä", until=later())) == [
            b"a",
            b"",
            "ä".encode(),
        ]
        assert [*parse_unprivileged(first_line, until=later(), files=[file.fileno()])] == [b"one"]
    assert list(parse_unprivileged(encoded, "alone", until=later())) == [b"alone"]


def test_parser_has_no_privileges_no_inherited_files_and_no_output():
    kept, _ = os.pipe()
    with helper_process():
        said, files, output = parse_unprivileged(status, until=later())
    has = {k: v.split() for k, _, v in (x.partition(":") for x in said.decode().splitlines())}
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    assert (has["Uid"], has["NoNewPrivs"]) == ([str(uid)] * 4, ["1"])
    assert {has[f"Cap{kind}"][0] for kind in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
    if os.geteuid() == 0:
        assert has["Gid"] == [str(NOBODY)] * 4 and has["Groups"] == []
    assert len(files.split()) <= 6 and str(kept).encode() not in files.split()
    assert output == b"/dev/null"


def test_parser_cannot_write_a_file(tmp_path):
    with (tmp_path / "f").open("wb") as file, pytest.raises(Unreadable, match="File too large"):
        list(parse_unprivileged(writes, until=later(), files=[file.fileno()]))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_parser_cannot_open_files_of_root(tmp_path):
    with pytest.raises(Unreadable, match="Permission denied"):
        list(parse_unprivileged(opens, str(tmp_path), until=later()))


def test_parser_does_not_see_secrets_loaded_later(monkeypatch):
    with helper_process():
        monkeypatch.setattr(sys.modules[__name__], "SECRET", b"of the site")
        assert list(parse_unprivileged(secret, until=later())) == [b""]


@pytest.mark.parametrize(
    ("work", "said"),
    [(refuses, r"^it is \\x1b\[2J damaged$"), (eats, "MemoryError"), (dies, "parser crashed"),
     (too_long, "output is larger than its limit")],
)  # fmt: skip
def test_failed_parse_raises_unreadable_with_the_reason(work, said):
    with helper_process():
        with pytest.raises(Unreadable) as caught:
            list(parse_unprivileged(work, until=later()))
        assert caught.match(said)
        assert list(parse_unprivileged(encoded, "next", until=later())) == [b"next"]


@pytest.mark.parametrize("when", ["before", "while"])
def test_killed_reader_is_not_reported_as_unreadable_input(when):
    with helper_process():
        if when == "before":
            # Its processes die together only once the inner one has started.
            assert list(parse_unprivileged(encoded, "x", until=later())) == [b"x"]
            kill_reader()
            with pytest.raises(HelperDied) as caught:
                list(parse_unprivileged(encoded, "x", until=later()))
        else:
            answers = parse_unprivileged(sleeps, until=later())
            assert next(answers) == b""
            kill_reader()
            with pytest.raises(HelperDied) as caught:
                list(answers)
    assert not caught.value.blames_node


def kill_reader():
    """Kill the reading process, as the kernel does for lack of memory."""
    pid = os.getpid()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in map(int, children):
        os.kill(child, signal.SIGKILL)
    asked = select.poll()
    asked.register(module._asking[1], 0)
    assert asked.poll(LONG * 1000)


def test_parser_cpu_and_wall_time_are_limited(monkeypatch):
    monkeypatch.setattr(module, "CPU", 1)
    with helper_process():
        with pytest.raises(Unreadable, match="the unprivileged parser crashed"):
            list(parse_unprivileged(spins, until=later()))
        with pytest.raises(Unreadable, match="the unprivileged parser did not finish in time"):
            list(parse_unprivileged(sleeps, until=later(0.1)))


@contextlib.contextmanager
def watched_pipe():
    """Yield the write end of a pipe, and check afterwards that no process holds this end."""
    source, held = os.pipe()
    with open(source, "rb") as file:  # noqa: PTH123
        try:
            yield held
        finally:
            os.close(held)
        assert select.select([file], [], [], LONG)[0], "a process still holds the pipe"
        assert file.read() == b""


def test_unfinished_parser_is_killed_with_the_reader():
    with watched_pipe() as held, helper_process():
        assert next(parse_unprivileged(sleeps, until=later(), files=[held])) == b""


KILLED = """
import sys, time
sys.path[:0] = [{here!r}]
import test_unprivileged_parser as t
with t.helper_process():
    answers = t.parse_unprivileged(t.sleeps, until=t.later(), files=[{held}])
    print(next(answers), flush=True)
    time.sleep(1000)
"""


def test_parser_is_killed_with_its_caller():
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with watched_pipe() as held:
        argv = [sys.executable, "-c", KILLED.format(here=str(Path(__file__).parent), held=held)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environ, pass_fds=[held]) as asks:
            assert asks.stdout.readline() == b"b''\n"
            asks.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_compromised_parser_can_neither_fork_nor_signal_nor_send_files():
    with subprocess.Popen(["sleep", "1000"], user=NOBODY, group=NOBODY) as other:
        with helper_process():
            with pytest.raises(Unreadable, match="Resource temporarily unavailable"):
                list(parse_unprivileged(forks, until=later()))
            with contextlib.suppress(Unreadable):
                list(parse_unprivileged(kills_all, until=later()))
            with pytest.raises(Unreadable, match="/dev/tty"):
                list(parse_unprivileged(terminal, until=later()))
            assert list(parse_unprivileged(sends_a_descriptor, until=later())) == []
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("work", [floods, empties])
def test_output_above_the_limit_is_rejected(work):
    with helper_process(), pytest.raises(Unreadable, match="output is larger than its limit"):
        list(parse_unprivileged(work, until=later(), most=100_000))


def test_threads_can_parse_concurrently():
    found = []

    def ask(number):
        found.append((number, list(parse_unprivileged(encoded, str(number), until=later()))))

    with helper_process():
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    assert sorted(found) == [(n, [str(n).encode()]) for n in range(20)]


def test_forked_child_uses_the_reader_of_its_parent(monkeypatch):
    """The readers of a teardown in a prologue know no more than those of the prologue."""
    with helper_process():
        monkeypatch.setattr(sys.modules[__name__], "SECRET", b"of the site")
        assert in_fork(lambda: list(parse_unprivileged(secret, until=later())) == [b""])


def in_fork(true):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(not true())
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def test_forked_child_without_open_files_starts_a_new_reader():
    with helper_process():
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.closerange(3, 1 << 10)
                code = int(list(parse_unprivileged(encoded, "x", until=later())) != [b"x"])
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
