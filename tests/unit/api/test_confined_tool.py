"""Tools that read untrusted disks: no privileges, limits, and no process is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import processes
from vtorque_core.api import NOBODY, confined_tool
from vtorque_core.base.errors import HostFault, Refused


@contextmanager
def nobodys(path: Path) -> Iterator[int]:
    """Make a file that a tool may open by its descriptor."""
    with path.open("wb") as file:
        if os.geteuid() == 0:
            os.fchown(file.fileno(), NOBODY, NOBODY)
        yield file.fileno()


def test_hanging_tool_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match=r"the tool timed out after 0\.3 s"):
        confined_tool.run("sleep", "60", files=(), most=0, seconds=0.3)


def test_tool_runs_without_privileges_and_with_limits(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        assert confined_tool.run("id", "-u", files=(), most=0).strip() == "65534"
        assert confined_tool.run("id", "-G", files=(), most=0).strip() == "65534"
        secret = tmp_path / "secret"
        secret.write_text("of root alone")
        secret.chmod(0o600)
        with pytest.raises(Refused, match="Permission denied"):
            confined_tool.run("cat", str(secret), files=(), most=0)
    with nobodys(tmp_path / "out") as out, pytest.raises(Refused, match="MiB that are free"):
        path = confined_tool.path_of(out)
        confined_tool.run("dd", "if=/dev/zero", f"of={path}", "count=9", files=(out,), most=4096)
    with pytest.raises(HostFault, match="no-such-tool: not found"):
        confined_tool.run("no-such-tool", files=(), most=0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a tool a pid namespace")
def test_child_of_a_tool_is_killed_before_it_changes_the_checked_file(tmp_path: Path) -> None:
    """A tool that a hostile image controls leaves a process with the file open."""
    marked = "86399.25"  # seconds: how the test finds the process
    with nobodys(tmp_path / "disk") as out:
        path = confined_tool.path_of(out)
        script = f"setsid sh -c 'sleep {marked}; echo changed > {path}' >/dev/null 2>&1 & echo $!"
        assert confined_tool.run("sh", "-c", script, files=(out,), most=4096).strip() != ""
    assert processes.with_word(marked) == []


def test_tool_may_start_as_many_threads_as_qemu_img() -> None:
    """The threads' stacks and heaps fit into the tool's address space limit on any machine."""
    code = (
        "import threading\n"
        "gate = threading.Barrier(65)\n"
        "def work():\n"
        "    data = bytearray(50_000)\n"
        "    gate.wait()\n"
        "threads = [threading.Thread(target=work, daemon=True) for _ in range(64)]\n"
        "[each.start() for each in threads]\n"
        "gate.wait()\n"
        "print(len(threads))\n"
    )
    assert confined_tool.run("python3", "-I", "-S", "-c", code, files=(), most=0) == "64\n"
