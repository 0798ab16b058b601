"""A daemon that is stopped while a guest starts is killed, and the message says why."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holding import holding
from patience import LONG
from vtorque_core.base.errors import HostFault
from vtorque_core.resources import stopped_daemons


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "fs-home.lock"
    path.touch()
    return path


@pytest.fixture
def daemon(lock: Path) -> Iterator[subprocess.Popen[bytes]]:
    with holding(lock) as process:
        yield process


def test_stopped_daemon_is_killed_and_named(lock: Path, daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGSTOP)
    with (
        pytest.raises(HostFault, match=r"stopped \(SIGSTOP\).*fs-home") as caught,
        stopped_daemons.kill_stopped([str(lock)]),
    ):
        assert daemon.wait(LONG) == -signal.SIGKILL
        raise HostFault("QEMU could not connect")
    assert str(caught.value.__cause__) == "QEMU could not connect"


def test_start_with_a_stopped_daemon_fails_even_if_qemu_has_connected(
    lock: Path, daemon: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(HostFault, match="SIGSTOP"), stopped_daemons.kill_stopped([str(lock)]):
        daemon.send_signal(signal.SIGSTOP)
        daemon.wait(LONG)


def test_daemon_that_does_not_answer_in_time_is_killed(
    lock: Path, daemon: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped_daemons, "HANDSHAKE", 0.1)
    with (
        pytest.raises(HostFault, match=r"\(fs-home\) did not answer within 0.1 s"),
        stopped_daemons.kill_stopped([str(lock)]),
    ):
        assert daemon.wait(LONG) == -signal.SIGKILL
        raise HostFault("QEMU could not connect")


def test_running_or_ended_daemon_is_not_killed(lock: Path, daemon: subprocess.Popen[bytes]) -> None:
    with stopped_daemons.kill_stopped([str(lock), str(lock.parent / "none.lock")]):
        pass
    assert daemon.poll() is None
    daemon.kill()
    daemon.wait(LONG)
    with (
        pytest.raises(HostFault, match="something else"),
        stopped_daemons.kill_stopped([str(lock)]),
    ):
        raise HostFault("something else")


def test_all_stopped_daemons_are_killed(lock: Path, daemon: subprocess.Popen[bytes]) -> None:
    other = lock.with_name("disk-data.lock")
    other.touch()
    with (
        holding(other) as second,
        pytest.raises(HostFault, match="fs-home, disk-data"),
        stopped_daemons.kill_stopped([str(lock), str(other)]),
    ):
        for process in (daemon, second):
            process.send_signal(signal.SIGSTOP)
            assert process.wait(LONG) == -signal.SIGKILL
