"""The sandbox of programs that parse an untrusted container, as a user without root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vtorque_core.api import HostFault
from vtorque_oci import sandbox

LIBRARIES = ("lib", "lib32", "lib64")
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--")


def run(script: str, **options: Any) -> str:
    """Run a shell script in the sandbox of a user without root; return its standard output."""
    user = NOBODY if os.geteuid() == 0 else ()
    argv = [*user, *sandbox.USER_SANDBOX, "sh", "-c", script]
    return subprocess.run(
        argv, stdout=subprocess.PIPE, text=True, check=True, env=sandbox.ENV, cwd="/", **options
    ).stdout


def test_sandbox_contains_only_usr_and_its_own_processes() -> None:
    top = set(run("ls /").split())
    assert {"old", "proc", "usr"} <= top <= {"old", "proc", "usr", "bin", "sbin", *LIBRARIES}
    assert run("ls /old") == ""
    assert run("echo /proc/[0-9]*") == "/proc/1\n"


@pytest.mark.parametrize(
    "attempt",
    [
        "unshare --user true",
        "mount -t tmpfs none /usr",
        "touch /usr/x",
        "head -c 100000 /dev/zero >/x",
        "kill -0 2",
    ],
)
def test_program_in_sandbox_gains_nothing(attempt: str) -> None:
    assert run(f"! {attempt} 2>/dev/null && echo refused") == "refused\n"


def test_sandbox_has_no_network_and_no_capabilities() -> None:
    script = "tail -n +3 /proc/self/net/dev; grep Cap /proc/self/status"
    interfaces, *capabilities = run(script).splitlines()
    assert interfaces.split(":")[0].strip() == "lo"
    assert {line.split()[1] for line in capabilities} == {"0" * 16}


def test_program_in_sandbox_uses_its_open_files(tmp_path: Path) -> None:
    with (tmp_path / "out").open("xb") as file:
        os.fchmod(file.fileno(), 0o666)
        run(f"cat >/proc/self/fd/{file.fileno()}", input="text", pass_fds=(file.fileno(),))
    assert (tmp_path / "out").read_text() == "text"


def test_missing_program_is_reported_with_its_package() -> None:
    with pytest.raises(HostFault, match=r"no-such-tool is not installed.*the package some"):
        sandbox.sandbox_command("no-such-tool", limits=(), package="some")


def test_host_without_user_namespaces_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "isolate_command", tuple)
    monkeypatch.setattr(sandbox, "USER_SANDBOX", ("sh", "-c", "echo not permitted >&2; exit 1"))
    sandbox._user_sandbox.cache_clear()
    with pytest.raises(HostFault, match=r"user namespace.*1: not permitted.*vtorque doctor"):
        sandbox.sandbox_command("true", limits=(), package="coreutils")


def test_command_of_a_user_runs_in_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "isolate_command", tuple)
    sandbox._user_sandbox.cache_clear()
    prefix = (*NOBODY, *sandbox.USER_SANDBOX) if os.geteuid() == 0 else sandbox.USER_SANDBOX
    monkeypatch.setattr(sandbox, "USER_SANDBOX", prefix)
    command = sandbox.sandbox_command("ls", "/", limits=("--fsize=0",), package="coreutils")
    assert b"etc" not in subprocess.run(command, capture_output=True, check=True).stdout.split()


# Joins a new session keyring, adds a key, and looks for one. Without the sandbox, all succeed.
KEYS = """
for my $call ([250, 1, 0], [248, "user", "vtorque-test", "x", 1, -3], [250, 0, -3, 1]) {
    print syscall($$call[0], @$call[1 .. $#$call]) < 0 ? "refused\n" : "done\n";
}
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls")
@pytest.mark.parametrize("user", [False, True])
def test_program_in_sandbox_has_no_keyrings(user: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session keyring can contain Kerberos tickets, and namespaces do not separate it."""
    assert subprocess.check_output(["perl", "-"], input=KEYS, text=True).split() == ["done"] * 3
    if user:
        monkeypatch.setattr(sandbox, "isolate_command", tuple)
        monkeypatch.setattr(
            sandbox, "_user_sandbox", lambda: (*NOBODY * (os.geteuid() == 0), *sandbox.USER_SANDBOX)
        )
    command = sandbox.sandbox_command("perl", "-", limits=(), package="perl-base")
    said = subprocess.check_output(command, env=sandbox.ENV, cwd="/", input=KEYS, text=True)
    assert said.split() == ["refused"] * 3
