"""The real agent before any job: configuration, setup script, status port; and its build."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from local_agent import HostedAgent, run, sh
from vtorque_core.api import HostFault
from vtorque_linux_guest.agent.build import build_agent
from vtorque_linux_guest.job.frames import AgentError, GuestFailed
from vtorque_linux_guest.job.status_port import StatusReader

PYTHON = "/usr/bin/python3" if os.getuid() == 0 else sys.executable
DEVNULL = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def test_agent_syncs_on_request_and_before_a_job_exits(binary: Path) -> None:
    with HostedAgent(binary, sync=True) as agent, agent.status() as status:
        reader = StatusReader(status)
        list(reader.steps(time.monotonic() + 20))
        reader.sync(time.monotonic() + 60)
        assert run(agent.session(), sh("exit 6"))[0].code == 6


def test_setup_steps_and_ready(binary: Path) -> None:
    setup = "echo 'STEP mount /home' >&3; echo noise; echo 'STEP network' >&3; sleep 0.2"
    steps: list[str] = []
    with HostedAgent(binary, setup) as agent, agent.status() as status:
        steps += StatusReader(status).steps(time.monotonic() + 20)
        assert steps[-1] == "network"
        assert run(agent.session(), sh("echo x"))[1] == b"x\n"


@pytest.mark.parametrize("abstract", [False, True])
def test_agent_notifies_systemd_when_the_guest_is_ready(
    binary: Path, tmp_path: Path, abstract: bool
) -> None:
    name = f"@vtorque-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name.replace("@", "\0"))
        listener.settimeout(180)
        waiting = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"
        with HostedAgent(binary, waiting, notify=name) as agent:
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.recv(100)
            (tmp_path / "go").touch()
            agent.ready()
            listener.settimeout(180)
            assert listener.recv(100) == b"READY=1"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo 'STEP mount /home' >&3; echo 'mount: permission denied' >&2; exit 32",
            "mount /home: mount: permission denied",
        ),
        ("echo 'STEP a\tb' >&3; printf 'one\\ntwo\\033[2J\\n'; false", "a?b: one; two [2J"),
        ("exit 3", "agent: exit code 3"),
        ("kill -9 $$", "agent: signal 9"),
        ("i=0; while [ $i -lt 900 ]; do echo line $i; i=$((i+1)); done; exit 1", "line 899"),
    ],
)
def test_failed_setup_is_named_and_serves_no_jobs(binary: Path, script: str, reason: str) -> None:
    with HostedAgent(binary, script) as agent, agent.status() as status:
        with pytest.raises(GuestFailed) as caught:
            list(StatusReader(status).steps(time.monotonic() + 20))
        assert reason in caught.value.reason and len(caught.value.reason) < 4096
        with pytest.raises(AgentError, match="agent: "):
            run(agent.session(), sh("echo must not run"))


def test_status_is_sent_to_each_new_connection(binary: Path) -> None:
    with HostedAgent(binary, "echo 'STEP one' >&3") as agent:
        for _ in range(3):
            steps: list[str] = []
            with agent.status() as status:
                steps += StatusReader(status).steps(time.monotonic() + 20)
            assert steps[-1] == "one"


@pytest.mark.parametrize(
    "line",
    ["uid=1", "color=red", "run", "sync=2", "groups=1,,2", "=", "gid=-1", "spool=relative"],
)
def test_bad_configuration_is_reported_as_failed(binary: Path, line: str) -> None:
    with HostedAgent(binary, extra=line + "\n") as agent:
        reader = StatusReader(agent.status())
        with pytest.raises(GuestFailed, match=r"agent\.conf line \d+: bad, unknown or repeated"):
            list(reader.steps(time.monotonic() + 20))


@pytest.mark.parametrize("key", ["uid", "gid"])
def test_root_is_never_the_job_user(binary: Path, tmp_path: Path, key: str) -> None:
    conf = tmp_path / "c"
    conf.write_text(f"{key}=0\n")
    conf.chmod(0o600)
    result = subprocess.run(
        [binary, conf], capture_output=True, text=True, timeout=180, check=False
    )
    assert (result.returncode, "bad, unknown" in result.stderr) == (2, True)


def test_configuration_that_others_can_write_is_refused(binary: Path, tmp_path: Path) -> None:
    conf = tmp_path / "c"
    conf.write_text("uid=5\n")
    conf.chmod(0o666)
    result = subprocess.run(
        [binary, conf], capture_output=True, text=True, timeout=180, check=False
    )
    assert (result.returncode, "only root can write" in result.stderr) == (2, True)


@pytest.mark.full
def test_static_build_is_small_and_reproducible(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "deeper" / "two"
    two.parent.mkdir()
    build_agent(one)
    build_agent(two)
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_size < 200_000
    headers = subprocess.run(["readelf", "-l", one], capture_output=True, text=True, check=True)
    assert "INTERP" not in headers.stdout


def test_missing_compiler_error_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(HostFault, match="apt-get install musl-tools"):
        build_agent(tmp_path / "x", cc="no-such-cc")
    assert shutil.which("gcc")
