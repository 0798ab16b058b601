"""Logs of a failed guest on the node: from an honest agent, and from hostile doubles."""

from __future__ import annotations

import base64
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from patience import LONG, with_more_time
from sample_guests import DEBIAN, MICRO
from vtorque_core.api import HostFault
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_linux_guest.guest.contract import STATUS_SOCKET
from vtorque_linux_guest.job import guest_logs
from vtorque_linux_guest.job.driver import LinuxDriver
from vtorque_linux_guest.job.status_port import StatusReader

Guest = Callable[..., GuestPlan]
Answer = Callable[[socket.socket, str], None]

FULL = guest_logs.MAX


def line(data: bytes) -> bytes:
    return b"LOG " + base64.b64encode(data) + b"\n"


@contextmanager
def agent(directory: Path, first: bytes, answer: Answer) -> Iterator[list[str]]:
    """A status port: sends ``first``, then ``answer`` replies to each request."""
    asked: list[str] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / STATUS_SOCKET))
    listener.listen(1)

    def serve() -> None:
        connection = listener.accept()[0]
        with connection, connection.makefile("rb") as lines:
            try:
                for question in lines:
                    words = question.decode().split()
                    if words[0] == "STATUS":
                        connection.sendall(first)
                    elif words[0] == "LOG":
                        asked.append(words[1])
                        answer(connection, words[1])
            except OSError:
                return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        thread.join(LONG)
        listener.close()
    assert not thread.is_alive()


def start(guest: GuestPlan, seconds: float = LONG) -> str:
    """Wait for a guest that does not become ready; return the message to the user."""
    with pytest.raises(HostFault) as caught:
        LinuxDriver().await_ready(guest, time.monotonic() + seconds, lambda _: None)
    return str(caught.value)


def honest(connection: socket.socket, path: str) -> None:
    connection.sendall(line(b"\x1b[2J of ") + b"STEP more\n" + line(path.encode()) + b"LOGGED\n")


@pytest.fixture
def debian(plan: Guest, tmp_path: Path) -> GuestPlan:
    return plan(image=DEBIAN, state_dir=tmp_path, run_dir=tmp_path)


def kept(guest: GuestPlan) -> bytes:
    path = guest.state_dir / guest_logs.NAME
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_uid == os.geteuid()
    assert status.st_size <= FULL
    return path.read_bytes()


EXPECTED = b"".join(
    b"==> %s <==\n\x1b[2J of %s\n" % (path.encode(), path.encode()) for path in guest_logs.FILES
)


@pytest.fixture
def long_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a long timeout: on a busy machine two seconds are too short."""
    monkeypatch.setattr(guest_logs, "SECONDS", LONG)


@pytest.mark.usefixtures("long_timeout")
def test_logs_of_a_failed_setup_are_kept(debian: GuestPlan) -> None:
    with agent(debian.run_dir, b"FAILED mount: no tag\n", honest) as asked:
        assert "guest vn1: mount: no tag" in start(debian)
    assert tuple(asked) == guest_logs.FILES
    assert kept(debian) == EXPECTED


@pytest.mark.usefixtures("long_timeout")
def test_logs_of_a_setup_that_timed_out_are_kept(plan: Guest, tmp_path: Path) -> None:
    def attempt(seconds: float) -> None:
        here = tmp_path / f"{seconds}"
        here.mkdir()
        guest = plan(image=DEBIAN, state_dir=here, run_dir=here)
        with agent(here, b"STEP packages\n", honest):
            assert "last step: packages" in start(guest, seconds)
        assert kept(guest) == EXPECTED

    with_more_time(attempt, 0.5, 5, 100)


def test_agent_that_never_answered_is_not_queried(debian: GuestPlan) -> None:
    with agent(debian.run_dir, b"", honest) as asked:
        assert "no step seen" in start(debian, 0.3)
    assert asked == []


def test_micro_guest_has_no_logs(plan: Guest, tmp_path: Path) -> None:
    guest = plan(image=MICRO, state_dir=tmp_path, run_dir=tmp_path)
    with agent(tmp_path, b"FAILED x\n", honest) as asked:
        start(guest)
    assert asked == []
    assert not (tmp_path / guest_logs.NAME).exists()


def test_time_for_logs_is_part_of_the_deadline(plan: Guest) -> None:
    now = time.monotonic()
    assert guest_logs.ready_deadline(plan(image=MICRO), now + 300) == now + 300
    assert guest_logs.ready_deadline(plan(image=DEBIAN), now + 300) == pytest.approx(now + 298)
    assert now + 4.5 <= guest_logs.ready_deadline(plan(image=DEBIAN), now + 5) <= now + 5
    assert guest_logs.ready_deadline(plan(image=DEBIAN), now - 5) == now - 5


# -- Misbehaving doubles ---------------------------------------------------------------------------


def nothing(connection: socket.socket, path: str) -> None:
    """An old agent, or one that only reports that it is busy."""


def hangs_up(connection: socket.socket, path: str) -> None:
    connection.sendall(line(b"begun"))
    connection.shutdown(socket.SHUT_RDWR)


def endless(connection: socket.socket, path: str) -> None:
    while True:
        connection.sendall(line(b"x" * 3000))


def endless_and_empty(connection: socket.socket, path: str) -> None:
    while True:
        connection.sendall(b"LOG \n" * 500)


def another_line(connection: socket.socket, path: str) -> None:
    while True:
        connection.sendall(b"READY 1\nSTEP x\n" * 100)


def a_line_without_end(connection: socket.socket, path: str) -> None:
    connection.sendall(line(b"begun"))
    while True:
        connection.sendall(b"LOG " + b"A" * 10_000)


def no_base64(connection: socket.socket, path: str) -> None:
    connection.sendall(line(b"begun") + b"LOG \x1b]0;owned\x07\xff\n")


def drips(connection: socket.socket, path: str) -> None:
    connection.sendall(line(b"begun"))
    while True:
        connection.sendall(b"L")
        time.sleep(0.05)


def report_end(connection: socket.socket, path: str) -> None:
    connection.sendall(b"LOGGED\n" * 100)


HOSTILE = [
    (hangs_up, b"begun"), (endless, b"xxx"), (endless_and_empty, b""),
    (another_line, b""), (a_line_without_end, b"begun"), (no_base64, b"begun"),
    (report_end, b""),
]  # fmt: skip


@pytest.mark.usefixtures("long_timeout")
@pytest.mark.parametrize(("answer", "some"), HOSTILE, ids=[a.__name__ for a, _ in HOSTILE])
def test_output_of_a_hostile_guest_is_bounded(
    debian: GuestPlan, answer: Answer, some: bytes
) -> None:
    with agent(debian.run_dir, b"FAILED x\n", answer):
        assert start(debian, 1000) == "guest vn1: x"
    path = debian.state_dir / guest_logs.NAME
    content = kept(debian) if path.exists() else b""
    assert some in content
    assert b"owned" not in content


@pytest.mark.parametrize("answer", [nothing, drips], ids=lambda a: a.__name__)
def test_hostile_guest_is_read_for_seconds_only(
    debian: GuestPlan, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guest_logs.SECONDS == 2
    monkeypatch.setattr(guest_logs, "SECONDS", 0.2)
    begun = time.monotonic()
    with agent(debian.run_dir, b"FAILED x\n", answer):
        assert start(debian, 1000) == "guest vn1: x"
    assert time.monotonic() - begun < LONG  # of the 1000 s available


def test_link_in_place_of_the_log_is_not_followed(debian: GuestPlan, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"mine")
    (tmp_path / guest_logs.NAME).symlink_to("other")
    with agent(debian.run_dir, b"FAILED x\n", honest):
        assert start(debian) == "guest vn1: x"
    assert (tmp_path / "other").read_bytes() == b"mine"


def test_missing_directory_does_not_change_the_error(plan: Guest, tmp_path: Path) -> None:
    guest = plan(image=DEBIAN, state_dir=tmp_path / "gone", run_dir=tmp_path)
    with agent(tmp_path, b"FAILED x\n", honest):
        assert start(guest) == "guest vn1: x"


def test_no_logs_are_read_after_the_deadline(debian: GuestPlan) -> None:
    host, guest_end = socket.socketpair()
    with host, guest_end:
        assert list(guest_logs.fetch_logs(StatusReader(host), time.monotonic() - 1)) == []
    assert not (debian.state_dir / guest_logs.NAME).exists()
