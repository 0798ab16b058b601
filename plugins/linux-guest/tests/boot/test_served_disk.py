"""The check of the process that serves a user's disk, with a real storage daemon."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from patience import eventually
from vtorque_core.api import HostFault, JobRequest, Refused
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_linux_guest.boot.served_disk import require_one_file
from vtorque_testing import planned


@pytest.fixture
def guest(tmp_path: Path) -> GuestPlan:
    wanted = JobRequest({"disk": str(tmp_path / "d.qcow2")}, given=frozenset({"disk"}))
    return planned.guest_plan(run_dir=tmp_path, request=wanted)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Return a function that creates ``d.qcow2`` with options, and serves it as the core does."""
    log = os.memfd_create("vtorque-daemon-log")
    lock = os.open(tmp_path / "disk-data.lock", os.O_RDWR | os.O_CREAT, 0o600)
    daemons = []

    def start(*options: str) -> None:
        disk = tmp_path / "d.qcow2"
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", *options, disk, "1M"], check=True
        )
        with disk.open("r+b") as file:
            opened = f"driver=file,node-name=file,filename=/proc/self/fd/{file.fileno()}"
            argv = ["qemu-storage-daemon", "--blockdev", f"{opened},auto-read-only=off"]
            daemon = subprocess.Popen(
                [*argv, "--blockdev", "driver=qcow2,node-name=disk,file=file"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=(lock, file.fileno()),
                preexec_fn=lambda: fcntl.lockf(lock, fcntl.LOCK_EX),  # noqa: PLW1509 - no threads
            )  # fmt: skip
        daemons.append(daemon)
        wanted = 2 + bool(options)  # the file, opened again, and the data file
        eventually(lambda: _count(daemon.pid, tmp_path) == wanted)

    yield start
    for each in daemons:
        each.kill()
        each.wait()
    os.close(lock)
    os.close(log)


def _count(pid: int, top: Path) -> int:
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(str(each.readlink()))
    return sum(each.startswith(str(top)) and not each.endswith(".lock") for each in found)


def test_disk_without_other_files_is_accepted(
    serve: Callable[..., None], guest: GuestPlan, tmp_path: Path
) -> None:
    serve()
    require_one_file(guest)
    (tmp_path / "link").symlink_to(tmp_path)  # as /var/run
    require_one_file(planned.guest_plan(run_dir=tmp_path / "link", request=guest.request))


def test_disk_that_refers_to_another_file_is_refused(
    serve: Callable[..., None], guest: GuestPlan, tmp_path: Path
) -> None:
    """The disk's header was changed after its check."""
    serve("-o", f"data_file={tmp_path}/bashrc,data_file_raw=on")
    with pytest.raises(Refused, match=r"disk=.*: was changed during the start"):
        require_one_file(guest)


def test_guest_without_the_disk_is_accepted(guest: GuestPlan) -> None:
    require_one_file(guest)


def test_disk_whose_process_has_ended_is_refused(guest: GuestPlan, tmp_path: Path) -> None:
    (tmp_path / "disk-data.lock").touch()
    with pytest.raises(HostFault, match="cannot check the process"):
        require_one_file(guest)
