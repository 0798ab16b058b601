"""The companion of a script: files left by a guest neither stop nor control it."""

import json
import os
import signal
import types

import pytest

from login_homes import a_request
from vtorque_login import companion, requests

JOB = "42.srv"


@pytest.fixture
def recording_companion(home, tmp_path, monkeypatch):
    """Return a companion that starts nothing: ``started`` has the commands."""
    made = companion.Companion(tmp_path / "none.toml", JOB, "n1", {})
    made.started = []
    monkeypatch.setattr(made, "_start", lambda argv, _environ: made.started.append(argv))
    monkeypatch.setattr(made, "_on_all_nodes", list)
    return made


def leave(number, **changed):
    name = f"{number:032x}.json"
    with requests.directory(JOB) as place:
        file = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=place)
        os.write(file, json.dumps(a_request(**changed)).encode())
        os.close(file)
    return name


def left():
    with requests.directory(JOB) as place:
        return requests.names(place, 100)


@pytest.mark.parametrize(
    "way", ["link", "parent is a link", "parent is world-writable", "relative"]
)
def test_search_path_that_others_can_change_is_replaced(tmp_path, monkeypatch, way):
    place = tmp_path / "bin"
    if way == "link":
        place.symlink_to("/usr/bin")
    elif way == "parent is a link":
        (tmp_path / "usr").symlink_to("/usr")
        place = tmp_path / "usr/bin"
    elif way == "relative":
        monkeypatch.chdir("/usr")
        place = "bin"
    else:
        tmp_path.chmod(0o777)
        place.mkdir(mode=0o755)
    found = companion.Companion(tmp_path, JOB, "n1", {"PBS_O_PATH": f"{place}:/usr/bin"})
    assert found._job_environ()["PBS_O_PATH"] == "/usr/bin"


def test_forwarded_requests_are_started_in_turn(recording_companion):
    """The order of the directory's entries must not matter."""
    asked = {leave(number, node="n2") for number in range(3 * companion.MOST)}
    for _ in range(3):
        recording_companion.poll()
    assert {argv[-2] for argv in recording_companion.started} == asked
    assert len(recording_companion.started) == len(asked)


def test_expired_forwarded_request_is_removed(recording_companion, monkeypatch):
    leave(1, node="n2")
    recording_companion.poll()
    assert left() and len(recording_companion.started) == 1
    later = types.SimpleNamespace(time=lambda: a_request()["expires"] + 60)
    monkeypatch.setattr(companion, "time", later)
    recording_companion.poll()
    assert not left()
    assert (len(recording_companion.started), recording_companion._passed_on) == (1, {})


def test_request_that_cannot_be_started_does_not_stop_the_companion(
    recording_companion, monkeypatch
):
    def start(*_):
        raise ValueError("embedded null byte")

    monkeypatch.setattr(recording_companion, "_start", start)
    leave(1)
    recording_companion.poll()


def test_remaining_processes_are_killed_at_the_end(home, monkeypatch):
    """The companion first has time to report that the script has ended."""
    done = []
    monkeypatch.setattr(companion.os, "killpg", lambda group, number: done.append((group, number)))
    monkeypatch.setattr(companion, "time", types.SimpleNamespace(sleep=done.append))
    monkeypatch.setattr(companion.signal, "signal", lambda *_: None)
    monkeypatch.setattr(companion.sys, "argv", ["", "", JOB])
    monkeypatch.setattr(companion.os, "_exit", lambda _: None)
    companion._end()
    assert done == [(0, signal.SIGTERM), 0.2, (0, signal.SIGKILL)]
