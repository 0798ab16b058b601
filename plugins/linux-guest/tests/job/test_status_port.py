"""The status port of a guest booted before its job: requests and answers."""

import socket
import threading
import time

import pytest

from vtorque_core.api import HostFault
from vtorque_linux_guest.job import readiness
from vtorque_linux_guest.job.frames import StreamError
from vtorque_linux_guest.job.status_port import StatusReader


def steps_and_answers(lines):
    """Return the steps that are read from the guest's words, and all words that it is sent."""
    host, guest = socket.socketpair()
    with host, guest:
        heard = []

        def agent():
            for line in lines:
                guest.sendall(f"{line}\n".encode())
            guest.sendall(b"READY 1\n")
            while data := guest.recv(4096):
                heard.append(data)

        thread = threading.Thread(target=agent)
        thread.start()
        steps = list(StatusReader(host).steps(time.monotonic() + 10))
        host.shutdown(socket.SHUT_WR)
        thread.join()
    return steps, b"".join(heard).decode().splitlines()


def test_guest_gets_the_time_once_when_its_agent_answers():
    before = time.time()
    steps, heard = steps_and_answers(["STEP agent", "CLOCK 1.000000000", "STEP network"])
    assert steps == ["agent", "network"]
    asked, clock = heard
    assert asked == "STATUS"
    word, _, seconds = clock.partition(" ")
    assert word == "TIME" and len(seconds.partition(".")[2]) == 9
    assert before - 1 <= float(seconds) <= time.time()


def holds(seconds, *lines):
    host, guest = socket.socketpair()
    with host, guest:
        guest.sendall("".join(f"{line}\n" for line in lines).encode())
        StatusReader(host).hold(seconds, time.monotonic() + 10)
        return guest.recv(4096).decode().splitlines()


@pytest.mark.parametrize("said", [(), ("HELD 60",)])
def test_older_agent_is_detected(said):
    """An older agent does not know HOLD, or does not forward HOLD to its job shell."""
    with pytest.raises(StreamError, match="the agent of the guest's image is too"):
        holds(60, "STEP network", *said, "READY 1", "LOGGED")
    assert holds(0, *said, "LOGGED") == ["HOLD 0", "LOG /"]


def test_hold_is_confirmed_or_refused():
    assert holds(60, "READY 1", "HELD 60 tells", "LOGGED") == ["HOLD 60", "LOG /"]
    with pytest.raises(StreamError, match="no job shell"):
        holds(60, "HELD 0", "LOGGED")


def waits(plan, *lines):
    host, guest = socket.socketpair()
    with host, guest:
        for line in lines:
            guest.sendall(f"{line}\n".encode())
        guest.shutdown(socket.SHUT_WR)
        readiness.await_seed(plan(), host, time.monotonic() + 10)


def test_spare_guest_waits_for_its_seed(plan):
    waits(plan, "STEP seed")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["READY 1"], "ready, without a seed"),
        (["FAILED no disk"], "no disk"),
        ([], "died"),
        (["x" * 5000], "more than 4096 bytes"),
    ],
)
def test_guest_that_does_not_wait_for_a_seed_is_a_host_fault(plan, lines, why):
    with pytest.raises(HostFault, match=why):
        waits(plan, *lines)
