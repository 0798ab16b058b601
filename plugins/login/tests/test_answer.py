"""A waiting command and its job: transferred data, and the last step after a timeout."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import types
from pathlib import Path
from queue import SimpleQueue

import pytest

from login_homes import a_request, python
from terminal import CommandTerminal
from vtorque_core.api import HostFault
from vtorque_login import answer, await_answer, channel, requests, state
from vtorque_login.settings import Settings
from vtorque_testing.harness import PluginSite

pytestmark = pytest.mark.e2e

JOB, CONFIG = "42.srv", Path("/none.toml")


@pytest.fixture
def site():
    return PluginSite(settings=(Settings(poll_interval=0.1, answer_timeout=20.0),))


@pytest.fixture
def job(home, monkeypatch):
    """Return a double of the job that answers the next request; ``runs(code)`` stands for vmgr."""
    monkeypatch.setattr(await_answer, "_own_address", lambda _: "127.0.0.1")

    class Job:
        asked, code = None, None

        def runs(self, code):
            def vmgr(_config, *words):
                self.asked = words
                return python(code)

            monkeypatch.setattr(state.service, "vmgr", vmgr)

        def answers(self):
            def look():
                until = time.monotonic() + 20
                while time.monotonic() < until:
                    with requests.directory(JOB) as place:
                        found = requests.names(place, 1)
                    if found:
                        with contextlib.suppress(OSError):  # like main()
                            self.code = answer.answer(CONFIG, JOB, found[0], lambda _: True)
                        return

            monkeypatch.setattr(answer.signal, "signal", lambda *_: None)  # not allowed in a thread
            thread = threading.Thread(target=look)
            thread.start()
            return thread

    return Job()


def test_streams_and_exit_code_are_passed(job, site, home, capfdbinary):
    job.runs(
        "import sys; data = sys.stdin.buffer.read(); sys.stdout.buffer.write(data[::-1]);"
        "sys.stderr.write('err'); sys.exit(7)"
    )
    read, write = os.pipe()
    os.write(write, b"abc\0\xff")
    os.close(write)
    saved = os.dup(0)
    os.dup2(read, 0)
    os.close(read)
    thread = job.answers()
    try:
        words = ["ssh", "--", JOB, "0", "cat"]
        assert await_answer.ask(words, JOB, "n1", site, on_first=True, terminal=False) == 7
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        thread.join()
    out, err = capfdbinary.readouterr()
    assert (out, err) == (b"\xff\0cba", b"err")
    assert job.asked == ("ssh", "--here", "--", JOB, "0", "cat")
    assert list((home / ".vtorque/requests/42.srv.0").iterdir()) == [], (
        "the answered request is left"
    )


def test_large_output_passes_both_ways(job, site, capfd):
    job.runs("import sys; sys.stdout.write('x' * 3_000_000)")
    thread = job.answers()
    assert (
        await_answer.ask(["logs", "--", JOB], JOB, "n1", site, on_first=True, terminal=False) == 0
    )
    thread.join()
    assert len(capfd.readouterr().out) == 3_000_000


def test_end_of_the_script_ends_the_command(job, site, capfd, monkeypatch):
    """The companion is ended by SIGTERM; the output before that still arrives."""
    thread = job.answers()
    ends = []
    monkeypatch.setattr(answer.signal, "signal", lambda _number, handler: ends.append(handler))
    monkeypatch.setattr(answer, "_JOB_ENDED", threading.Event())
    job.runs("import sys, time; print('said', flush=True); time.sleep(100)")
    write = await_answer._write

    def written(descriptor, data, *, raw):
        write(descriptor, data, raw=raw)
        ends[0]()

    monkeypatch.setattr(await_answer, "_write", written)
    assert (
        await_answer.ask(["logs", "--", JOB], JOB, "n1", site, on_first=True, terminal=False) == 143
    )
    thread.join()
    assert capfd.readouterr() == ("said\n", "vmgr: the job's script has ended\n")


def test_command_with_a_closed_output_prints_no_error(job, site, monkeypatch):
    """The case of ``vmgr logs JOB | head -1``: no message about a broken connection."""
    job.runs("print('x' * 100_000)")
    thread = job.answers()

    def written(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(await_answer, "_write", written)
    with pytest.raises(BrokenPipeError):
        await_answer.ask(["logs", "--", JOB], JOB, "n1", site, on_first=True, terminal=False)
    thread.join()


@pytest.mark.parametrize("who", ["nobody", "withdraws", "has no key"])
def test_timeout_names_the_last_step(job, home, who, capfd):
    site = PluginSite(settings=(Settings(poll_interval=0.1, answer_timeout=1.0),))
    stop = threading.Event()

    def other():
        while not stop.is_set():
            with requests.directory(JOB) as place:
                for name in requests.names(place, 1):
                    request = json.loads(requests.read(place, name))
                    if who == "withdraws":
                        requests.withdraw(place, name)
                        return
                    with (
                        contextlib.suppress(ConnectionError),
                        socket.create_connection(("127.0.0.1", request["port"])) as connection,
                    ):
                        connection.sendall(b"x" * 64)
                        while connection.recv(1 << 10):
                            pass

    thread = threading.Thread(target=other)
    if who != "nobody":
        thread.start()
    try:
        with pytest.raises(HostFault) as raised:
            await_answer.ask(["logs", "--", JOB], JOB, "n1", site, on_first=True, terminal=False)
    finally:
        stop.set()
        if who != "nobody":
            thread.join()
    assert {
        "nobody": "the job did not answer within 1 s ([plugin.login] answer_timeout). Check that",
        "withdraws": "the job has received the request, but n1 did not connect to 127.0.0.1 port",
        "has no key": "a process connected that is not the job: 127.0.0.1",
    }[who] in str(raised.value)
    left = home / ".vtorque/requests/42.srv.0"
    assert not left.exists() or not list(left.iterdir())


@pytest.mark.parametrize(("left", "given"), [(60.0, channel.HANDSHAKE), (0.5, 0.5)])
def test_handshake_of_a_client_is_limited_in_time(monkeypatch, left, given):
    """The timeout does not exceed the time left for the command."""
    monkeypatch.setattr(await_answer, "time", types.SimpleNamespace(monotonic=lambda: 100.0))
    found, answers = [], SimpleQueue()

    def greet(_connection, _key, until):
        found.append(until)
        raise TimeoutError("timed out")

    monkeypatch.setattr(channel, "greet", greet)
    ours, theirs = socket.socketpair()
    with theirs:
        await_answer._greet(ours, ("10.0.0.9", 1), b"k" * 32, 100.0 + left, answers)
        assert theirs.recv(1) == b"", "the connection was left open"
    assert (answers.get(), found) == ("10.0.0.9: timed out", [100.0 + given])


def test_silent_clients_do_not_block_the_job(job, site, monkeypatch, capfd):
    """The silent clients connect before the job, and stay connected."""
    strangers, greeted, tell = [], threading.Semaphore(0), channel.greet
    create = socket.create_server

    def greet(connection, key, until):
        greeted.release()
        return tell(connection, key, until)

    def listening(*args):
        server = create(*args)
        strangers.extend(socket.create_connection(server.getsockname()) for _ in range(10))
        return server

    monkeypatch.setattr(channel, "HANDSHAKE", 60.0)
    monkeypatch.setattr(channel, "greet", greet)
    monkeypatch.setattr(await_answer.socket, "create_server", listening)
    job.runs("print('here')")

    def last():
        for _ in range(10):
            greeted.acquire()
        thread.append(job.answers())

    thread = []
    waits = threading.Thread(target=last)
    waits.start()
    assert (
        await_answer.ask(["logs", "--", JOB], JOB, "n1", site, on_first=True, terminal=False) == 0
    )
    waits.join()
    thread[0].join()
    for each in strangers:
        each.close()
    assert capfd.readouterr().out == "here\n"


def test_request_that_names_this_host_is_not_connected_to(home):
    """Services of the node itself must not be reachable for a guest."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        content = a_request(host="127.0.0.1", port=listener.getsockname()[1])
        with requests.directory(JOB) as place:
            name = requests.write_request(
                place, requests.parse_request(json.dumps(content).encode(), JOB)
            )
        assert answer.answer(CONFIG, JOB, name) == 1
        with pytest.raises(TimeoutError):
            listener.accept()


_WAIT = """
import os, sys
sys.path[:0] = {path!r}
os.environ["TERM"] = "xterm"
from vtorque_login import requests, await_answer
from vtorque_login.settings import Settings
from vtorque_testing.harness import PluginSite
import pwd
*account, _, shell = pwd.getpwuid(os.getuid())
mine = pwd.struct_passwd((*account, {home!r}, shell))
pwd.getpwuid = lambda _: mine
await_answer._own_address = lambda _: "127.0.0.1"
site = PluginSite(settings=(Settings(poll_interval=0.1, answer_timeout=20.0),))
words = ["ssh", "--", "42.srv"]
sys.exit(await_answer.ask(words, "42.srv", "n1", site, on_first=True, terminal=True))
"""


def test_terminal_size_and_input_are_passed(job, home):
    """Single keys, the window's size and its change, Ctrl-C, the exit code."""
    job.runs(
        "import os, signal, sys\n"
        "def say(*words): os.write(1, (' '.join(map(str, words)) + '\\n').encode())\n"
        "def size(*_): s = os.get_terminal_size(); say(s.lines, s.columns)\n"
        "def stop(*_): say('stopped'); os._exit(9)\n"
        "signal.signal(signal.SIGWINCH, size); signal.signal(signal.SIGINT, stop)\n"
        "size(); say(os.environ['TERM'], sys.stdin.readline().strip())\n"
        "while True: signal.pause()\n"
    )
    code = _WAIT.format(path=[p for p in sys.path if p], home=str(home))
    terminal = CommandTerminal([sys.executable, "-c", code], rows=31, columns=97)
    thread = job.answers()
    terminal.read(rb"31 97\r\n")
    terminal.write(b"hello\r")
    terminal.read(rb"xterm hello\r\n")
    terminal.resize(20, 50)
    terminal.read(rb"20 50\r\n")
    terminal.write(b"\x03")
    terminal.read(rb"stopped")
    assert terminal.code() == 9
    thread.join()
    assert job.code == 9
