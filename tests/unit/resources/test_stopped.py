"""Detection of stopped processes: real ones by signal, recorded control groups by freezing."""

import signal
import subprocess

import pytest

from patience import eventually
from vtorque_core.resources.stopped_daemons import is_stopped


@pytest.fixture
def sleeping_process():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.send_signal(signal.SIGCONT)
        process.kill()


def test_process_stopped_by_a_signal_is_detected_until_resumed(sleeping_process):
    assert not is_stopped(sleeping_process.pid)
    sleeping_process.send_signal(signal.SIGSTOP)
    eventually(lambda: is_stopped(sleeping_process.pid))
    sleeping_process.send_signal(signal.SIGCONT)
    eventually(lambda: not is_stopped(sleeping_process.pid))


def test_ended_process_is_not_stopped():
    done = subprocess.Popen(["true"])
    done.wait()
    assert not is_stopped(done.pid)


@pytest.mark.parametrize(
    ("line", "file", "said", "wanted"),
    [
        ("0::/job_7/step", "job_7/step/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/job_7/step", "job_7/step/cgroup.events", "populated 1\nfrozen 0\n", False),
        ("0::/", "cgroup.procs", "", False),
        ("7:freezer:/slurm/job_7", "freezer/slurm/job_7/freezer.state", "FROZEN\n", True),
        ("7:freezer:/slurm/job_7", "freezer/slurm/job_7/freezer.state", "THAWED\n", False),
        ("4:cpu,cpuacct:/slurm/job_7", "freezer/slurm/job_7/freezer.state", "FROZEN\n", False),
    ],
)
def test_process_in_a_frozen_cgroup_is_stopped(tmp_path, line, file, said, wanted):
    """The files have the format of proc(5) and the kernel's admin guide, for cgroups v1 and v2."""
    process = tmp_path / "proc" / "12"
    process.mkdir(parents=True)
    (process / "stat").write_text("12 (a) S) S 1 12 12\n")
    (process / "cgroup").write_text(f"{line}\n")
    group = tmp_path / "groups" / file
    group.parent.mkdir(parents=True, exist_ok=True)
    group.write_text(said)
    assert is_stopped(12, tmp_path / "proc", tmp_path / "groups") is wanted


def test_process_name_that_looks_like_a_state_is_ignored(tmp_path):
    process = tmp_path / "12"
    process.mkdir()
    (process / "stat").write_text("12 (x) T 1) S 1 12 12\n")
    assert not is_stopped(12, tmp_path, tmp_path)


def test_process_name_that_is_not_utf8_is_accepted(tmp_path):
    """A process can choose its name: prctl(2), PR_SET_NAME."""
    process = tmp_path / "12"
    process.mkdir()
    (process / "stat").write_bytes(b"12 (\xff\xfe) T 1 12 12\n")
    assert is_stopped(12, tmp_path, tmp_path)
    (process / "stat").write_bytes(b"12 (\xff\xfe) S 1 12 12\n")
    (process / "cgroup").write_bytes(b"0::/\xff\n")
    assert not is_stopped(12, tmp_path, tmp_path)
