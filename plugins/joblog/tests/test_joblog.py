"""The sinks of joblog: real sockets, files and directories, and what a user may have put there."""

import contextlib
import errno
import json
import os
import pwd
import signal
import socket
import time
import types

import pytest

from vtorque_core.base.errors import ConfigError, HostFault
from vtorque_core.live.extensions import Extensions
from vtorque_core.site.config import build, parse_toml
from vtorque_core.site.plugins import Plugins
from vtorque_joblog import node, plugin, sinks, user_file
from vtorque_joblog.api import GROUP
from vtorque_joblog.file import JsonFile
from vtorque_joblog.local import Journal, Syslog
from vtorque_joblog.outlets import JobLog, record_of
from vtorque_joblog.plugin import Settings
from vtorque_joblog.user_file import UserFile

ME = pwd.getpwuid(os.getuid())


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Give children on a busy machine more time than a job has for them."""
    monkeypatch.setattr(user_file, "PATIENCE", 30)


def record(message="hot", level="INFO", **more):
    """Return a record as sinks get it from the follower."""
    entry = {
        "t": 1790000000.5, "level": level, "logger": "vtorque_core.node.start.boot", "plugin":
        "core", "phase": "boot", "guest": None, "node": "n1", "job": "42.srv", "message": message,
        **more,
    }  # fmt: skip
    return record_of(entry, JobLog(ME.pw_uid, "42.srv.0", None))


@pytest.fixture
def plugins():
    found = Plugins()
    for module in (plugin, node):
        found.register("joblog", module, "vtorque-joblog 1.0")
    return found


def site_of(plugins, text):
    return build(parse_toml(f"[plugin.joblog]\n{text}".encode()), plugins, node=True)


# -- settings ----------------------------------------------------------------------------------


def test_without_settings_there_is_no_sink_and_no_follower(plugins):
    site = site_of(plugins, "")
    assert site[Settings].outside == [] and site[Settings].on == []
    node.vtorque_pre_boot(types.SimpleNamespace(site=site))  # acquires nothing


def test_each_named_sink_is_there_and_has_a_follower(plugins, tmp_path):
    tmp_path.chmod(0o755)
    text = f'syslog = "local3"\njournald = true\nfile = "{tmp_path}/a.jsonl"\nsinks = ["acme"]\n'
    site = site_of(plugins, text)
    others = Extensions(GROUP, ())
    kinds = {"syslog": Syslog, "journald": Journal}
    assert {name: type(sinks.opened(name, site, others)) for name in kinds} == kinds
    assert site[Settings].outside == ["syslog", "journald", "acme"]
    assert site[Settings].on == ["syslog", "journald", "file", "acme"]
    acquired = []
    node.vtorque_pre_boot(types.SimpleNamespace(site=site, acquire=acquired.append))
    (one,) = acquired
    assert (one.kind, one.scope) == ("joblog-follower", "node")


def test_a_follower_that_cannot_be_started_fails_no_job(plugins):
    told = []

    def acquire(_resource):
        raise HostFault("no space")

    site = site_of(plugins, "journald = true")
    node.vtorque_pre_boot(types.SimpleNamespace(site=site, acquire=acquire, warn=told.append))
    assert told == ["has its log in no sink yet: no space"]


def test_the_users_file_is_named_by_job_node_and_user(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"node": "n/1"}) + "\n")
    template = f"{tmp_path}/{{user}}/{{uid}}.{{job}}.{{node}}.log"
    sink = sinks.user_file(template, JobLog(ME.pw_uid, "42.srv.0", path))
    assert sink._path == f"{tmp_path}/{ME.pw_name}/{ME.pw_uid}.42.srv.0.n_1.log"
    sink.close()
    with pytest.raises(HostFault, match="no user has the number 4000000000"):
        sinks.user_file(template, JobLog(4000000000, "42.srv.0", path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('syslog = "loud"', "there are kern, user"),
        ('level = "loud"', "there are trace"),
        ('tag = "a b"', "letters, digits"),
        ('file = "log.jsonl"', "absolute path"),
        ('file = "/var/../etc/x"', "'..'"),
        ('user_file = "/tmp/{shell}"', "place holder: there are {home}"),
        ('user_file = "log"', "absolute path"),
        ('user_file = "{home}/../x"', "'..'"),
        ('sinks = ["acme", "file"]', "file is joblog's own"),
        ("uid = 0", "must be 1 to 4294967294"),
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
    assert states('sinks = ["acme"]') == ["ok"]
    assert states(f'sinks = ["acme"]\nuid = {ME.pw_uid or 1}') == ["warning", "ok"]
    assert states(f"uid = {ME.pw_uid or 1}") == ["ok"]  # nobody runs as that


# -- syslog and journal ------------------------------------------------------------------------


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(str(tmp_path / "s"))
        there.settimeout(180)
        yield types.SimpleNamespace(path=str(tmp_path / "s"), get=lambda: there.recv(1 << 17))


def test_syslog(listener):
    sink = Syslog(3, "vtorque", listener.path)
    sink.handle(record("hot", "ERROR", guest=1, detail=["a", "b"]))
    tag = f"vtorque[{os.getpid()}]"
    line = f"<27>{tag}: 42.srv on n1: ERROR [boot g1] vtorque_core.node.start.boot: hot | a | b"
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
        "VTORQUE_LEVEL": "WARN", "VTORQUE_LOGGER": "vtorque_core.node.start.boot", "VTORQUE_JOB":
        "42.srv", "VTORQUE_NODE": "n1", "VTORQUE_PHASE": "boot", "VTORQUE_PLUGIN": "core",
        "VTORQUE_GUEST": "0",
    }  # fmt: skip
    sink.close()


def test_a_listener_that_was_restarted_is_found_again(tmp_path):
    path = tmp_path / "s"
    sink = Syslog(3, "vtorque", str(path))
    for message in ("one", "two"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
            there.settimeout(180)
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


def test_a_file_that_logrotate_has_renamed_is_begun_again(directory):
    path = directory / "all.jsonl"
    sink = JsonFile(str(path))
    sink.handle(record("one"))
    path.rename(directory / "all.jsonl.1")
    sink.handle(record("two"))
    path.unlink()
    sink.handle(record("three"))
    sink.close()
    assert messages(directory / "all.jsonl.1") == ["one"] and messages(path) == ["three"]


def test_a_file_that_could_not_be_begun_again_is_when_that_is_possible(directory, monkeypatch):
    path = directory / "all.jsonl"
    sink = JsonFile(str(path))
    path.rename(directory / "all.jsonl.1")
    with monkeypatch.context() as patch:
        patch.setattr(sink, "_open", lambda: os.open("/nonexistent/x", os.O_RDONLY))
        with pytest.raises(OSError, match="No such file"):
            sink.emit(record("lost by this try"))
    sink.handle(record("two"))
    sink.close()
    assert messages(path) == ["two"]


def test_the_last_line_of_before_is_not_told_again_but_the_first_is(directory):
    """A follower that was killed may have written a line, and not noted that."""
    path = directory / "all.jsonl"
    for text in ("one", "two"):
        sink = JsonFile(str(path))
        sink.handle(record(text))
        sink.close()
    sink = JsonFile(str(path))
    sink.handle(record("of another job", job="43.srv"))  # its log comes first, this time
    sink.handle(record("two"))
    sink.handle(record("two"))
    sink.close()
    assert messages(path) == ["one", "two", "of another job", "two"]


def test_a_file_that_is_none_is_refused(directory):
    target = directory / "target"
    target.write_text("")
    (directory / "link").symlink_to(target)
    with pytest.raises(OSError, match="symbolic") as raised:
        JsonFile(str(directory / "link"))
    assert raised.value.errno == errno.ELOOP
    os.mkfifo(directory / "pipe")
    with pytest.raises(HostFault, match="is no regular file"):
        JsonFile(str(directory / "pipe"))
    assert target.read_text() == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root has something to lose")
def test_a_directory_that_others_can_write_is_refused(directory):
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        JsonFile(str(directory / "all.jsonl"))


def test_a_full_disk_is_an_error_and_leaves_no_half_line(directory, monkeypatch):
    path = directory / "all.jsonl"
    sink = JsonFile(str(path))
    sink.emit(record("one"))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        with pytest.raises(OSError, match="No space"):
            sink.emit(record("two"))
    assert messages(path) == ["one"]
    sink.emit(record("two"))
    sink.close()
    assert messages(path) == ["one", "two"]


# -- the user's file ---------------------------------------------------------------------------


def in_user_file(path, *records):
    """Handle records as the follower does; return what went wrong."""
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
    assert in_user_file(path, record("one"), record("two", guest=1)) == []
    first, second = path.read_text().splitlines()
    assert first.endswith("n1 INFO [boot] vtorque_core.node.start.boot: one")
    assert second.endswith("n1 INFO [boot g1] vtorque_core.node.start.boot: two")
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


def test_a_child_that_its_user_has_stopped_is_given_up(tmp_path, monkeypatch):
    """It is the user's process: a signal of theirs must not keep root's thread in a write."""
    monkeypatch.setattr(user_file, "PATIENCE", 1)
    sink = UserFile(str(tmp_path / "x"), ME)
    os.kill(sink._pid, signal.SIGSTOP)
    with pytest.raises(HostFault, match="nothing was written"):
        for _ in range(1000):  # a pipe has room for 64 KiB, pipe(7)
            sink.emit(record("x" * 1000))
    with pytest.raises(HostFault, match="no answer"):
        sink.close()


def test_a_child_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(user_file, "PATIENCE", 0)
    monkeypatch.setattr(user_file, "_append", lambda path, source: os.read(os.pipe()[0], 1) or "")
    sink = UserFile(str(tmp_path / "x"), ME)
    with pytest.raises(HostFault, match="no answer from its file system"):
        sink.close()
    with contextlib.suppress(ChildProcessError):  # or close() has seen it end
        assert os.WTERMSIG(os.waitpid(sink._pid, 0)[1]) == signal.SIGKILL
