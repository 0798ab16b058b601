"""End of a guest's QEMU: here a process with a monitor's socket."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vtorque_core.resources import qemu_exit

QEMU = """
import signal, socket, sys
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("listens", flush=True)
tcp = socket.socket()
connection, _ = server.accept()
print("connected", flush=True)
signal.pause()
signal.pause()
"""


@pytest.fixture
def qemu(tmp_path, monkeypatch):
    """Give a function that starts a process in place of QEMU, and connects as libvirt does."""
    begun = []

    def start(name="monitor.sock", how="", seen=None):
        path = tmp_path / name
        process = subprocess.Popen(
            [sys.executable, "-c", QEMU, path, how], stdout=subprocess.PIPE, text=True
        )
        libvirt = socket.socket(socket.AF_UNIX)
        begun.append((process, libvirt))
        assert process.stdout.readline() == "listens\n"
        libvirt.connect(str(path))
        assert process.stdout.readline() == "connected\n"
        answers = [Path("/proc", str(process.pid))] * 2 if seen is None else seen(process)
        monkeypatch.setattr(qemu_exit, "process_of", lambda *_: answers.pop(0))
        return process, libvirt

    yield start
    for process, libvirt in begun:
        process.kill()
        process.wait()
        process.stdout.close()
        libvirt.close()


def is_closed(connection):
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def test_monitor_closes_only_after_qemu_is_reaped(qemu, monkeypatch):
    monkeypatch.setattr(qemu_exit, "PATIENCE", 60.0)
    process, libvirt = qemu()
    at_end = []

    def reap():
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        at_end.append(is_closed(libvirt))
        process.wait()

    init = threading.Thread(target=reap)
    init.start()
    qemu_exit.end("vt-0", "u")
    init.join()
    assert at_end == [False]
    assert process.returncode == -signal.SIGTERM
    assert is_closed(libvirt)


def test_end_without_monitor_leaves_qemu_to_libvirt(qemu):
    process, _ = qemu("serial.sock")
    qemu_exit.end("vt-0", "u")
    assert process.poll() is None


def test_end_leaves_qemu_that_ignores_sigterm_to_libvirt(qemu, monkeypatch):
    monkeypatch.setattr(qemu_exit, "PATIENCE", 0.01)
    process, libvirt = qemu(how="deaf")
    qemu_exit.end("vt-0", "u")
    assert process.poll() is None
    assert not is_closed(libvirt)


def test_end_signals_no_process_that_has_reused_the_pid(qemu):
    process, _ = qemu(seen=lambda process: [Path("/proc", str(process.pid)), None])
    qemu_exit.end("vt-0", "u")
    assert process.poll() is None


def test_end_copies_no_tcp_socket_of_qemu(qemu, monkeypatch):
    """The last close of such a socket could block: socket(7), SO_LINGER."""
    families, copy = [], qemu_exit.descriptor_of

    def descriptor_of(pidfd, number):
        with socket.socket(fileno=copy(pidfd, number)) as seen:
            families.append(seen.family)
        return copy(pidfd, number)

    monkeypatch.setattr(qemu_exit, "descriptor_of", descriptor_of)
    qemu()
    qemu_exit.end("vt-0", "u")
    assert set(families) == {socket.AF_UNIX}


def test_end_without_process_does_nothing(monkeypatch):
    monkeypatch.setattr(qemu_exit, "process_of", lambda *_: None)
    qemu_exit.end("vt-0", "u")


def test_end_of_process_that_is_gone_does_nothing(qemu):
    process, _ = qemu()
    process.kill()
    process.wait()
    qemu_exit.end("vt-0", "u")
