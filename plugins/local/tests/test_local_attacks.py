"""Attacks of one user on the embedded batch system do not delay others: real FUSE, real floods."""

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

from local_attacks import (
    ENVIRON,
    attacker,
    children,
    connect,
    fill,
    flood,
    held_prologues,
    roots,
    socket_of,
    unclosable_descriptors,
    unfolding_messages,
    unopenable_output,
    unreadable_process,
)
from local_site import HOST, fresh_site
from patience import LONG, eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, mounts"),
]
MAX_MEMORY = 128 << 10  # KiB, of all processes of root except this one
MAX_THREADS = 50


@pytest.fixture
def site():
    with fresh_site() as site:
        site.root.chmod(0o755)
        yield site


def status(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1])


def assert_unharmed(site) -> None:
    """Check that another user's job runs to its end, and that root's processes have not grown."""
    assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 3\n")) == 3
    # the process that ended a job may still run
    forked = status(os.getpid(), "VmRSS")  # inherited by the service: the imports of other tests
    eventually(lambda: total(site, "VmHWM") < MAX_MEMORY + forked)
    eventually(lambda: total(site, "Threads") < MAX_THREADS)


def total(site, key: str) -> int:
    """Return the sum over root's processes; a process that has just ended has no such line."""
    found = 0
    for pid in roots(site):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            found += status(pid, key)
    return found


def test_descriptors_that_cannot_be_closed_do_not_block_others(site):
    """The descriptors are FUSE files whose FLUSH is never answered, so close(2) hangs."""
    with unclosable_descriptors(site) as is_active:
        assert_unharmed(site)
        theirs = children(roots(site)[1])
        assert len(theirs) <= 105, (
            "more processes than connections of a user, plus those that close descriptors"
        )
        assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 4\n")) == 4
        assert is_active()


def test_process_blocked_by_a_file_system_does_not_block_others(site):
    """A page fault holds the memory map's lock, so reading /proc/PID/environ hangs."""
    with unreadable_process(site) as is_active:
        assert_unharmed(site)
        assert is_active()


def test_job_with_hanging_output_does_not_keep_its_slot():
    """SIGKILL does not end the process that opens the output."""
    with fresh_site(slots=1) as site:
        site.root.chmod(0o755)
        with unopenable_output(site) as is_active:
            assert_unharmed(site)
            assert is_active()


def test_messages_that_need_much_memory_do_not_block_others(site):
    """8 MiB that take 250 MB of memory each, charged to the sender."""
    with unfolding_messages(site):
        assert_unharmed(site)


FORGED = """
import os, struct, sys, time
from vtorque_local import acceptor, client

RECORDS = eval(sys.argv.pop(1))

def serve(connection, service, reading, limits):
    connection.recv(1)
    for record in RECORDS:
        try:
            length = b"" if record[:1] == b"!" else struct.pack("!I", len(record))
            os.write(service.ask, length + record)
        except OSError:
            break
        time.sleep(0.02)
    connection.sendall(os.read(service.hear, 4096))
    time.sleep(0.5)

client.serve = serve
acceptor.main()
"""
SUBMIT_I = b"submit\0x\x000\x000\x001\0\0"
RECORDS = [
    [b"ended"],
    [b"ended\x001", b"ended\x001"],
    [SUBMIT_I, b"ended"],
    [SUBMIT_I, b"ended\0-" + b"9" * 4300],
    [SUBMIT_I, b"ended\x001", b"ended\x001", b"ended\x001"],
    [SUBMIT_I, SUBMIT_I],
    [b"submit\0x\x000\x000\x000\0\0" + b"\0" * 70],
    [b"submit\0../x\x0099999999999\x000\x000\0\0"],
    [b"list"] * 50,
    [b"list", b"stop", b"cancel\x001"],
    [b"!" * 9000],
    [b"\xff\xfe", b""],
]


@pytest.mark.parametrize("records", RECORDS, ids=range(len(RECORDS)))
def test_forged_records_do_not_end_the_service(records):
    """The records that a hostile acceptor process could send to the service."""
    forging = [sys.executable, "-I", "-c", FORGED, repr(records)]
    with fresh_site(acceptor=forging) as site:
        path = socket_of(site)
        for _ in range(3):
            with connect(path) as client:
                client.settimeout(LONG)
                client.sendall(b"x")
                client.recv(4096)  # an answer, or nothing: it may have been ended with its job
        assert site.process.is_alive()
        assert site.stop() == 0, (site.root / "log").read_text()
        assert "Traceback" not in (site.root / "log").read_text()


def test_environments_do_not_fill_the_disk_of_root(site):
    answers = site.root / "answers"
    answers.touch()
    answers.chmod(0o666)
    with held_prologues(site):  # all stay queued
        with attacker(fill, socket_of(site), ENVIRON, 12, str(answers)):
            pass
        told = json.loads(answers.read_text())
        taken = [answer for answer in told if "id" in answer]
        assert len(taken) == (64 << 20) // ENVIRON
        assert "(limit: 67108864)" in told[-1]["error"]
        used = sum(p.stat().st_size for p in (site.spool / "jobs").rglob("*") if p.is_file())
        assert used < 70 << 20
    assert_unharmed(site)


def test_many_jobs_of_one_user_alternate_with_others(site):
    """The user who was served longest ago is next, so a job waits for at most one other job."""
    with held_prologues(site):
        with attacker(flood, socket_of(site), 40):
            pass
        site.submit(site.script("#!/bin/sh\n"))
    assert site.done("41") == 0
    begun = [p.name.split(".")[1] for p in site.root.glob(f"prologue.*.{HOST}")]
    assert len(begun) < 10, "the other user's job waited for all jobs"
    eventually(lambda: not list((site.spool / "jobs").iterdir()))
