"""Requests in the owner's home: valid requests, and their permissions."""

import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from login_homes import a_request
from vtorque_core.api import Refused
from vtorque_login import requests

JOB = "42.srv"


def data(**changed):
    return json.dumps(a_request(**changed)).encode()


def test_request_written_by_a_command_is_read_by_its_job(home):
    request = requests.parse_request(data(words=["ssh", "--", JOB, "0", "--", "ls", "-l"]), JOB)
    with requests.directory(JOB) as place:
        name = requests.write_request(place, request)
        assert requests.names(place, 9) == [name]
        assert requests.parse_request(requests.read(place, name), JOB) == request
        assert requests.withdraw(place, name)
        assert not requests.withdraw(place, name), "a request was withdrawn twice"
    top = home / ".vtorque/requests"
    assert [oct(path.stat().st_mode & 0o777) for path in (top.parent, top)] == ["0o700"] * 2
    requests.remove(JOB)
    assert list(top.iterdir()) == []


def test_request_is_unreadable_for_other_users(home):
    with requests.directory(JOB) as place:
        name = requests.write_request(place, requests.parse_request(data(), JOB))
        status = os.stat(name, dir_fd=place)
        assert (status.st_mode & 0o777, os.fstat(place).st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize(
    "words",
    [
        ["logs", "--config=/tmp/evil.toml", "--", JOB],
        ["logs", "--config", "--", JOB],
        ["--config=/tmp/evil.toml", "--", JOB],
        ["report", "--html=/home/u/.bashrc", "--", JOB],
        ["logs", "-f", "--", JOB],
        ["logs", "word", "--", JOB],
        ["logs", "--level=a b", "--", JOB],
        ["logs", "--level=$(id)", "--", JOB],
        ["images", "build"],
        ["../../bin/sh", "--", JOB],
        ["logs", "--", "43.srv"],
        ["logs", "--"],
        ["ssh", "--", JOB, "0", "a\0b"],
        ["ssh", "--", JOB, 0],
        ["ssh", "--", JOB, *["x"] * 1000],
        [],
        "logs",
        None,
    ],
)
def test_request_for_another_command_or_option_is_refused(words):
    with pytest.raises(Refused, match="invalid request"):
        requests.parse_request(data(words=words), JOB)


@pytest.mark.parametrize(
    "changed",
    [
        {"port": 22},
        {"port": 1 << 16},
        {"port": True},
        {"key": "00" * 31},
        {"key": "x" * 64},
        {"key": None},
        {"expires": 1.0},
        {"term": "xterm;id"},
        {"rows": -1},
        {"columns": 1 << 16},
        {"rows": "24"},
        {"node": 1},
        {"node": "n1\0"},
        {"node": "\ud800"},
        {"node": "n" * 256},
        {"expires": float("nan")},
        {"expires": float("inf")},
        {"expires": time.time() + 2 * 86400},
        {"more": 1},
        {"host": None},
    ],
)
def test_malformed_request_is_refused(changed):
    with pytest.raises(Refused, match="invalid request"):
        requests.parse_request(data(**changed), JOB)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(content):
    with pytest.raises(Refused):
        requests.parse_request(content, JOB)


@pytest.mark.parametrize(
    ("address", "other"),
    [
        *((each, True) for each in ("10.1.2.3", "fd00::5")),
        *((each, False) for each in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")),
        *((each, False) for each in ("0.0.0.0", "::", "169.254.169.254", "fe80::1")),  # noqa: S104
        *((each, False) for each in ("224.0.0.1", "255.255.255.255", "head", "10.1.2.3 ", "")),
    ],
)
def test_only_addresses_of_other_hosts_are_connected_to(address, other):
    assert requests.is_other_host(address) is other


@pytest.mark.parametrize("at", [".vtorque", ".vtorque/requests", ".vtorque/requests/42.srv.0"])
def test_link_in_the_path_is_not_followed(home, tmp_path, at):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (home / at).parent.mkdir(parents=True, exist_ok=True)
    (home / at).symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"irectory|link"), requests.directory(JOB):
        pass
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "large"])
def test_request_that_is_not_a_small_regular_file_is_refused(home, kind):
    name = "0" * 32 + ".json"
    with requests.directory(JOB) as place:
        path = home / f".vtorque/requests/42.srv.0/{name}"
        if kind == "link":
            (home / "real").write_bytes(data())
            path.symlink_to(home / "real")
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.write_bytes(b" " * (requests.MAX_BYTES + 1))
        with pytest.raises((OSError, Refused)):  # at once: the FIFO has no writer
            requests.read(place, name)
