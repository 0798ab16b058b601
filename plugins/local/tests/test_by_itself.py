"""The service of a personal site is started on demand, and ends without work."""

import socket
import threading

import pytest

from local_site import fresh_site
from patience import eventually
from vtorque_core.api import Paths, VtorqueError
from vtorque_local.submitter import LocalSubmitter

AGAIN = "mv aside local.sock"


@pytest.fixture
def stopped_service():
    """Return a site whose service answers after AGAIN was run in its run directory."""
    with fresh_site() as site:
        at = site.paths.run / "local.sock"
        at.rename(site.paths.run / "aside")
        yield site
        if not at.exists():
            (site.paths.run / "aside").rename(at)


def starting(site, command):
    argv = ("/bin/sh", "-c", f"cd {site.paths.run}; echo >> started; {command}")
    return LocalSubmitter(site.paths, argv)


def test_idle_service_ends_and_removes_its_socket():
    with fresh_site(idle=0.2) as site:
        assert site.ended() == 0
        assert not (site.paths.run / "local.sock").exists()
        site.config["idle"] = None
        site.start()
        assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 4\n")) == 4


def test_service_without_an_idle_limit_does_not_end():
    with fresh_site() as site:
        assert site.config.get("idle") is None
        assert site.submit("-W", "block=true", site.script("#!/bin/sh\n")) == 0
        assert site.process.exitcode is None


def test_missing_service_is_started_once(stopped_service):
    submitter = starting(stopped_service, AGAIN)
    assert list(submitter.jobs()) == []
    assert list(submitter.jobs()) == []
    assert (stopped_service.paths.run / "started").read_text() == "\n"


def test_failed_start_of_the_service_is_reported(stopped_service):
    with pytest.raises(VtorqueError, match=r"does not answer at .*: no room"):
        list(starting(stopped_service, "echo no room >&2; exit 1").jobs())
    with pytest.raises(VtorqueError, match="an admin starts it"):
        list(LocalSubmitter(Paths(run=stopped_service.root)).jobs())


def test_client_of_an_ending_service_starts_the_next_one(stopped_service):
    at = stopped_service.paths.run / "local.sock"

    def end() -> None:
        """Accept a client, and end like a service that has nothing to do."""
        connection, _ = listener.accept()
        at.unlink()
        connection.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(at))
        listener.listen()
        ending = threading.Thread(target=end)
        ending.start()
        assert list(starting(stopped_service, AGAIN).jobs()) == []
        ending.join()
    assert (stopped_service.paths.run / "started").read_text() == "\n"


def test_request_to_a_killed_service_is_not_repeated(stopped_service):
    """The job may already be in the spool, and would run twice."""
    at = stopped_service.paths.run / "local.sock"

    def die() -> None:
        connection, _ = listener.accept()
        connection.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(at))
        listener.listen()
        dying = threading.Thread(target=die)
        dying.start()
        with pytest.raises(VtorqueError, match="ended before it answered"):
            list(starting(stopped_service, AGAIN).jobs())
        dying.join()
    at.unlink()
    eventually(lambda: not (stopped_service.paths.run / "started").exists())
