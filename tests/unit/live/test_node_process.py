"""Node-wide processes of plugins: command line, start, first steps."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import eventually
from vtorque_core.base.errors import HostFault
from vtorque_core.live import node_process
from vtorque_core.live.node_process import NodeProcess
from vtorque_core.records.reading import arguments


class SleepingProcess(NodeProcess):
    kind = "acme-watcher"
    name = "acme"
    module = "vtorque_acme.watcher"


def test_process_runs_a_module_of_the_plugin_and_is_identified_by_its_lock(paths):
    one = SleepingProcess.for_node(paths, Path("/etc/x.toml"), 0.5)
    where = (str(paths.state), str(paths.run))
    assert one.argv == (
        sys.executable,
        "-I",
        "-m",
        "vtorque_acme.watcher",
        *where,
        "/etc/x.toml",
        "0.5",
    )
    assert one.lock == f"{paths.run}/acme.lock" and one.scope == "node"
    assert arguments(one) == arguments(SleepingProcess.for_node(paths, Path("/etc/other.toml")))


@pytest.mark.parametrize("fault", [None, HostFault("/run: no space left on device")])
def test_job_on_a_node_that_cannot_start_the_process_runs_with_a_warning(paths, fault):
    acquired, told = [], []

    def acquire(resource):
        if fault:
            raise fault
        acquired.append(resource)

    site = SimpleNamespace(paths=paths, path=Path("/etc/x.toml"))
    SleepingProcess.start(
        SimpleNamespace(site=site, acquire=acquire, warn=told.append), "is not watched"
    )
    if fault:
        assert (acquired, told) == ([], [f"is not watched: {fault}"])
    else:
        assert (acquired, told) == ([SleepingProcess.for_node(paths, site.path)], [])


TELL = """
import glob, json, os, pathlib, sys, time
found = [n for n in glob.glob("/proc/self/fd/*") if os.path.exists(n)]
own = {n[14:]: os.path.realpath(n) for n in found}
told = [os.getsid(0) == os.getpid(), sorted(os.environ), own]
pathlib.Path(sys.argv[1] + ".new").write_text(json.dumps(told))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(99)
"""


@pytest.fixture
def daemon(tmp_path):
    argv = (sys.executable, "-I", "-c", TELL, str(tmp_path / "told"))
    found = SleepingProcess(argv, str(tmp_path / "lock"))
    yield found
    found.release()
    assert found.is_lost()
    found.release()
    assert not (tmp_path / "lock").exists()


def test_process_has_its_lock_session_environment_and_descriptors(daemon, tmp_path):
    inherited = os.open(tmp_path / "mine", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(inherited, True)
    try:
        daemon.create()
        assert not daemon.is_lost(), "create() returned before the process had its lock"
        with pytest.raises(HostFault, match="temporarily unavailable"):
            daemon.create()
        eventually((tmp_path / "told").exists)
        own, environ, files = json.loads((tmp_path / "told").read_text())
        assert own
        assert {"HOME", "LC_ALL", "PATH"} <= set(environ) <= {"HOME", "LC_ALL", "LC_CTYPE", "PATH"}
        assert files == {"0": daemon.lock, "1": os.devnull, "2": os.devnull}
        assert os.get_inheritable(inherited)
    finally:
        os.close(inherited)


def test_process_is_started_without_a_fork(daemon, monkeypatch):
    """A fork copies memory as this process and the child write to it: 10 ms of every start."""
    monkeypatch.delattr(os, "fork")
    daemon.create()


def test_process_whose_creator_was_killed_is_found(daemon):
    if (pid := os.fork()) == 0:
        daemon.create()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not daemon.is_lost()


def test_process_that_does_not_reach_its_first_line_is_killed(tmp_path):
    slow = SleepingProcess(("/bin/sleep", "1000"), str(tmp_path / "lock"))
    slow.create()
    slow.release()
    assert slow.is_lost()


def test_lock_holder_that_cannot_be_found_is_reported(tmp_path, monkeypatch):
    """If the lock is held in another way, no process is ended instead."""
    monkeypatch.setattr(node_process, "RELEASE_TIME", 0.0)
    one = SleepingProcess(("/bin/sleep", "1000"), str(tmp_path / "lock"))
    other = os.open(one.lock, os.O_CREAT | os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(HostFault, match="held by a process that cannot be found"):
        one.release()
    os.close(other)
    one.release()


def test_program_that_cannot_be_executed_is_named(tmp_path):
    none = SleepingProcess(("/nonexistent/daemon",), str(tmp_path / "lock"))
    with pytest.raises(HostFault, match=r"/nonexistent/daemon: .*No such file"):
        none.create()
    assert none.is_lost()


def test_log_is_readable_by_root_only(tmp_path):
    program = (
        "import logging; from vtorque_core.live.node_process import initialize;"
        "print(*initialize('acme')); logging.getLogger('acme').info('watching')"
    )
    argv = [sys.executable, "-I", "-c", program, tmp_path, tmp_path / "run", "a", "b"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=180)
    assert f"'{tmp_path}/run'" in done.stdout and done.stdout.endswith("['a', 'b']\n")
    log = tmp_path / "acme.log"
    assert log.read_text().endswith(" watching\n")
    assert log.stat().st_mode & 0o077 == 0
