"""The sinks of joblog: real sockets, files and directories."""

import errno
import json
import os
import pwd
import socket
import types

import pytest

from vtorque_core.api import ConfigError, HostFault, hooks
from vtorque_core.live.extensions import Extensions
from vtorque_joblog import node, plugin, sinks
from vtorque_joblog.api import GROUP
from vtorque_joblog.file import JsonFile
from vtorque_joblog.outlets import JobLog, record_of
from vtorque_joblog.plugin import Settings
from vtorque_joblog.syslog_journald import Syslog, SystemdJournal
from vtorque_testing.planned import PlannedNode, load_with_core

ME = pwd.getpwuid(os.getuid())


def record(message="hot", level="INFO", **more):
    """Return a record in the form that sinks get from the follower."""
    entry = {
        "t": 1790000000.5, "level": level, "logger": "vtorque_core.node.start.boot", "plugin":
        "core", "phase": "boot", "guest": None, "node": "n1", "job": "42.srv", "message": message,
        **more,
    }  # fmt: skip
    return record_of(entry, JobLog(ME.pw_uid, "42.srv.0", None))


@pytest.fixture
def plugins():
    return load_with_core("joblog", plugin, node)


def site_of(plugins, text):
    return PlannedNode.make(plugins, f"[plugin.joblog]\n{text}").site


# -- Settings --------------------------------------------------------------------------------------


def test_no_sink_and_no_follower_without_settings(plugins):
    site = site_of(plugins, "")
    assert site[Settings].unprivileged_sinks == [] and site[Settings].enabled_sinks == []
    node.vtorque_pre_boot(types.SimpleNamespace(site=site))  # acquires nothing


def test_configured_sinks_are_opened_and_a_follower_is_started(plugins, tmp_path):
    tmp_path.chmod(0o755)
    text = f'syslog = "local3"\njournald = true\nfile = "{tmp_path}/a.jsonl"\nsinks = ["acme"]\n'
    site = site_of(plugins, text)
    others = Extensions(GROUP, ())
    kinds = {"syslog": Syslog, "journald": SystemdJournal}
    assert {name: type(sinks.open_sink(name, site, others)) for name in kinds} == kinds
    assert site[Settings].unprivileged_sinks == ["syslog", "journald", "acme"]
    assert site[Settings].enabled_sinks == ["syslog", "journald", "file", "acme"]
    acquired = []
    node.vtorque_pre_boot(types.SimpleNamespace(site=site, acquire=acquired.append))
    (one,) = acquired
    assert (one.kind, one.scope) == ("joblog-follower", "node")


def test_follower_that_cannot_start_is_a_warning(plugins):
    told = []

    def acquire(_resource):
        raise HostFault("no space")

    site = site_of(plugins, "journald = true")
    node.vtorque_pre_boot(types.SimpleNamespace(site=site, acquire=acquire, warn=told.append))
    assert told == ["its log is not sent to the log sinks yet: no space"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('syslog = "loud"', "write one of kern, user"),
        ('level = "loud"', "write one of trace"),
        ('tag = "a b"', "letters, digits"),
        ('file = "log.jsonl"', "absolute path"),
        ('file = "/var/../etc/x"', "'..'"),
        ('sinks = ["acme", "file"]', "sinks: remove file, which has its own key"),
        ("uid = 0", "is invalid: it must be 1 to 4294967294"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_values(plugins, text, words):
    with pytest.raises(ConfigError) as raised:
        site_of(plugins, text)
    assert words in str(raised.value)


def test_doctor_checks_requirements_of_the_sinks(plugins, tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setattr(node, "SYSLOG", str(tmp_path / "no-log"))
    (check,) = [c.item for c in plugins.collect(hooks.vtorque_health_checks)]

    def states(text):
        return [each.status for each in check.check(site_of(plugins, text))]

    assert states("") == ["ok"]
    assert states('syslog = "daemon"') == ["warning", "ok"]
    assert states(f'file = "{tmp_path}/x"') == ["ok", "ok"]
    assert states(f'file = "{tmp_path}/nowhere/x"') == ["failed", "ok"]
    assert states('sinks = ["acme"]') == ["ok"]
    assert states(f'sinks = ["acme"]\nuid = {ME.pw_uid or 1}') == ["warning", "ok"]
    assert states(f"uid = {ME.pw_uid or 1}") == ["ok"]  # no process runs as that user


# -- syslog and journal ----------------------------------------------------------------------------


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(str(tmp_path / "s"))
        there.settimeout(180)
        yield types.SimpleNamespace(path=str(tmp_path / "s"), get=lambda: there.recv(1 << 17))


def test_syslog_gets_lines(listener):
    sink = Syslog(3, "vtorque", listener.path)
    sink.handle(record("hot", "ERROR", guest=1, detail=["a", "b"]))
    tag = f"vtorque[{os.getpid()}]"
    line = f"<27>{tag}: 42.srv on n1: ERROR [boot g1] vtorque_core.node.start.boot: hot | a | b"
    assert listener.get().decode() == line
    sink.handle(record("ü" * 9000))
    long = listener.get()
    assert len(long) in (7999, 8000) and long.decode().endswith("ü")
    sink.close()


def test_journald_gets_fields(listener):
    sink = SystemdJournal("vtorque", listener.path)
    sink.handle(record("hot=1", "WARN", guest=0))
    fields = dict(line.split("=", 1) for line in listener.get().decode().splitlines())
    assert fields == {
        "MESSAGE": "42.srv: hot=1", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "vtorque",
        "VTORQUE_LEVEL": "WARN", "VTORQUE_LOGGER": "vtorque_core.node.start.boot", "VTORQUE_JOB":
        "42.srv", "VTORQUE_NODE": "n1", "VTORQUE_PHASE": "boot", "VTORQUE_PLUGIN": "core",
        "VTORQUE_GUEST": "0",
    }  # fmt: skip
    sink.close()


def test_restarted_syslog_listener_is_reconnected(tmp_path):
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


# -- The file of all jobs --------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    tmp_path.chmod(0o755)
    return tmp_path


def messages(path):
    return [json.loads(line)["message"] for line in path.read_text().splitlines()]


def test_file_renamed_by_logrotate_is_reopened(directory):
    path = directory / "all.jsonl"
    sink = JsonFile(str(path))
    sink.handle(record("one"))
    path.rename(directory / "all.jsonl.1")
    sink.handle(record("two"))
    path.unlink()
    sink.handle(record("three"))
    sink.close()
    assert messages(directory / "all.jsonl.1") == ["one"] and messages(path) == ["three"]


def test_reopening_a_file_is_retried(directory, monkeypatch):
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


def test_last_line_written_before_a_kill_is_not_repeated(directory):
    """A killed follower may have written a line without recording that."""
    path = directory / "all.jsonl"
    for text in ("one", "two"):
        sink = JsonFile(str(path))
        sink.handle(record(text))
        sink.close()
    sink = JsonFile(str(path))
    sink.handle(record("of another job", job="43.srv"))  # its log is first this time
    sink.handle(record("two"))
    sink.handle(record("two"))
    sink.close()
    assert messages(path) == ["one", "two", "of another job", "two"]


def test_path_that_is_not_a_regular_file_is_refused(directory):
    target = directory / "target"
    target.write_text("")
    (directory / "link").symlink_to(target)
    with pytest.raises(OSError, match="symbolic") as raised:
        JsonFile(str(directory / "link"))
    assert raised.value.errno == errno.ELOOP
    os.mkfifo(directory / "pipe")
    with pytest.raises(HostFault, match="is not a regular file"):
        JsonFile(str(directory / "pipe"))
    assert target.read_text() == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root has something to lose")
def test_directory_that_others_can_write_is_refused(directory):
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        JsonFile(str(directory / "all.jsonl"))


def test_full_disk_raises_and_leaves_no_partial_line(directory, monkeypatch):
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
