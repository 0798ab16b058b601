"""The real agent sends the end of a log: after a failure, and while the setup hangs."""

import os
import random
import time
from pathlib import Path

import pytest

from local_agent import HostedAgent, run, sh
from patience import LONG, eventually
from vtorque_linux_guest.job.frames import GuestFailed, GuestSilent
from vtorque_linux_guest.job.status_port import LOG_MAX, StatusReader

EVERY_BYTE = random.Random(6).randbytes(200_000)  # noqa: S311 - what a log may hold


def read_log(reader: StatusReader, path: Path) -> bytes:
    return b"".join(reader.log(str(path), time.monotonic() + LONG))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 3000, 3001, LOG_MAX, LOG_MAX + 1, 200_000])
def test_end_of_a_file_is_sent_unchanged(binary: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "log").write_bytes(EVERY_BYTE[:size])
    with HostedAgent(binary) as agent, agent.status() as status:
        reader = StatusReader(status)
        list(reader.steps(time.monotonic() + LONG))
        for _ in range(2):
            assert read_log(reader, tmp_path / "log") == EVERY_BYTE[:size][-LOG_MAX:]


def test_log_is_sent_after_a_failed_setup(binary: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with HostedAgent(binary, f"echo said >{log}; exit 1") as agent, agent.status() as status:
        reader = StatusReader(status)
        with pytest.raises(GuestFailed):
            list(reader.steps(time.monotonic() + LONG))
        assert read_log(reader, log) == b"said\n"


def test_log_is_sent_while_the_setup_hangs(binary: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"echo 'STEP packages' >&3; echo waits >{log}; exec sleep 1000"
    with HostedAgent(binary, script) as agent, agent.status() as status:
        reader = StatusReader(status)
        eventually(lambda: log.exists() and log.stat().st_size)
        with pytest.raises(GuestSilent):
            list(reader.steps(time.monotonic() + 0.5))
        assert read_log(reader, log) == b"waits\n"


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "device", "relative", "long"])
def test_missing_or_special_file_is_sent_as_empty(binary: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "relative":
        path = Path("x")
    elif kind == "long":
        path = Path("/" + "x" * 5000)
    with HostedAgent(binary) as agent, agent.status() as status:
        assert read_log(StatusReader(status), path) == b""


def test_host_that_does_not_read_delays_no_job(binary: Path, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(EVERY_BYTE)
    with HostedAgent(binary) as agent:
        status = agent.status()
        list(StatusReader(status).steps(time.monotonic() + LONG))
        for _ in range(200):
            status.send(f"LOG {tmp_path}/log\n".encode())
        assert run(agent.session(), sh("echo ran"))[1] == b"ran\n"


def test_new_connection_gets_no_data_requested_by_the_last_one(
    binary: Path, tmp_path: Path
) -> None:
    (tmp_path / "log").write_bytes(EVERY_BYTE)
    with HostedAgent(binary) as agent:
        with agent.status() as status:
            status.sendall(f"LOG {tmp_path}/log\n".encode())
            assert status.recv(100)
        with agent.status() as status:
            reader = StatusReader(status)
            list(reader.steps(time.monotonic() + LONG))
            assert read_log(reader, tmp_path / "missing") == b""
