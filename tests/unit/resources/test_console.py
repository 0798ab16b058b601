"""The process that records a guest's console; here the test is QEMU."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest

from journalled import through_the_journal
from patience import eventually
from vtorque_core.base._console import DROPPED, LARGEST, enter_groups
from vtorque_core.base.locks import lock_holder
from vtorque_core.resources.console import ConsoleRecorder

UID = 65534 if os.geteuid() == 0 else os.geteuid()


@pytest.fixture
def recorder(tmp_path):
    path, log = tmp_path / "console.sock", tmp_path / "console.log"
    found = ConsoleRecorder((str(path), str(log), str(UID)), str(tmp_path / "console.lock"))
    found.create()
    yield found
    found.release()


def connected(recorder):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(recorder.argv[0])
    return connection


def pid_of(recorder):
    with Path(recorder.lock).open("rb+") as lock:
        return lock_holder(lock.fileno())


def test_recorder_writes_the_console_and_ends_with_qemu(recorder, tmp_path):
    log = tmp_path / "console.log"
    assert log.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "console.sock").stat().st_uid == UID
    with connected(recorder) as qemu:
        qemu.sendall(b"login: ")
        eventually(lambda: log.read_bytes() == b"login: ")
        status = (tmp_path / f"/proc/{pid_of(recorder)}/status").read_text()
        assert f"\nUid:\t{UID}\t{UID}\t{UID}\t{UID}\n" in status
        assert "NoNewPrivs:\t1\n" in status
        assert os.geteuid() == UID or "CapEff:\t0000000000000000\n" in status
        qemu.sendall(b"panic")
    eventually(lambda: pid_of(recorder) is None)
    assert log.read_bytes() == b"login: panic"


@pytest.mark.parametrize(
    ("lines", "joined"),
    [
        ("0::/m.slice/q\xff.scope/libvirt\n", ["m.slice/q\xff.scope/libvirt"]),
        ("0::/a\n", ["unified/a"]),
        ("3:cpu,cpuacct:/m/q:1/emulator\n1:name=systemd:/m\n0::/\n",
         ["cpu,cpuacct/m/q:1/emulator", "systemd/m", "unified"]),
        ("2:cpuset:/gone\n1:pids:/m\n", ["pids/m"]),
        ("", []),
    ],
)  # fmt: skip
def test_recorder_enters_all_control_groups_of_qemu(tmp_path, lines, joined):
    """A group that has vanished does not prevent entering the others."""
    groups, process = tmp_path / "groups", tmp_path / "7"
    process.mkdir()
    (process / "cgroup").write_bytes(lines.encode("latin-1"))
    found = [groups / os.fsdecode(each.encode("latin-1")) / "cgroup.procs" for each in joined]
    for path in found:
        path.parent.mkdir(parents=True)
        path.touch()
    enter_groups(7, str(tmp_path), str(groups))
    assert [path.read_text() for path in found] == ["0"] * len(found)
    assert sorted(groups.rglob("cgroup.procs")) == sorted(found)
    enter_groups(8, str(tmp_path), str(groups))  # QEMU has ended


def test_recorder_gives_a_slow_client_the_last_output_after_sigterm(recorder):
    """When QEMU ends, systemd ends its control group."""
    sent = 0
    with connected(recorder) as qemu, connected(recorder) as client:
        client.sendall(b"x")
        assert qemu.recv(1) == b"x"
        qemu.settimeout(1)
        with contextlib.suppress(TimeoutError):  # the recorder waits for the client
            while True:
                sent += qemu.send(b"y" * 1024)
        os.kill(pid_of(recorder), signal.SIGTERM)
        qemu.close()
        assert sum(map(len, iter(lambda: client.recv(1 << 20), b""))) == sent


def test_recorder_bounds_the_file_and_keeps_its_end(recorder, tmp_path):
    log, sent = tmp_path / "console.log", bytes(range(256)) * (12 << 10)
    before, largest = log.stat().st_ino, 0
    with connected(recorder) as qemu:
        for at in range(0, len(sent), 1 << 16):
            qemu.sendall(sent[at : at + (1 << 16)])
            largest = max(largest, log.stat().st_size)
        qemu.sendall(b"end")
    eventually(lambda: pid_of(recorder) is None)
    found = log.read_bytes()
    assert DROPPED < len(found) <= LARGEST
    assert largest <= LARGEST < len(sent)
    assert (sent + b"end").endswith(found)
    assert log.stat().st_ino == before, "the log was replaced, but a warm guest's log has two links"


def test_recorder_serves_one_client(recorder, tmp_path):
    """Clients are ``virsh console`` and the job shell of a guest that boots late."""
    log = tmp_path / "console.log"
    with connected(recorder) as qemu:
        for said in (b"one\n", b"two\n"):
            with connected(recorder) as client:
                client.sendall(b"typed")
                assert qemu.recv(16) == b"typed"
                qemu.sendall(said)
                assert client.recv(16) == said
        qemu.sendall(b"three\n")
        eventually(lambda: log.read_bytes() == b"one\ntwo\nthree\n")
        client = connected(recorder)
        client.sendall(b"x")
        assert qemu.recv(1) == b"x"
        qemu.sendall(b"last")
    with client:
        assert client.recv(16) == b"last"
        assert client.recv(16) == b"", "the connection stays open after the console has ended"


def test_client_that_reads_late_gets_every_byte(recorder):
    sent = os.urandom(3 << 20)
    with connected(recorder) as qemu, connected(recorder) as client:
        client.sendall(b"x")
        assert qemu.recv(1) == b"x"
        qemu.settimeout(0)
        rest, got = sent, b""
        while len(got) < len(sent):
            try:
                rest = rest[qemu.send(rest) :]
            except BlockingIOError:  # QEMU waits, too
                got += client.recv(1 << 20)
            if not rest:
                got += client.recv(1 << 20)
    assert got == sent


def test_dead_recorder_stops_neither_qemu_nor_the_release(recorder, tmp_path):
    with connected(recorder) as qemu:
        qemu.sendall(b"kept")
        eventually(lambda: (tmp_path / "console.log").read_bytes() == b"kept")
        os.kill(pid_of(recorder), signal.SIGKILL)
        eventually(lambda: pid_of(recorder) is None)
        with pytest.raises(BrokenPipeError):  # QEMU's chardev then discards output
            qemu.sendall(b"lost")
    again = through_the_journal(recorder, tmp_path)
    again.release()
    again.release()
    assert not (tmp_path / "console.lock").exists()
    assert (tmp_path / "console.log").read_bytes() == b"kept"


def test_recorder_replaces_the_one_of_a_failed_boot(recorder, tmp_path):
    with connected(recorder) as qemu:
        qemu.sendall(b"first")
        eventually(lambda: (tmp_path / "console.log").read_bytes() == b"first")
    recorder.release()
    recorder.create()
    with connected(recorder) as qemu:
        qemu.sendall(b"cold")
        eventually(lambda: (tmp_path / "console.log").read_bytes() == b"cold")
