"""The process of the sinks: it has no privileges, and root does not trust its answers."""

import contextlib
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from patience import LONG, eventually
from thread_statuses import thread_statuses
from vtorque_joblog import unprivileged_sinks
from vtorque_joblog.api import GROUP
from vtorque_joblog.outlets import JobLog
from vtorque_joblog.plugin import Settings
from vtorque_joblog.saved_offsets import SavedOffsets
from vtorque_joblog.sinks_process import RemoteOffsets
from vtorque_joblog.unprivileged_sinks import RECORD, UnprivilegedSinks

pytestmark = pytest.mark.e2e  # slow: processes are started, stopped and abandoned

SINKS = '''
import fcntl, logging, os, signal, socket, stat, sys, threading
TOP = os.path.dirname(__file__)


def roots(kind):
    """Return what leads to root, as whoever runs here finds it."""
    for number in range(3, 1000):
        try:
            mode = os.fstat(number).st_mode
            if stat.S_ISFIFO(mode) and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT:
                found = number
            elif stat.S_ISSOCK(mode):
                found = socket.socket(fileno=os.dup(number))
                if found.type != socket.SOCK_SEQPACKET:
                    continue
            else:
                continue
        except OSError:
            continue
        if isinstance(found, kind):
            return found


class Sends(logging.Handler):
    """Sends what it gets to a socket below a directory that is root's: connected when opened."""

    def __init__(self, name):
        super().__init__()
        self.opener = os.geteuid()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.connect(f"{TOP}/{name}")

    def emit(self, record):
        self.socket.send(record.entry["message"].encode())


class Does(logging.Handler):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def emit(self, record):
        self.what(record)


class Who(Sends):
    def emit(self, record):
        self.socket.send(f"{self.opener} {os.getuid()} {record.uid} {record.key}".encode())


def said(name):
    return open(f"{TOP}/{name}", "rb").read()


def nonsense(site):
    data = said("nonsense")
    return Does(lambda record: os.write(roots(int), data))


def late(site):
    if not os.path.exists(f"{TOP}/now"):
        raise OSError("not yet")
    return Sends("late")


def writes(record):
    with open(f"/tmp/sink-{os.getpid()}", "wb", 0) as file:
        os.unlink(file.name)
        file.write(b"x")


def descriptors(record):
    socket.send_fds(roots(socket.socket), [b"y" * 14], [0, 1, 2])


good = lambda site: Sends("good")
who = lambda site: Who("good")
hangs = lambda site: Does(lambda record: threading.Event().wait())
opens = lambda site: threading.Event().wait()
kills = lambda site: Does(lambda record: os.kill(os.getpid(), signal.SIGKILL))
stops = lambda site: Does(lambda record: os.kill(os.getpid(), signal.SIGSTOP))
shouts = lambda site: Does(lambda record: sys.stderr.write("\\x1b[31m" + "loud " * 5000 + "\\n"))
passes = lambda site: Does(descriptors)
full = lambda site: Does(writes)
'''
PROGRAM = """
import os, sys
sys.path.insert(0, {top!r})
if os.geteuid() == 0:
    os.setgroups([4, 27])  # as a service may have some
from vtorque_core.config import plugins
from vtorque_joblog import sinks_process
plugins.require_trusted = lambda *_: None  # pytest's directory
sinks_process._AGAIN = 1.0
sinks_process._OPENING = 2.0
sinks_process.main()
"""


class JobLogDouble:
    """The log of a job."""

    def __init__(self, top, name="42.srv"):
        self.path = top / f"{name}.log"
        self.job = JobLog(1000, name, self.path)

    def say(self, *messages):
        """Write lines, and return the log for a sink."""
        for message in messages:
            entry = {"t": 1.0, "level": "INFO", "logger": "vtorque_core", "plugin": "core",
                     "phase": "boot", "guest": None, "node": "n1", "job": "42",
                     "message": message}  # fmt: skip
            with self.path.open("ab") as file:
                file.write(json.dumps(entry).encode() + b"\n")
        return self.job


class Heard:
    """The data that a sink has sent to its socket."""

    def __init__(self, path):
        self.got = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while data := self._socket.recv(1 << 16):
            self.got.append(data.decode())

    def close(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as us:
            us.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()


@pytest.fixture
def top(tmp_path):
    """Return a directory for root only, with a distribution that has sinks."""
    tmp_path.chmod(0o700)
    (tmp_path / "acme_sinks.py").write_text(SINKS)
    info = tmp_path / "acme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: acme\nVersion: 1\n")
    names = (line.partition(" =")[0] for line in SINKS.splitlines() if " = lambda" in line)
    points = "".join(f"{name} = acme_sinks:{name}\n" for name in [*names, "nonsense", "late"])
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
    return tmp_path


@pytest.fixture
def good_config(top):
    heard = Heard(top / "good")
    yield heard
    heard.close()


@pytest.fixture
def open_sinks(top, monkeypatch):
    """Return a function that starts root's side of the sinks, with ``progress`` per sink."""
    monkeypatch.setattr(unprivileged_sinks, "_AGAIN", 0.1)
    config, all_of_them = top / "v.toml", []

    def start(*names):
        config.write_text(f"[plugin.joblog]\nsinks = {json.dumps(names)}\n")
        start.progress = {name: SavedOffsets(top / f"told-{name}") for name in names}
        found = UnprivilegedSinks(config, start.progress)
        found._argv = (
            sys.executable,
            "-I",
            "-c",
            PROGRAM.format(top=str(top)),
            str(config),
            *names,
        )
        all_of_them.append(found)
        return found

    yield start
    for each in all_of_them:
        each.close(time.monotonic() + 0.5)


def life(found):
    eventually(lambda: found._life is not None)
    return found._life


def status(path):
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return {name: value.split() for name, _, value in lines}


# -- Process and privileges ------------------------------------------------------------------------


def test_sinks_process_has_no_privileges_and_no_writable_file(top, open_sinks, good_config):
    found = open_sinks("good", "hangs")
    found.give(JobLogDouble(top).say("one"))
    eventually(lambda: good_config.got == ["one"])
    pid = life(found).process.pid
    uid = str(Settings().uid if os.geteuid() == 0 else os.geteuid())
    threads = thread_statuses(pid).values()
    assert len(threads) >= 4, "the threads of the sinks are not running"
    for has in threads:
        assert has["Uid"] == [uid] * 4 and has["NoNewPrivs"] == ["1"]
        if os.geteuid() == 0:
            assert has["Gid"] == [uid] * 4 and has["Groups"] == []
            sets = [int(value[0], 16) for name, value in has.items() if name.startswith("Cap")]
            assert sets == [0] * 5
    for each in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            kind = (Path(f"/proc/{pid}/fd") / each.name).stat().st_mode
            if stat.S_ISREG(kind):
                assert int(status(each)["flags"][0], 8) & os.O_ACCMODE == os.O_RDONLY


def test_sinks_are_opened_as_root_and_run_as_the_user(top, open_sinks, good_config):
    found = open_sinks("who")
    found.give(JobLogDouble(top).say("one"))
    runs = Settings().uid if os.geteuid() == 0 else os.geteuid()
    eventually(lambda: good_config.got == [f"{os.geteuid()} {runs} 1000 42.srv"])


def test_sinks_process_cannot_write_a_file(top, open_sinks, caplog):
    found = open_sinks("full")
    found.give(JobLogDouble(top).say("one"))
    eventually(lambda: "sink full: OSError: [Errno 27] File too large" in caplog.text)


def test_stopped_sinks_process_ends_with_root(top, open_sinks):
    found = open_sinks("hangs")
    found.give(JobLogDouble(top).say("one"))
    pid = life(found).process.pid
    uid = [str(Settings().uid if os.geteuid() == 0 else os.geteuid())]
    eventually(lambda: life(found).taken == 1)
    assert status(Path(f"/proc/{pid}/status"))["Uid"][:1] == uid
    os.kill(pid, signal.SIGSTOP)
    found.close(time.monotonic())  # without waiting
    eventually(lambda: not Path(f"/proc/{pid}/exe").exists())


# -- Delivery --------------------------------------------------------------------------------------


def test_each_line_is_sent_once_across_restarts(top, open_sinks, good_config):
    logs, said = [JobLogDouble(top, f"{n}.srv") for n in range(5)], []
    for number in range(10):
        found = open_sinks("good")
        for log in logs:
            for part in range(10):
                said.append(f"{log.job.key} {number} {part}")
                found.give(log.say(said[-1]))
        eventually(lambda f=found: not f.is_busy)
        found.close(time.monotonic() + LONG)
    assert sorted(good_config.got) == sorted(said)
    for log in logs:
        of_it = [each for each in said if each.startswith(log.job.key)]
        assert [each for each in good_config.got if each.startswith(log.job.key)] == of_it
        assert open_sinks.progress["good"].offset_of(log.job.name) == log.path.stat().st_size


def test_outdated_position_from_root_does_not_move_a_sink_back():
    answers, theirs = os.pipe()
    deputy = RemoteOffsets(theirs, 3)
    deputy.begin("1000/42.srv", 7, 10)
    deputy.mark("1000/42.srv", 50)
    deputy.begin("1000/42.srv", 7, 10)  # sent before root has received that
    assert deputy.offset_of("1000/42.srv") == 50
    assert os.read(answers, 99) == RECORD.pack(3, 7, 50)
    os.close(answers)
    os.close(theirs)


def test_remaining_lines_are_sent_at_the_end(top, open_sinks, good_config):
    found = open_sinks("good", "hangs")
    found.give(JobLogDouble(top).say("one", "two"))
    eventually(lambda: life(found).taken == 1)
    begun, process = time.monotonic(), life(found).process
    found.close(begun + LONG)  # it ends without a signal, long before
    assert good_config.got == ["one", "two"] and process.returncode == 0
    assert open_sinks.progress["hangs"].offset_of("1000/42.srv") == 0, (
        "undelivered bytes are counted"
    )


def test_partial_line_waits_for_its_rest(top, open_sinks, good_config):
    found, log = open_sinks("good"), JobLogDouble(top)
    whole = log.say("one").path.read_bytes()
    with log.path.open("ab", 0) as file:
        file.write(whole[:20])
        found.give(log.job)
        eventually(lambda: good_config.got == ["one"])
        eventually(lambda: not found.is_busy)
        file.write(whole[20:])
    found.give(log.job)
    eventually(lambda: good_config.got == ["one", "one"])


def test_more_logs_than_a_socket_buffer_holds_are_sent(top, open_sinks, good_config):
    found = open_sinks("good")
    logs = [JobLogDouble(top, f"{n}.srv") for n in range(600)]
    for log in logs:
        found.give(log.say(log.job.key))
    eventually(lambda: not found.is_busy)
    assert sorted(good_config.got) == sorted(log.job.key for log in logs)


def test_removed_log_does_not_block_others(top, open_sinks, good_config):
    found, log = open_sinks("good"), JobLogDouble(top, "1.srv")
    log.say("swept")
    job = JobLog(1000, "0.srv", top / "0.srv.log")
    job.path.write_text("x\n")
    found.give(job)
    job.path.unlink()
    found.give(log.job)
    eventually(lambda: good_config.got == ["swept"] and not found.is_busy)


# -- Failing, hanging and attacking sinks ----------------------------------------------------------


@pytest.mark.parametrize("bad", ["hangs", "opens", "kills", "shouts", "passes", "nowhere"])
def test_misbehaving_sink_does_not_affect_another_sink(top, open_sinks, good_config, bad):
    found, log, said = open_sinks("good", bad), JobLogDouble(top), [str(n) for n in range(5)]
    for each in said:
        found.give(log.say(each))
    eventually(lambda: list(dict.fromkeys(good_config.got)) == said)
    eventually(
        lambda: open_sinks.progress["good"].offset_of(log.job.name) == log.path.stat().st_size
    )
    assert bad in ("shouts", "nowhere") or open_sinks.progress[bad].offset_of(log.job.name) == 0


def test_stopped_process_is_killed_and_restarted(top, open_sinks, good_config, monkeypatch, caplog):
    monkeypatch.setattr(
        unprivileged_sinks, "_PATIENCE", 10.0
    )  # more than a start takes beside load
    found, log = open_sinks("good", "stops"), JobLogDouble(top)
    for number in range(2):
        found.give(log.say(str(number)))
        eventually(lambda n=number: str(n) in good_config.got)
    eventually(lambda: "process has received no logs for 10 s" in caplog.text)


SIZE = RECORD.size
WRONG = {
    "short answer": (b"x", f"sent an answer of 1 bytes instead of {SIZE}"),
    "long answer": (b"x" * 4000, f"sent an answer of {SIZE + 1} bytes instead of {SIZE}"),
    "offset of 2^63": (
        RECORD.pack(1, 0, 1 << 63),
        "reports an invalid offset 9223372036854775808 of log 0 for sink 1",
    ),
    "offset after the end": (
        RECORD.pack(1, 0, 1_000),
        "reports an invalid offset 1000 of log 0 for sink 1",
    ),
    "earlier offset": (
        RECORD.pack(1, 0, 0),
        "reports an invalid offset 0 of log 0 for sink 1",
    ),
    "unknown sink": (
        RECORD.pack(7, 0, 1),
        "reports an invalid offset 1 of log 0 for sink 7",
    ),
    "unknown log": (
        RECORD.pack(1, 5, 1),
        "reports an invalid offset 1 of log 5 for sink 1",
    ),
    "more logs than sent": (RECORD.pack(2, 0, 99), "reports that it received 99 of 1 logs"),
    "unknown log of the process": (
        RECORD.pack(2, 1, 1),
        "reports an invalid offset 1 of log 1 for sink 2",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_answer_ends_the_process_but_not_other_sinks(
    top, open_sinks, good_config, caplog, what
):
    data, words = WRONG[what]
    (top / "nonsense").write_bytes(data)
    found, log = open_sinks("good", "nonsense"), JobLogDouble(top)
    found.give(log.say("one", "two"))
    eventually(lambda: f"the sinks' process {words}" in caplog.text)
    eventually(lambda: list(dict.fromkeys(good_config.got)) == ["one", "two"])
    size = log.path.stat().st_size
    assert size < 1000, "the log is as large as the invalid offset: this test shows nothing"
    assert all(told.offset_of(log.job.name) <= size for told in open_sinks.progress.values())
    assert set(found._given) == {log.job.name}


def test_killed_process_is_restarted(top, open_sinks, good_config):
    found, log = open_sinks("good"), JobLogDouble(top)
    for number in range(3):
        found.give(log.say(str(number)))
        eventually(lambda n=number: good_config.got[-1:] == [str(n)] and not found.is_busy)
        life(found).process.kill()
    assert good_config.got == ["0", "1", "2"]


def test_restarts_are_limited(top, open_sinks, monkeypatch):
    started = []

    class Counted(unprivileged_sinks._SinksProcess):
        def __init__(self, argv):
            started.append(argv)
            super().__init__(argv)

    monkeypatch.setattr(unprivileged_sinks, "_SinksProcess", Counted)
    monkeypatch.setattr(unprivileged_sinks, "_AGAIN", 10_000)
    found, log = open_sinks("kills"), JobLogDouble(top)
    found.give(log.say("one"))
    eventually(lambda: started and found._life is None)
    for number in range(20):
        found.give(log.say(str(number)))
    assert len(started) == 1 and found.is_busy


def test_sink_that_cannot_be_opened_is_retried_and_reported_once(
    top, open_sinks, good_config, caplog
):
    late = Heard(top / "late")
    found, log = open_sinks("good", "late"), JobLogDouble(top)
    found.give(log.say("one"))
    first = life(found)
    eventually(lambda: found._life not in (first, None) and found._life.taken == 1)
    eventually(lambda: "sink late: OSError: not yet" in found._life.said)
    (top / "now").touch()
    eventually(lambda: late.got == ["one"])
    eventually(lambda: not found.is_busy)
    assert good_config.got == ["one"]
    assert caplog.text.count("not yet") == 1
    late.close()


def test_output_of_a_sink_is_bounded_and_escaped(top, open_sinks, caplog):
    found = open_sinks("shouts")
    found.give(JobLogDouble(top).say("one"))
    eventually(lambda: "loud loud" in caplog.text)
    said = [r.message for r in caplog.records if "loud" in r.message]
    assert all(len(each) <= 2100 and each.isprintable() for each in said)


def test_child_of_a_sink_inherits_no_socket_to_root(top, open_sinks, good_config):
    found = open_sinks("good")
    found.give(JobLogDouble(top).say("one"))
    eventually(lambda: good_config.got == ["one"])
    pid = life(found).process.pid
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "socket:" in str(each.readlink()) or "pipe:" in str(each.readlink()):
                flags = status(Path(f"/proc/{pid}/fdinfo/{each.name}"))["flags"]
                assert each.name == "2" or int(flags[0], 8) & os.O_CLOEXEC
