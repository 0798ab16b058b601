"""``vmgr ssh``, ``console`` and ``clean``: the guests that they find, and their commands."""

import os
import pty
import socket
import subprocess
import sys
import termios
import types
from pathlib import Path

import pytest

from patience import eventually
from vtorque_core.api import JobAttempt, Paths, kept_records
from vtorque_core.live import jobs, service
from vtorque_linux_guest import command
from vtorque_testing import vmgr


@pytest.fixture
def call_vmgr(tmp_path, monkeypatch):
    """Return a function that calls ``vmgr``; it returns the executed program, or the refusal."""
    paths = Paths(tmp_path / "state", tmp_path / "run")
    paths.state.mkdir()
    job = JobAttempt("42.srv", 0, "u", os.getuid())
    guests = [{"rank": 3, "index": 1, "hostname": "vm-1"}]
    place = kept_records.place(paths, job)
    place.add_facts(job="42.srv", guests=guests, phases=[])
    run_dir = paths.job_run(job.key) / "g1"
    run_dir.mkdir(parents=True)
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{paths.state}"\nrun = "{paths.run}"\n')
    ran = []
    monkeypatch.setattr(os, "execvp", lambda _program, argv: ran.append(argv))

    def call(*argv, command="ssh"):
        done = vmgr.run(config, command, *argv)
        return ran.pop() if ran else str(done.exception)

    call.run_dir, call.place, call.job, call.config = run_dir, place, job, config
    return call


def test_ssh_uses_the_client_configuration_of_the_job(call_vmgr):
    (call_vmgr.run_dir / "ssh_config").write_text("")
    argv = call_vmgr("42.srv", "3", "--", "id", "-un")
    assert argv == ["ssh", "-F", f"{call_vmgr.run_dir}/ssh_config", "vm-1", "--", "id", "-un"]


def test_ssh_to_a_migrated_guest_uses_the_configuration_of_the_first_guest(call_vmgr):
    guests = [
        {"rank": 0, "index": 0, "hostname": "vm-0"},
        {"rank": 1, "index": 1, "hostname": "vm-1"},
    ]
    there = {"n7": {"phase": "run", "guests": [{"rank": 5, "hostname": "vm-5"}]}}
    call_vmgr.place.add_facts(guests=guests, elsewhere=there)
    first = call_vmgr.run_dir.with_name("g0")
    first.mkdir()
    (first / "ssh_config").write_text("")
    assert call_vmgr("42.srv", "5") == ["ssh", "-F", f"{first}/ssh_config", "vm-5", "--"]
    for forged in ({"n7": [1]}, {"n7": {"guests": ["x", {"rank": 5, "hostname": "-o"}]}}, 3):
        call_vmgr.place.add_facts(elsewhere=forged)
        assert "no readable records of your job 42.srv, guest 5" in call_vmgr("42.srv", "5")


@pytest.mark.parametrize(
    "forged",
    [
        {"rank": 3, "index": 1, "hostname": "-oProxyCommand=touch evil"},
        {"rank": 3, "index": "../../../../home/ada", "hostname": "vm-1"},
        "guest",
    ],
)
def test_ssh_rejects_options_and_paths_in_forged_facts(call_vmgr, forged):
    (call_vmgr.run_dir / "ssh_config").write_text("")
    call_vmgr.place.add_facts(guests=[forged])
    assert "no readable records of your job 42.srv, guest 3" in call_vmgr("42.srv", "3")


def test_missing_guest_or_ssh_is_reported(call_vmgr):
    assert "guest 3 does not support ssh:" in call_vmgr("42.srv", "3")
    assert "no readable records of your job 42.srv, guest 0" in call_vmgr("42.srv")
    assert "no readable records of your job 43.srv, guest 3" in call_vmgr("43.srv", "3")
    call_vmgr.place.add_facts(ended=1.0)
    assert "job 42.srv has no ready guest: the job is starting" in call_vmgr("42.srv", "3")


ATTACH = "import pathlib, sys; from vtorque_linux_guest.attach import attach; "
ATTACH += "attach(pathlib.Path(sys.argv[1]))"


def read_until(terminal, end):
    seen = b""
    while not seen.endswith(end):
        seen += os.read(terminal, 4096)


@pytest.mark.parametrize("leaves", [True, False])
def test_console_of_root_passes_both_ways_and_restores_the_terminal(tmp_path, leaves):
    path = str(tmp_path / "console.sock")
    terminal, inner = pty.openpty()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        attached = subprocess.Popen(
            [sys.executable, "-c", ATTACH, path], stdin=inner, stdout=inner, stderr=inner
        )
        guest = listener.accept()[0]
    with guest:
        read_until(terminal, b"leave with Ctrl-]\r\n")
        eventually(lambda: not termios.tcgetattr(terminal)[3] & termios.ECHO)
        guest.sendall(b"login: ")
        read_until(terminal, b"login: ")
        os.write(terminal, b"a\x03\x04")  # Ctrl-C and Ctrl-D are the guest's
        assert guest.recv(3, socket.MSG_WAITALL) == b"a\x03\x04"
        if leaves:
            os.write(terminal, b"\x1d")
            assert guest.recv(1) == b""
    assert attached.wait(60) == 0
    read_until(terminal, b"\n" if leaves else b"\nthe console has ended\r\n")
    assert termios.tcgetattr(terminal)[3] & termios.ECHO
    os.close(terminal)
    os.close(inner)


@pytest.mark.root
def test_console_of_root_without_a_guest_is_reported(call_vmgr, monkeypatch):
    running = types.SimpleNamespace(
        job=call_vmgr.job, kept=call_vmgr.place, guests=[types.SimpleNamespace(index=1)]
    )
    monkeypatch.setattr(jobs.RunningJobs, "jobs", lambda _: [running])
    monkeypatch.setattr(service, "paths", lambda _: call_vmgr.place.paths)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "isatty", lambda _: True)
    assert "has no running guest 0 on this node" in call_vmgr("42.srv", command="console")
    said = call_vmgr("42.srv", "--guest", "1", command="console")
    assert (
        said == f"the guest's console {call_vmgr.run_dir}/console.sock: No such file or directory"
    )


@pytest.mark.parametrize(
    ("uid", "terminal"), [(1000, True), pytest.param(0, False, marks=pytest.mark.root)]
)
def test_owner_and_caller_without_a_terminal_watch_the_console(
    call_vmgr, monkeypatch, uid, terminal
):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(os, "isatty", lambda _: terminal)
    monkeypatch.setattr(os, "execv", lambda _program, argv: sys.exit(" ".join(argv)))
    watched = call_vmgr("42.srv", "--guest", "1", command="console")
    assert watched.startswith("/usr/bin/env --block-signal=INT "), (
        "Ctrl-C could interrupt the start of Python"
    )
    assert watched.endswith("logs --console --follow --guest=1 -- 42.srv")


def test_missing_ssh_program_is_reported(call_vmgr, monkeypatch):
    (call_vmgr.run_dir / "ssh_config").write_text("")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    done = vmgr.run(call_vmgr.config, "ssh", "42.srv", "3")
    assert str(done.exception) == "ssh(1) is not installed on this host"


def test_clean_submits_a_job_that_lists_remaining_files(call_vmgr, tmp_path, monkeypatch):
    place = tmp_path / "a `b` $(c)"
    (place / "mine").mkdir(parents=True)
    ran = []

    def run(argv, check):
        assert not check
        done = real([argv[-1]], capture_output=True, text=True, check=False)
        ran.append((argv[1:-1], Path(argv[-1]).name, done.returncode, done.stdout))
        return types.SimpleNamespace(returncode=7)

    real = subprocess.run
    monkeypatch.setattr(command.subprocess, "run", run)
    named = f"{place}/mine/.."  # like after cd
    assert call_vmgr(named, "--", "-vm", "img=m", command="clean") == "7"
    options = ["--config", str(tmp_path / "vtorque.toml"), "-vm", f"clean={place}", "-vm", "img=m"]
    assert ran == [(options, "vmgr-clean", 0, f"{place}: all remaining files are yours\n")]


@pytest.mark.parametrize(("before", "runs"), [(["--"], False), ([], True)])
def test_command_words_are_not_parsed_as_ssh_options(call_vmgr, tmp_path, before, runs):
    """The real ssh(1) takes options after the host, too; one of them runs a program here."""
    (call_vmgr.run_dir / "ssh_config").write_text("Host vm-1\n HostName 127.0.0.1\n Port 1\n")
    ran = tmp_path / "ran"
    argv = call_vmgr("42.srv", "3", "--", f"-oProxyCommand=touch {ran}", "true")
    at = argv.index("--")
    subprocess.run([*argv[:at], *before, *argv[at + 1 :]], capture_output=True, check=False)
    assert ran.exists() == runs
