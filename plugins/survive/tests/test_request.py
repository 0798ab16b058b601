"""What a job's owner can send to root's watcher: one of two words, and nothing is waited for."""

import os
import socket
import threading

import pytest

from vtorque_core.api import HostFault
from vtorque_survive import request


@pytest.fixture
def listening(tmp_path):
    path = tmp_path / "suspend.sock"
    with request.listen(path, os.getuid()) as connection:
        yield path, connection


def serve(connection, text):
    """Answer the next word."""
    while (asked := request.taken(connection)) is None:
        pass
    request.answer(connection, asked[1], text)
    return asked[0]


@pytest.mark.parametrize("text", ["", "it has ended"])
def test_a_word_is_answered(listening, text):
    path, connection = listening
    said = []
    thread = threading.Thread(target=lambda: said.append(serve(connection, text)))
    thread.start()
    assert request.ask(path, request.SUSPEND, 30.0) == text
    thread.join()
    assert said == ["suspend"]


def test_only_the_owner_can_write_to_it(listening):
    path, _ = listening
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_uid == os.getuid()


@pytest.mark.parametrize("word", [b"", b"suspend\n", b"resume;", b"SUSPEND", b"x" * 100_000])
def test_any_other_word_is_nothing(listening, word):
    path, connection = listening
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as user:
        user.sendto(word, str(path))
    assert request.taken(connection) is None
    assert request.taken(connection) is None  # and is gone


def test_nobody_is_answered_at_a_path(listening, tmp_path):
    """A path could lead root anywhere, a file system of the user's that never answers too."""
    path, connection = listening
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as user:
        user.bind(str(tmp_path / "mine"))
        user.sendto(b"resume", str(path))
        assert request.taken(connection) == ("resume", b"")
        request.answer(connection, b"", "done")
        user.setblocking(False)
        with pytest.raises(BlockingIOError):
            user.recv(10)


def test_who_does_not_read_holds_nobody_up(listening):
    path, connection = listening
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as user:
        user.bind("")
        user.sendto(b"resume", str(path))
        _, whose = request.taken(connection)
        for _ in range(1000):
            request.answer(connection, whose, "x" * 4000)
    request.answer(connection, whose, "gone")


def test_without_a_watcher_it_is_said_what_to_do(tmp_path):
    with pytest.raises(HostFault, match="ask your administrator"):
        request.ask(tmp_path / "suspend.sock", request.RESUME, 1.0)
    path = tmp_path / "dead.sock"
    request.listen(path, os.getuid()).close()
    with pytest.raises(HostFault, match="refused: no process"):
        request.ask(path, request.RESUME, 1.0, patience=0.1)


def test_a_watcher_that_has_not_listened_yet_is_waited_for(tmp_path):
    path = tmp_path / "suspend.sock"
    said = []

    def late():
        with request.listen(path, os.getuid()) as connection:
            said.append(serve(connection, "done"))

    thread = threading.Timer(0.2, late)
    thread.start()
    assert request.ask(path, request.RESUME, 30.0, patience=30.0) == "done"
    thread.join()
