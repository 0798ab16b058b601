"""The service of a user's own site: started where none answers, ended where there is no work."""

import socket
import threading

import pytest

from local_site import fresh_site
from patience import eventually
from vtorque_core.api import Paths, VtorqueError
from vtorque_local.submitter import LocalSubmitter

AGAIN = "mv aside local.sock"


@pytest.fixture
def away():
    """Return a site whose service answers when somebody has done AGAIN in its run directory."""
    with fresh_site() as site:
        at = site.paths.run / "local.sock"
        at.rename(site.paths.run / "aside")
        yield site
        if not at.exists():
            (site.paths.run / "aside").rename(at)


def starting(site, command):
    argv = ("/bin/sh", "-c", f"cd {site.paths.run}; echo >> started; {command}")
    return LocalSubmitter(site.paths, argv)


def test_a_service_without_work_ends_and_takes_its_socket_away():
    with fresh_site(idle=0.2) as site:
        assert site.ended() == 0
        assert not (site.paths.run / "local.sock").exists()
        site.config["idle"] = None
        site.start()
        assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 4\n")) == 4


def test_a_service_that_waits_for_ever_does_not_end():
    with fresh_site() as site:
        assert site.config.get("idle") is None
        assert site.submit("-W", "block=true", site.script("#!/bin/sh\n")) == 0
        assert site.process.exitcode is None


def test_a_service_that_does_not_answer_is_started_once(away):
    submitter = starting(away, AGAIN)
    assert list(submitter.jobs()) == []
    assert list(submitter.jobs()) == []
    assert (away.paths.run / "started").read_text() == "\n"


def test_why_it_does_not_start_is_told(away):
    with pytest.raises(VtorqueError, match=r"does not answer at .*: no room"):
        list(starting(away, "echo no room >&2; exit 1").jobs())
    with pytest.raises(VtorqueError, match="an admin starts it"):
        list(LocalSubmitter(Paths(run=away.root)).jobs())


def test_who_comes_as_the_service_ends_gets_the_next_one(away):
    at = away.paths.run / "local.sock"

    def end() -> None:
        """Accept a client, and end as a service does that had nothing more to do."""
        connection, _ = listener.accept()
        at.unlink()
        connection.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(at))
        listener.listen()
        ending = threading.Thread(target=end)
        ending.start()
        assert list(starting(away, AGAIN).jobs()) == []
        ending.join()
    assert (away.paths.run / "started").read_text() == "\n"


def test_a_service_that_was_killed_is_not_asked_again(away):
    """Its job may be in the spool: it would run twice."""
    at = away.paths.run / "local.sock"

    def die() -> None:
        connection, _ = listener.accept()
        connection.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(at))
        listener.listen()
        dying = threading.Thread(target=die)
        dying.start()
        with pytest.raises(VtorqueError, match="has ended meanwhile"):
            list(starting(away, AGAIN).jobs())
        dying.join()
    at.unlink()
    eventually(lambda: not (away.paths.run / "started").exists())
