"""What a guest that was booted before its job is told, and what it says while it waits."""

import socket
import threading
import time

import pytest

from vtorque_core.api import HostFault
from vtorque_linux_guest.job import ready
from vtorque_linux_guest.job.status_port import StatusReader


def told(lines):
    """Return the steps that are seen of what the guest says, and all that it is told."""
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


def test_a_guest_is_told_the_time_once_when_its_agent_is_there():
    before = time.time()
    steps, heard = told(["STEP agent", "CLOCK 1.000000000", "STEP network"])
    assert steps == ["agent", "network"]
    asked, clock = heard
    assert asked == "STATUS"
    word, _, seconds = clock.partition(" ")
    assert word == "TIME" and len(seconds.partition(".")[2]) == 9
    assert before - 1 <= float(seconds) <= time.time()


def waits(plan, *lines):
    host, guest = socket.socketpair()
    with host, guest:
        for line in lines:
            guest.sendall(f"{line}\n".encode())
        guest.shutdown(socket.SHUT_WR)
        ready.await_seed(plan(), host, time.monotonic() + 10)


def test_one_without_a_job_waits_for_its_seed(plan):
    waits(plan, "STEP seed")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["READY 1"], "ready, without a seed"),
        (["FAILED no disk"], "no disk"),
        ([], "died"),
        (["x" * 5000], "over 4096 bytes"),
    ],
)
def test_one_that_does_not_wait_is_no_spare_guest(plan, lines, why):
    with pytest.raises(HostFault, match=why):
        waits(plan, *lines)
