"""The process that reads the layers of a container: no privileges, limits, a bounded answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from vtorque_core.api import HostFault, Refused
from vtorque_oci import unprivileged
from vtorque_oci.unprivileged import RootConnection, run


def reported_steps(
    work: Callable[[RootConnection], None], keep: IO[bytes] | None = None, most: int = 1 << 20
) -> list[str]:
    """Return the steps that ``work`` reports."""
    steps: list[str] = []
    run(work, [] if keep is None else [keep.fileno()], most, steps.append, lambda: None)
    return steps


def test_process_has_no_privileges_and_only_its_files(tmp_path: Path) -> None:
    with (tmp_path / "disk").open("xb") as disk, (tmp_path / "secret").open("xb") as secret:

        def work(root: RootConnection) -> None:
            for name in ("Uid", "Groups", "CapPrm", "CapBnd", "NoNewPrivs"):
                lines = Path("/proc/self/status").read_text().splitlines()
                root.step(next(" ".join(x.split()) for x in lines if x.startswith(f"{name}:")))
            os.write(disk.fileno(), b"x")
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(secret.fileno())
            with pytest.raises(OSError):
                os.fork()
            root.wait()

        steps = dict(line.split(":", 1) for line in reported_steps(work, disk))
    assert (tmp_path / "disk").read_bytes() == b"x"
    assert steps["NoNewPrivs"] == " 1"
    if os.geteuid() == 0:
        assert set(steps["Uid"].split()) == {"65534"} and steps["Groups"].strip() == ""
        assert int(steps["CapPrm"], 16) == 0


def exhaust_memory(_: RootConnection) -> None:
    kept = []
    while True:
        kept.append(bytearray(64 << 20))


def exhaust_time(_: RootConnection) -> None:
    while True:
        pass


def talk(root: RootConnection) -> None:
    while True:
        root.step("x" * 9000)


def refuse(_: RootConnection) -> None:
    raise Refused("no \x1b[2J good")


def end(_: RootConnection) -> None:
    os._exit(7)


def close_pipe_and_sleep(root: RootConnection) -> None:
    os.closerange(3, 1 << 16)
    time.sleep(3600)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (close_pipe_and_sleep, "the unprivileged parser closed its"),
        (exhaust_memory, "needs more than 256 MiB of memory to parse"),
        (exhaust_time, "takes more than 1 s of CPU time to parse"),
        (talk, "sent too much data"),
        (refuse, r"^no \\x1b\[2J good$"),
        (end, "the unprivileged parser ended with exit code 7"),
        (lambda _: None, "has failed"),  # when taken over, it reports its end before root does
    ],
)
def test_process_cpu_memory_and_time_are_limited(
    work: Callable[[RootConnection], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unprivileged, "CPU", 1)
    monkeypatch.setattr(unprivileged, "MEMORY", 256 << 20)
    monkeypatch.setattr(unprivileged, "_END", 1.0)
    with pytest.raises(Refused, match=message):
        reported_steps(work)


def test_size_of_written_files_is_limited(tmp_path: Path) -> None:
    def work(_: RootConnection) -> None:
        os.pwrite(disk.fileno(), b"x", 4096)

    with (tmp_path / "disk").open("xb") as disk, pytest.raises((Refused, HostFault)):
        reported_steps(work, disk, 4096)
    assert (tmp_path / "disk").stat().st_size <= 4096


def test_process_is_killed_when_root_fails() -> None:
    pids = []

    def fail() -> None:
        raise HostFault("no kernel")

    def work(root: RootConnection) -> None:
        root.step(str(os.getpid()))
        root.wait()

    with pytest.raises(HostFault, match="no kernel"):
        run(work, [], 0, pids.append, fail)
    with pytest.raises(ChildProcessError):
        os.waitpid(int(pids[0]), os.WNOHANG)
