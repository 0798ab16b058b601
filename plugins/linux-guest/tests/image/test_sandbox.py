"""The sandbox of package scripts: root inside, unprivileged outside."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vtorque_core.api import HostFault
from vtorque_linux_guest.image import sandbox

pytestmark = pytest.mark.e2e  # only root makes maps of 65536 ids


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory below one that only root can enter, like staging."""
    with tempfile.TemporaryDirectory() as private:
        path = Path(private, "work")
        path.mkdir()
        yield path


def sh(work: Path, script: str, timeout: float = 30) -> str:
    return sandbox.run(work, "sh", "-euc", script, timeout=timeout, stage="test")


def test_root_inside_is_unprivileged_outside(work: Path) -> None:
    (work / "given").write_text("text")
    (work / "given").chmod(0o600)
    said = sh(work, "id -u; pwd; cat given; echo made > made; chown 7:8 made; echo $$; ls /proc")
    assert said.splitlines()[:3] == ["0", sandbox.PLACE, "text1"]
    status = (work / "made").stat()
    assert (status.st_uid, status.st_gid) == (sandbox.BASE + 7, sandbox.BASE + 8)
    assert str(os.getpid()) not in said.splitlines()


@pytest.mark.parametrize(
    "script",
    ["cat /etc/shadow", "touch /etc/x", "mknod n b 8 0", "kill -0 2", "ls /root"],
)
def test_operations_that_need_real_root_fail(work: Path, script: str) -> None:
    with pytest.raises(HostFault, match="sh: exit"):
        sh(work, script)


def test_mounts_stay_inside(work: Path) -> None:
    before = Path("/proc/self/mounts").read_text()
    sh(work, "mkdir m; mount -t tmpfs none m; : > m/f; mount --bind /usr tmp")
    assert Path("/proc/self/mounts").read_text() == before
    assert list((work / "m").iterdir()) == []


def test_all_processes_end_with_the_sandbox(work: Path) -> None:
    mark = f"1234{os.getpid()}"
    sh(work, f"sleep {mark} >/dev/null 2>&1 &")
    with pytest.raises(HostFault, match="timed out after"):
        sh(work, f"sleep {mark}", timeout=1)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _running(mark):
        time.sleep(0.1)
    assert not _running(mark)


def _running(argument: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == f"sleep\0{argument}\0".encode():
                return True
        except OSError:
            continue
    return False


def test_link_left_by_a_script_is_not_followed(work: Path) -> None:
    sh(work, "rmdir tmp; ln -s /etc/passwd tmp")
    before = Path("/etc/passwd").stat().st_mode
    assert sh(work, "echo again") == "again\n"
    assert Path("/etc/passwd").stat().st_mode == before
