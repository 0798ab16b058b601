"""The X display of an interactive job: detection, and ssh forwarding from a guest.

ssh is a script here, with the messages of the real one; a real ssh, guest and X server are used in
tests/e2e.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import LONG
from vtorque_core.api.guest_driver import ReadyGuest
from vtorque_linux_guest.guest.contract import SSH_CONFIG
from vtorque_linux_guest.job import display
from vtorque_linux_guest.job.display import NoDisplay, find_display, forward_display

HERE = os.fsencode(socket.gethostname())
COOKIE = bytes(range(16))
IN_GUEST = 'shift $(($# - 1)); exec sh -c "$1"'
LOCAL, WILD = b"\1\0", b"\xff\xff"


def entry(
    family: bytes = LOCAL, address: bytes = HERE, number: bytes = b"50",
    kind: bytes = b"MIT-MAGIC-COOKIE-1", cookie: bytes = COOKIE,
) -> bytes:  # fmt: skip
    """One entry of a cookie file in the form of xauth(1)."""
    parts = (address, number, kind, cookie)
    return family + b"".join(len(part).to_bytes(2, "big") + part for part in parts)


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    (tmp_path / ".Xauthority").write_bytes(entry())
    return {"HOME": str(tmp_path), "DISPLAY": "localhost:50.0"}


@pytest.mark.parametrize(
    ("name", "inside", "end"),
    [
        ("localhost:50.0", "localhost:50.0", "localhost:6050"),
        ("127.0.0.1:50", "localhost:50", "127.0.0.1:6050"),
        (":50.1", "localhost:50.1", "/tmp/.X11-unix/X50"),
        ("unix:50", "localhost:50", "/tmp/.X11-unix/X50"),
    ],
)
def test_display_of_this_node_is_forwarded_under_the_same_name(home, name, inside, end):
    found = find_display({**home, "DISPLAY": name})
    assert (found.end, found.cookie) == (end, COOKIE)
    path = "/var/spool/vtorque/.vtorque-xauthority"
    assert found.environ == {"DISPLAY": inside, "XAUTHORITY": path}
    assert Path(path).name == found.file.name
    assert found.file.data == entry(WILD, b""), "the entry is not for any host name"


@pytest.mark.parametrize(
    "name",
    ["n2:10.0", "localhost:22222.0", "localhost:-10", ":0 -oProxyCommand=x", "/tmp/a:0",
     "SLURM_X11_SETUP_FAILED", "localhost:5\u0660.0", "[::1]:50"],
)  # fmt: skip
def test_invalid_or_remote_display_is_refused(home, name):
    with pytest.raises(NoDisplay, match="is not a display of this node"):
        find_display({**home, "DISPLAY": name})


@pytest.mark.parametrize(
    "content",
    [
        b"", entry(address=b"other"), entry(number=b"5"), entry(kind=b"XDM-AUTHORIZATION-1"),
        entry(family=b"\0\0", address=b"\x7f\0\0\1"), entry(cookie=b""), entry()[:-17],
        b"\xff" * 99,
    ],
)  # fmt: skip
def test_display_without_a_cookie_is_refused(home, tmp_path, content):
    (tmp_path / ".Xauthority").write_bytes(content)
    with pytest.raises(NoDisplay, match=r"/\.Xauthority has no cookie for display"):
        find_display(home)


def test_first_matching_cookie_is_used(home, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(entry(number=b"51") + entry(WILD, b"", b"", cookie=b"mine") + entry())
    assert find_display({**home, "XAUTHORITY": str(other)}).cookie == b"mine"


def test_fifo_or_device_as_cookie_file_does_not_block(home, tmp_path):
    """Code in a guest can write to a shared home."""
    path = tmp_path / ".Xauthority"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NoDisplay, match="no cookie"):
        find_display(home)
    held = os.open(path, os.O_RDWR)
    with pytest.raises(NoDisplay, match="no cookie"):
        find_display(home)
    os.close(held)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(NoDisplay, match="no cookie"):
        find_display(home)


@given(st.binary(max_size=200))
def test_any_file_of_cookies_is_read_or_left(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    assert display._cookie(path, 50) is None or b"MIT-MAGIC-COOKIE-1" in content


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A guest, and a function that puts a script in place of ssh."""
    (tmp_path / SSH_CONFIG).touch()
    monkeypatch.setitem(display.ENVIRON, "PATH", f"{tmp_path}:/usr/bin:/bin")

    def ssh(script: str) -> ReadyGuest:
        program = tmp_path / "ssh"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return ReadyGuest("vt", "vn1", 0, tmp_path)

    return ssh


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_ssh_to_the_display_ends_with_the_session(guest, home, tmp_path):
    """The command runs in the guest by the user's shell, which may print text before."""
    note = f'cd {tmp_path}; printf "%s\\n" "$@" >argv; env >environ; echo $$ >pid; echo hello; '
    with forward_display(guest(note + IN_GUEST), home) as found:
        pid = int((tmp_path / "pid").read_text())
        assert not ended(pid)
        assert os.getsid(pid) == pid
    assert ended(pid)
    assert found.number == 50
    argv = (tmp_path / "argv").read_text().splitlines()
    assert argv[:2] == ["-F", str(tmp_path / SSH_CONFIG)]
    at = argv.index("-R")
    assert argv[at + 1 : at + 3] == ["localhost:6050:localhost:6050", "vn1"]
    assert "ExitOnForwardFailure=yes" in argv and "BatchMode=yes" in argv
    names = {line.partition("=")[0] for line in (tmp_path / "environ").read_text().splitlines()}
    assert names <= {"PATH", "LC_ALL", "PWD", "OLDPWD", "SHLVL", "_"}


def test_command_in_the_guest_ends_with_the_job_shell(guest, home, tmp_path):
    """With any kind of end: the pipe closes."""
    pid = os.fork()
    if pid == 0:
        with forward_display(guest(f"({IN_GUEST}); touch {tmp_path}/over"), home):
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    until = time.monotonic() + LONG
    while not (tmp_path / "over").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert (tmp_path / "over").exists()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo hi; echo 'Error: remote port forwarding \033[1mfailed' >&2; exit 255",
         r"ssh to the guest failed: Error: remote port forwarding \\x1b\[1mfailed"),
        ("exit 1", "ssh to the guest failed: no message"),
        ("exec yes", "ssh to the guest failed: y"),
    ],
)  # fmt: skip
def test_failed_forwarding_is_reported_with_the_reason(guest, home, script, why):
    with pytest.raises(NoDisplay, match=why), forward_display(guest(script), home):
        pass


def test_silent_guest_times_out(guest, home, tmp_path, monkeypatch):
    monkeypatch.setattr(display, "SECONDS", 0.5)
    silent = guest(f"echo $$ >{tmp_path}/pid; exec sleep 1000")
    with pytest.raises(NoDisplay, match="sshd did not answer"), forward_display(silent, home):
        pass
    assert ended(int((tmp_path / "pid").read_text()))


def test_image_without_sshd_is_reported(guest, home, tmp_path):
    without = guest("exit 1")
    (tmp_path / SSH_CONFIG).unlink()
    with (
        pytest.raises(NoDisplay, match="the image has no sshd, or the guest's"),
        forward_display(without, home),
    ):
        pass
