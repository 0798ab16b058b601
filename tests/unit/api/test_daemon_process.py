"""Daemons of a job: found by the lock that they hold, never by a remembered pid."""

import os
import signal
from pathlib import Path

import pytest

from journalled import through_the_journal
from patience import eventually
from processes import alive
from vtorque_core.api.daemon_process import DaemonProcess
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import lock_holder


def holder(lock: Path) -> int | None:
    descriptor = os.open(lock, os.O_RDWR)
    try:
        return lock_holder(descriptor)
    finally:
        os.close(descriptor)


def test_process_is_found_by_its_lock_and_stopped(tmp_path):
    log = tmp_path / "log"
    script = "echo started; echo $PATH; exec sleep 1000"
    process = DaemonProcess(("sh", "-c", script), str(tmp_path / "lock"), log=str(log))
    process.create()
    pid = holder(tmp_path / "lock")
    assert pid is not None and alive(pid)
    assert os.getsid(pid) == pid
    assert "NoNewPrivs:\t1\n" in Path(f"/proc/{pid}/status").read_text()
    with pytest.raises(HostFault, match="sh: "):
        process.create()  # the lock is taken
    eventually(lambda: log.read_text().count("\n") == 2)
    assert log.read_text() == "started\n/usr/sbin:/usr/bin:/sbin:/bin\n"
    again = through_the_journal(process, tmp_path)
    again.release()
    assert not alive(pid)
    assert not (tmp_path / "lock").exists()
    again.release()


def test_process_that_ignores_term_is_killed(tmp_path):
    script = f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    process = DaemonProcess(("sh", "-c", script), str(tmp_path / "lock"), grace=0.2)
    process.create()
    eventually((tmp_path / "ready").exists)
    pid = holder(tmp_path / "lock")
    process.release()
    assert pid is not None and not alive(pid)


def test_missing_program_is_named_in_the_error(tmp_path):
    process = DaemonProcess(("/nonexistent/daemon",), str(tmp_path / "lock"))
    with pytest.raises(HostFault, match=r"/nonexistent/daemon: .*No such file"):
        process.create()
    process.release()
    assert not (tmp_path / "lock").exists()


def test_release_without_a_lock_holder_kills_no_process(tmp_path):
    """The lock file names no pid that could go stale: without a holder nothing is killed."""
    (tmp_path / "lock").write_text(f"{os.getpid()}\n")
    DaemonProcess(("sleep", "9"), str(tmp_path / "lock")).release()
    assert not (tmp_path / "lock").exists()


def test_process_of_a_killed_creator_is_still_found(tmp_path):
    lock = tmp_path / "lock"
    pid = os.fork()
    if pid == 0:
        DaemonProcess(("sleep", "1000"), str(lock)).create()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    daemon = holder(lock)
    assert daemon is not None and alive(daemon)
    DaemonProcess(("sleep", "1000"), str(lock)).release()
    assert not alive(daemon)
