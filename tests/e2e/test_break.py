"""A job continues over a new connection to its guest if root expects the loss of the old one."""

import ctypes
import os
import socket
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

PIDFD_GETFD = 438  # pidfd_getfd(2)
COUNTS = """#!/bin/sh
i=0
while [ $i -lt {} ]; do i=$((i + 1)); echo $i; sleep 0.1; done
exit 7
"""
EXPECT = (
    "import sys, time; from pathlib import Path;"
    "from vtorque_linux_guest.job.driver import LinuxDriver;"
    "LinuxDriver().allow_disconnect(Path(sys.argv[1]), 120, time.monotonic() + 60)"
)


def break_connection(node, job):
    """Shut the job shell's connection to its guest down, at both ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    pid = node.job_shell(job)
    pidfd = os.pidfd_open(pid)
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if not str(fd.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=libc.syscall(PIDFD_GETFD, pidfd, int(fd.name), 0)) as own:
                if str(own.getpeername()).endswith("run.sock"):
                    own.shutdown(socket.SHUT_RDWR)
                    return
    finally:
        os.close(pidfd)
    raise AssertionError("it has no connection")


def printed(node):
    out = node.home / "out"
    return out.read_text().split() if out.exists() else []


def counting(node, to):
    (node.home / "out").unlink(missing_ok=True)  # of the previous test
    job = node.submit(COUNTS.format(to), "-vm", "ram=256M")
    node.wait_for(lambda: printed(node), what="the job's first line")
    return job


@pytest.mark.full
def test_job_continues_after_an_expected_connection_loss(guest):
    job = counting(guest, 60)
    (run_dir,) = (guest.run_dir / "jobs").glob(f"{job}.*/g0")
    guest.root(str(guest.prefix / "bin" / "python3"), "-c", EXPECT, str(run_dir))
    for _ in range(3):
        before = len(printed(guest))
        break_connection(guest, job)
        guest.wait_for(lambda b=before: len(printed(guest)) > b, what="more output")
    guest.wait_for(lambda: guest.state_of(job) is None, what="the job's end")
    assert printed(guest) == [str(number) for number in range(1, 61)]


@pytest.mark.full
def test_unexpected_connection_loss_ends_the_job(guest):
    job = counting(guest, 600)
    break_connection(guest, job)
    guest.wait_for(lambda: guest.state_of(job) is None, what="the job's end")
    assert len(printed(guest)) < 600
