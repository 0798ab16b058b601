"""One order boots a job's guests: a real process of root, real sockets, real descriptors."""

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from as_root import without_chown
from patience import eventually
from vtorque_core.api.guest_driver import (
    MAX_ORDER,
    ORDER_SOCKET,
    BootedGuest,
    ReadyGuest,
    boot_guests,
)
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.node.start.boot import connect_console
from vtorque_core.resources.kinds import core_kind
from vtorque_core.resources.starter import BootStarter


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path


@pytest.fixture(autouse=True)
def _without_chown(monkeypatch):
    without_chown(monkeypatch)


@pytest.fixture
def starter(run_dir):
    """Return a function that starts a process with this ``boot``; it is released at the end."""
    made = []

    def leave(boot, uid=None):
        lock, socket = str(run_dir / "starter.lock"), str(run_dir / ORDER_SOCKET)
        whose = os.getuid() if uid is None else uid
        one = BootStarter(lock=lock, socket=socket, uid=whose, boot=boot)
        one.create()
        made.append(one)
        return one

    yield leave
    for one in made:
        one.release()


def guest(run_dir):
    return ReadyGuest("vt-1", "vn1", 0, run_dir)


def consoles(order):
    """Boot nothing, but return two descriptors: one with the order, one with ``two``."""
    found = []
    for rank, text in enumerate((order, b"two")):
        reader, writer = os.pipe()
        os.write(writer, text[:1000])
        os.close(writer)
        found.append(BootedGuest(f"vn1-{rank}", rank, reader))
    return found


def test_answer_carries_the_consoles(run_dir, starter):
    starter(consoles)
    booted = boot_guests(guest(run_dir), b"run this")
    assert [(each.hostname, each.rank) for each in booted] == [("vn1-0", 0), ("vn1-1", 1)]
    assert [os.read(each.console, 100) for each in booted] == [b"run this", b"two"]
    for each in booted:
        os.close(each.console)


def test_starter_ends_after_its_answer(run_dir, starter):
    one = starter(lambda order: [])
    assert not one.is_lost()
    assert boot_guests(guest(run_dir), b"x") == []
    eventually(one.is_lost)
    with pytest.raises(HostFault):
        boot_guests(guest(run_dir), b"again")


def refuse(_order):
    raise Refused("line 3 needs a shell")


def fault(_order):
    raise HostFault("libvirtd is down", detail=("| the console", "| says\x1b[31m this"))


def defect(_order):
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("boot", "kind", "words"),
    [
        (refuse, Refused, "line 3 needs a shell"),
        (fault, HostFault, "libvirtd is down"),
        (defect, HostFault, "KeyError: 'oops'"),
        (lambda order: os._exit(3), HostFault, "ended without answer"),
    ],
)
def test_failed_boot_is_reported_with_its_reason(run_dir, starter, boot, kind, words):
    starter(boot)
    with pytest.raises(kind, match=words) as raised:
        boot_guests(guest(run_dir), b"x")
    if boot is fault:
        assert raised.value.detail[0] == "| the console"
        assert "\x1b" not in raised.value.detail[1]


def test_order_above_the_limit_boots_nothing(run_dir, starter):
    starter(consoles)
    with pytest.raises(Refused, match="256 KiB"):
        boot_guests(guest(run_dir), bytes(MAX_ORDER + 1))
    with socket.socket(socket.AF_UNIX) as connection:  # by hand
        connection.connect(str(run_dir / ORDER_SOCKET))
        try:
            connection.sendall(bytes(MAX_ORDER + 1))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
        except OSError:
            pass  # it has disconnected
    assert len(boot_guests(guest(run_dir), b"y")) == 2  # it still waits for a valid order


def test_starter_ends_when_the_job_shell_has_closed_the_connection(run_dir, starter):
    def slow(_order):
        (run_dir / "booted").open("a").write("x")
        threading.Event().wait(0.3)
        return consoles(b"")

    one = starter(slow)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(run_dir / ORDER_SOCKET))
        connection.sendall(b"x")
        connection.shutdown(socket.SHUT_WR)
    eventually(one.is_lost)
    assert (run_dir / "booted").read_text() == "x"


def test_order_of_another_user_is_ignored(run_dir, starter):
    if os.getuid() != 0:
        pytest.skip("only root can give the socket to another user")
    starter(consoles, uid=65534)
    with pytest.raises(HostFault):
        boot_guests(guest(run_dir), b"x")


def test_order_socket_is_accessible_only_to_the_user(run_dir, starter):
    starter(consoles)
    status = (run_dir / ORDER_SOCKET).stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, os.getuid())


def test_release_ends_the_starter_and_is_idempotent(run_dir, starter):
    one = starter(consoles)
    args = {"argv": list(one.argv), "lock": one.lock, "socket": one.socket}
    again = core_kind("starter")(**json.loads(json.dumps(args)))
    again.release()
    again.release()
    assert one.is_lost()
    assert not Path(one.lock).exists()


def test_starter_that_cannot_listen_is_a_host_fault(run_dir):
    (run_dir / ORDER_SOCKET).mkdir()
    nowhere = str(run_dir / "no" / ORDER_SOCKET)
    one = BootStarter(lock=str(run_dir / "l"), socket=nowhere, uid=os.getuid(), boot=consoles)
    with pytest.raises(HostFault, match="does not listen"):
        one.create()
    one.release()


def test_missing_console_socket_is_a_host_fault(tmp_path):
    with pytest.raises(HostFault, match="the guest's console"):
        connect_console(str(tmp_path / "console.sock"))
