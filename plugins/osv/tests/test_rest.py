"""The REST client against a double with the observed behavior of real OSv."""

import http.client
import socket
import time

import pytest
from vtorque_osv.order import GuestProperties
from vtorque_osv.rest import Rest, RestError
from vtorque_osv.restjob import RestJob
from vtorque_osv.script import ProgramCall

from rest_double import Osv

pytestmark = pytest.mark.e2e


@pytest.fixture
def osv():
    with Osv() as server:
        yield server


def rest(osv, **kwargs):
    return Rest("127.0.0.1", osv.server_port, **kwargs)


def test_version_is_returned_when_the_server_answers(osv):
    assert rest(osv).wait(time.monotonic() + 30) == "v0.57.0-398-g0e34e4dc"


def test_variables_with_special_characters_are_set(osv):
    rest(osv).set_variable("A", "b c&d=e%#/\u00e9")
    rest(osv).set_variable("EMPTY", "")
    assert osv.environ == {"A": "b c&d=e%#/\u00e9", "EMPTY": ""}


def test_file_is_uploaded_unchanged(osv):
    content = bytes(range(256)) * 5 + b"\r\n--x--\r\n"
    rest(osv).upload("/tmp/dir/a b", content)
    assert osv.files == {"/tmp/dir/a b": content}


def test_raw_body_uploads_nothing(osv):
    """Therefore a form is used."""
    connection = http.client.HTTPConnection("127.0.0.1", osv.server_port)
    connection.request("POST", "/file//tmp/x", body=b"hi")
    assert connection.getresponse().status == 200
    connection.close()
    assert osv.files == {}


def test_hanging_server_times_out(osv):
    with pytest.raises(TimeoutError):
        rest(osv, timeout=0.2).upload("/etc/x", b"")


def test_programs_are_started_and_their_end_is_reported(osv):
    client = rest(osv)
    (tid,) = client.start("/hello 'a b' \"c\" d%41")
    assert osv.ran == ["/hello 'a b' \"c\" d%41"]
    assert [client.is_finished(tid) for _ in range(3)] == [False, False, True]
    assert client.start("/hello & /other") == ["28", "29"]
    assert client.is_finished("999")


@pytest.mark.parametrize(
    ("command", "why"), [("/no/such", "500 .*Failed to load"), ("/hello; /other", "400 ")]
)
def test_refused_command_raises_rest_error(osv, command, why):
    with pytest.raises(RestError, match=why):
        rest(osv).start(command)


def test_power_off_gets_no_answer(osv):
    rest(osv).power_off()
    assert osv.off.wait(30)


def test_missing_server_raises_rest_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RestError, match=f"no answer from 127.0.0.1:{port}"):
        Rest("127.0.0.1", port).wait(time.monotonic() + 0.3)


def run(osv, commands, environ=(), files=(), seconds=30.0):
    properties = GuestProperties(
        mode="rest", address="127.0.0.1", begin="", files=dict(files), seconds=seconds
    )
    job = RestJob(properties, dict(environ), commands, osv.server_port)
    job.start()
    osv.off.wait(30)
    return job.stop()


def test_whole_job_runs(osv):
    commands = (ProgramCall(1, ("/hello", "a b")), ProgramCall(2, ("/other",)))
    said = run(osv, commands, {"A": "1"}, {"/tmp/nodes": "n1\n"})
    assert said == ""
    assert osv.ran == ['/hello "a b"', "/other"]
    assert (osv.environ, osv.files) == ({"A": "1"}, {"/tmp/nodes": b"n1\n"})
    assert osv.off.is_set()


def test_background_command_is_awaited_at_the_end(osv):
    osv.asks = 5
    assert run(osv, (ProgramCall(1, ("/hello",), "&"), ProgramCall(1, ("/other",)))) == ""
    assert osv.left == {"27": -1, "28": -1}


def test_detached_command_is_not_awaited(osv):
    assert run(osv, (ProgramCall(1, ("/hello",), "&!"),)) == ""
    assert osv.left == {"27": 2}


def test_missing_program_is_reported_and_the_guest_ends(osv):
    said = run(osv, (ProgramCall(1, ("/no",)), ProgramCall(2, ("/hello",))))
    assert "500" in said
    assert osv.ran == []
    assert osv.off.is_set()


def test_guest_that_powers_off_is_not_a_server_failure():
    properties = GuestProperties(mode="rest", address="127.0.0.1", begin="", seconds=30.0)
    job = RestJob(properties, {}, (), 1)
    job.start()
    assert job.stop() == ""
