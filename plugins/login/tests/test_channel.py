"""The connection: authentication of both sides, and integrity of frames."""

import os
import socket
import threading
import time
import types

import pytest

from vtorque_login import channel

KEY, OTHER = b"k" * 32, b"o" * 32


def soon():
    return time.monotonic() + 20


@pytest.fixture
def pair():
    """Return a function that makes two connected sockets."""
    made = []

    def pair():
        made.extend(socket.socketpair())
        for end in made:
            end.settimeout(20)
        return made[-2:]

    yield pair
    for end in made:
        end.close()


@pytest.fixture
def meeting(pair):
    """Return a function that runs both sides over a real connection; it returns both results."""

    def meeting(waiting, job):
        found = {}

        def run(name, work, connection):
            try:
                found[name] = work(connection)
            except (OSError, channel.ChannelBroken) as error:
                found[name] = error
                connection.shutdown(socket.SHUT_RDWR)

        both = pair()
        sides = zip(("waiting", "job"), (waiting, job), both, strict=True)
        threads = [threading.Thread(target=run, args=side) for side in sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found["waiting"], found["job"]

    return meeting


@pytest.fixture
def streams(meeting):
    """Return both sides' streams."""
    return meeting(
        lambda c: channel.greet(c, KEY, soon()), lambda c: channel.answer(c, KEY, soon())
    )


class Tapped:
    """A connection that records the sent data."""

    def __init__(self):
        self.raw = bytearray()

    def sendall(self, data):
        self.raw += data


def test_frames_pass_both_ways(streams):
    waiting, job = streams
    for number in range(3):
        job.send(channel.OUT, b"%d" % number * 70)
        waiting.send(channel.IN, b"")
        assert waiting.receive() == (channel.OUT, b"%d" % number * 70)
        assert job.receive() == (channel.IN, b"")


def test_job_sends_nothing_to_a_service_without_the_key(meeting):
    """A forged request may name any host and port; no service there receives a byte."""
    heard = []

    def service(connection):
        connection.sendall(os.urandom(64))
        heard.append(connection.recv(1))

    _, job = meeting(service, lambda c: channel.answer(c, KEY, soon()))
    assert isinstance(job, channel.ChannelBroken)
    assert heard == [b""]


@pytest.mark.parametrize("keys", [(KEY, OTHER), (OTHER, KEY)])
def test_both_sides_must_have_the_key(meeting, keys):
    waiting, job = meeting(
        lambda c: channel.greet(c, keys[0], soon()), lambda c: channel.answer(c, keys[1], soon())
    )
    assert isinstance(waiting, (channel.ChannelBroken, OSError))
    assert isinstance(job, channel.ChannelBroken)


def test_replayed_greeting_is_rejected(meeting):
    """An overheard greeting is no proof: it does not contain the job's own random bytes."""
    said = []

    def overheard(connection):
        said.append(channel.read_exactly(connection, 64))
        connection.sendall(bytes(64))

    meeting(lambda c: channel.greet(c, KEY, soon()), overheard)

    def again(connection):
        connection.sendall(said[0])
        channel.read_exactly(connection, 64)
        connection.sendall(bytes(32))

    _, job = meeting(again, lambda c: channel.answer(c, KEY, soon()))
    assert "another connection" in str(job)


def test_reflected_answer_is_rejected(meeting):
    """Sending the waiting side's own words back to it proves nothing."""

    def mirror(connection):
        connection.sendall(connection.recv(64))
        return connection.recv(1)

    waiting, _ = meeting(lambda c: channel.greet(c, KEY, soon()), mirror)
    assert "failed authentication: wrong key" in str(waiting)


@pytest.mark.parametrize("at", [0, 4, 5, 10, -1])
def test_changed_frame_is_an_error(streams, pair, at):
    tapped, (_, job) = Tapped(), streams
    channel.Stream(tapped, job._receives, job._sends).send(channel.IN, b"rm -rf x")
    tapped.raw[at] ^= 1
    ours, theirs = pair()
    ours.sendall(tapped.raw)
    ours.close()
    with pytest.raises(channel.ChannelBroken):
        channel.Stream(theirs, job._sends, job._receives).receive()


def test_replayed_frame_is_an_error(streams, pair):
    tapped, (_, job) = Tapped(), streams
    channel.Stream(tapped, job._receives, job._sends).send(channel.IN, b"x")
    ours, theirs = pair()
    ours.sendall(bytes(tapped.raw) * 2)
    stream = channel.Stream(theirs, job._sends, job._receives)
    assert stream.receive() == (channel.IN, b"x")
    with pytest.raises(channel.ChannelBroken, match="modified"):
        stream.receive()


def test_frame_above_the_limit_is_not_read(pair):
    ours, theirs = pair()
    ours.sendall(b"\2\xff\xff\xff\xff")
    with pytest.raises(channel.ChannelBroken, match="bytes, and the limit is 65536"):
        channel.Stream(theirs, KEY, KEY).receive()


@pytest.mark.parametrize("side", [channel.greet, channel.answer])
def test_slow_sender_has_one_deadline_for_the_handshake(monkeypatch, side):
    """A timeout of the socket would restart with each byte."""
    clock, timeouts = [100.0], []
    monkeypatch.setattr(channel, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))

    class Slow:
        settimeout = timeouts.append

        def sendall(self, data):
            pass

        def recv(self, count):
            clock[0] += 0.75
            return b"x"

    with pytest.raises(TimeoutError):
        side(Slow(), KEY, 102.0)
    assert timeouts == [2.0, 1.25, 0.5]
