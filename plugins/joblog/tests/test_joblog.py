"""The sinks of joblog: real sockets, files and directories, and what a user may have put there."""

import contextlib
import errno
import fcntl
import json
import logging
import multiprocessing
import os
import pwd
import signal
import socket
import threading
import time
import types

import pytest

from vtorque_core.api_log import LogJob
from vtorque_core.config import build, parse_toml
from vtorque_core.errors import ConfigError, HostFault
from vtorque_core.log_sinks import _record
from vtorque_core.plugins import Plugins
from vtorque_joblog import node, plugin, user_file
from vtorque_joblog.file import JsonFile
from vtorque_joblog.local import Journal, Syslog
from vtorque_joblog.user_file import UserFile

ME = pwd.getpwuid(os.getuid())


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Give children on a busy machine more time than a job has for them."""
    monkeypatch.setattr(user_file, "PATIENCE", 30)


def record(message="hot", level="INFO", asked=False, **more):
    """Return a record as sinks get it from the core."""
    entry = {
        "t": 1790000000.5, "level": level, "logger": "vtorque_core.boot", "plugin": "core",
        "phase": "boot", "guest": None, "node": "n1", "job": "42.srv", "message": message, **more,
    }  # fmt: skip
    return _record((b"-" if asked else b"+") + json.dumps(entry).encode())


@pytest.fixture
def plugins():
    found = Plugins()
    for module in (plugin, node):
        found.register("joblog", module, "vtorque-joblog 1.0")
    return found


def site_of(plugins, text):
    return build(parse_toml(f"[plugin.joblog]\n{text}".encode()), plugins, node=True)


def job_of(site, tmp_path, **changes):
    values = {
        "id": "42.srv", "attempt": 0, "key": "42.srv.0", "node": "n1", "owner": ME.pw_name,
        "uid": ME.pw_uid, "site": site, "kept": tmp_path,
    }  # fmt: skip
    return LogJob(**values | changes)


# -- settings ----------------------------------------------------------------------------------


def test_without_settings_there_is_no_sink(plugins, tmp_path):
    job = job_of(site_of(plugins, ""), tmp_path)
    assert list(plugins.each("vtorque_log_handlers", job=job)) == []


def test_each_named_sink_is_there_and_leaves_out_what_only_the_user_wants(plugins, tmp_path):
    tmp_path.chmod(0o755)
    text = (
        'syslog = "local3"\njournald = true\nstderr = true\nlevel = "warn"\n'
        f'file = "{tmp_path}/all.jsonl"\nuser_file = "{tmp_path}/{{user}}/{{job}}.{{node}}.log"\n'
    )
    job = job_of(site_of(plugins, text), tmp_path, node="n/1")
    found = plugins.collect("vtorque_log_handlers", job=job)
    *sites, users = [each.item for each in found]
    assert [type(each).__name__ for each in sites] == ["Syslog", "Journal", "Stderr", "JsonFile"]
    assert {each.level for each in sites} == {logging.WARNING} and users.level == 0
    assert all(each.filter(record()) for each in (*sites, users))
    assert not any(each.filter(record(asked=True)) for each in sites)
    assert users.filter(record(asked=True))
    assert users._path == f"{tmp_path}/{ME.pw_name}/42.srv.0.n_1.log"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('syslog = "loud"', "there are kern, user"),
        ('level = "loud"', "there are trace"),
        ('tag = "a b"', "letters, digits"),
        ('file = "log.jsonl"', "absolute path"),
        ('file = "/var/../etc/x"', "'..'"),
        ("file_size = 0", "at least 1M"),
        ("file_count = -1", "0 to 1000"),
        ('user_file = "/tmp/{shell}"', "place holder: there are {home}"),
        ('user_file = "log"', "absolute path"),
        ('user_file = "{home}/../x"', "'..'"),
    ],
)
def test_bad_settings_are_refused_with_what_is_right(plugins, text, words):
    with pytest.raises(ConfigError) as raised:
        site_of(plugins, text)
    assert words in str(raised.value)


def test_doctor_looks_at_what_the_sinks_need(plugins, tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setattr(node, "SYSLOG", str(tmp_path / "no-log"))
    (check,) = [c.item for c in plugins.collect("vtorque_health_checks")]

    def states(text):
        return [each.status for each in check.check(site_of(plugins, text))]

    assert states("") == ["ok"]
    assert states('syslog = "daemon"') == ["warning", "ok"]
    assert states(f'file = "{tmp_path}/x"') == ["ok", "ok"]
    assert states(f'file = "{tmp_path}/nowhere/x"') == ["failed", "ok"]


# -- syslog and journal ------------------------------------------------------------------------


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(str(tmp_path / "s"))
        there.settimeout(20)
        yield types.SimpleNamespace(path=str(tmp_path / "s"), get=lambda: there.recv(1 << 17))


def test_syslog(listener):
    sink = Syslog(3, "vtorque", listener.path)
    sink.handle(record("hot", "ERROR", guest=1, detail=["a", "b"]))
    tag = f"vtorque[{os.getpid()}]"
    line = f"<27>{tag}: 42.srv on n1: ERROR [boot g1] vtorque_core.boot: hot | a | b"
    assert listener.get().decode() == line
    sink.handle(record("ü" * 9000))
    long = listener.get()
    assert len(long) in (7999, 8000) and long.decode().endswith("ü")
    sink.close()


def test_the_journal_gets_fields(listener):
    sink = Journal("vtorque", listener.path)
    sink.handle(record("hot=1", "WARN", guest=0))
    fields = dict(line.split("=", 1) for line in listener.get().decode().splitlines())
    assert fields == {
        "MESSAGE": "42.srv: hot=1", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "vtorque",
        "VTORQUE_LEVEL": "WARN", "VTORQUE_LOGGER": "vtorque_core.boot", "VTORQUE_JOB": "42.srv",
        "VTORQUE_NODE": "n1", "VTORQUE_PHASE": "boot", "VTORQUE_PLUGIN": "core",
        "VTORQUE_GUEST": "0",
    }  # fmt: skip
    sink.close()


def test_a_listener_that_was_restarted_is_found_again(tmp_path):
    path = tmp_path / "s"
    sink = Syslog(3, "vtorque", str(path))
    for message in ("one", "two"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
            there.settimeout(20)
            there.bind(str(path))
            sink.handle(record(message))
            assert there.recv(9999).decode().endswith(message)
        path.unlink()
    with pytest.raises(FileNotFoundError):
        sink.emit(record())
    sink.close()


# -- the file of all jobs ----------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    tmp_path.chmod(0o755)
    return tmp_path


def messages(path):
    return [json.loads(line)["message"] for line in path.read_text().splitlines()]


def test_the_file_is_turned_over_by_size(directory):
    path = directory / "all.jsonl"
    sink = JsonFile(str(path), 1000, 0, 2)
    for number in range(24):
        sink.handle(record(f"{number:03}"))
    sink.close()
    assert sorted(p.name for p in directory.iterdir()) == [
        "all.jsonl", "all.jsonl.1", "all.jsonl.2",
    ]  # fmt: skip
    found = [m for name in (".2", ".1", "") for m in messages(directory / f"all.jsonl{name}")]
    assert found == [f"{n:03}" for n in range(24)][-len(found) :]


def test_the_file_is_turned_over_by_the_age_of_its_first_record(directory):
    path = directory / "all.jsonl"
    old = JsonFile(str(path), 1 << 20, 0, 3)
    old.handle(record("old"))
    old.close()
    sink = JsonFile(str(path), 1 << 20, 86400, 3)  # records are from 2026
    sink.handle(record("new", t=4e9))
    sink.close()
    young = JsonFile(str(path), 1 << 20, 86400, 3)
    young.handle(record("newer"))
    young.close()
    assert messages(directory / "all.jsonl.1") == ["old"]
    assert messages(path) == ["new", "newer"]


def test_without_older_files_the_file_begins_again(directory):
    path = directory / "all.jsonl"
    sink = JsonFile(str(path), 500, 0, 0)
    for number in range(9):
        sink.handle(record(str(number)))
    sink.close()
    assert [p.name for p in directory.iterdir()] == ["all.jsonl"]
    assert messages(path)[-1] == "8"


def _write_many(path, name):
    sink = JsonFile(path, 3000, 0, 900)
    for number in range(100):
        sink.emit(record(f"{name}-{number}"))
    sink.close()


def test_many_processes_turn_one_file_over_and_lose_nothing(directory):
    path = directory / "all.jsonl"
    context = multiprocessing.get_context("spawn")
    many = [context.Process(target=_write_many, args=(str(path), n)) for n in "abc"]
    for each in many:
        each.start()
    for each in many:
        each.join(120)
        assert each.exitcode == 0
    found = [m for file in directory.iterdir() for m in messages(file)]
    assert sorted(found) == sorted(f"{n}-{i}" for n in "abc" for i in range(100))


def test_a_users_lock_on_the_directory_holds_nobody_up(directory):
    """Whoever can open it can flock(2) it."""
    sink = JsonFile(str(directory / "all.jsonl"), 300, 0, 2)

    def write():
        for number in range(9):
            sink.handle(record(str(number)))

    held = os.open(directory, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(20)
    done = not writer.is_alive()
    os.close(held)
    writer.join(20)
    sink.close()
    assert done
    assert (directory / "all.jsonl.1").exists()


def test_a_file_that_is_none_is_refused(directory):
    target = directory / "target"
    target.write_text("")
    (directory / "link").symlink_to(target)
    with pytest.raises(OSError, match="symbolic") as raised:
        JsonFile(str(directory / "link"), 999, 0, 1).emit(record())
    assert raised.value.errno == errno.ELOOP
    os.mkfifo(directory / "pipe")
    sink = JsonFile(str(directory / "pipe"), 999, 0, 1)
    with pytest.raises(HostFault, match="is no regular file"):
        sink.emit(record())
    sink.close()
    assert target.read_text() == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root has something to lose")
def test_a_directory_that_others_can_write_is_refused(directory):
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        JsonFile(str(directory / "all.jsonl"), 999, 0, 1)


def test_a_full_disk_is_an_error_and_the_next_line_is_whole(directory, monkeypatch):
    path = directory / "all.jsonl"
    sink = JsonFile(str(path), 1 << 20, 0, 1)
    sink.emit(record("one"))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        with pytest.raises(OSError, match="No space"):
            sink.emit(record("torn"))
    sink.emit(record("two"))
    sink.close()
    first, torn, last = path.read_text().splitlines()
    assert json.loads(first)["message"] == "one" and json.loads(last)["message"] == "two"
    assert len(torn) == 10


# -- the user's file ---------------------------------------------------------------------------


def in_user_file(path, *records):
    """Handle records as the core does; return what went wrong."""
    errors = []
    sink = UserFile(str(path), ME)
    sink.handleError = errors.append
    try:
        for each in records:
            sink.handle(each)
        sink.close()
    except Exception as error:
        errors.append(str(error))
    return errors


def test_the_users_file_is_made_with_its_directories(tmp_path):
    path = tmp_path / "a" / "b" / "42.log"
    assert in_user_file(path, record("one"), record("two", asked=True, guest=1)) == []
    first, second = path.read_text().splitlines()
    assert first.endswith("n1 INFO [boot] vtorque_core.boot: one")
    assert second.endswith("n1 INFO [boot g1] vtorque_core.boot: two")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert in_user_file(path, record("three")) == [] and len(path.read_text().splitlines()) == 3


def test_lines_come_while_the_job_runs(tmp_path):
    path = tmp_path / "42.log"
    sink = UserFile(str(path), ME)
    sink.handle(record("one"))
    end = time.monotonic() + 20
    while not (path.exists() and path.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    assert path.read_text().endswith("one\n")
    sink.close()


def test_what_a_user_may_have_put_there_costs_the_file_only(tmp_path):
    target = tmp_path / "target"
    target.write_text("root's")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dir").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
    wrong = {
        "link": "symbolic", "fifo": "No such device", "dir": "Is a directory",
        "loop/x": "symbolic", "socket": "No such device", "target/x": "Not a directory",
        "x" * 300: "too long",
    }  # fmt: skip
    for name, words in wrong.items():
        (said,) = in_user_file(tmp_path / name, record())
        assert words in said or "File exists" in said, (name, said)
    assert target.read_text() == "root's"
    assert "is no regular file" in in_user_file("/dev/full", record())[0]


def test_a_reader_of_a_fifo_gets_nothing(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    (said,) = in_user_file(tmp_path / "fifo", record())
    assert "is no regular file" in said
    os.close(reader)


def test_the_users_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(user_file, "MAX_BYTES", 1000)
    path = tmp_path / "42.log"
    assert in_user_file(path, *(record("x" * 90) for _ in range(100))) == []
    assert 800 < path.stat().st_size <= 1000


def test_a_child_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(user_file, "PATIENCE", 0)
    monkeypatch.setattr(user_file, "_append", lambda path, source: os.read(os.pipe()[0], 1) or "")
    sink = UserFile(str(tmp_path / "x"), ME)
    with pytest.raises(HostFault, match="no answer from its file system"):
        sink.close()
    with contextlib.suppress(ChildProcessError):  # or close() has seen it end
        assert os.WTERMSIG(os.waitpid(sink._pid, 0)[1]) == signal.SIGKILL
