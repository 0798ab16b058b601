"""A user's disk: tests without root. The daemon itself is tested in tests/e2e/test_userdisk.py."""

import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import LONG
from vtorque_core.base.errors import HostFault
from vtorque_core.resources import _user_daemon_exec, user_daemon, user_disk
from vtorque_core.resources.kinds import core_kind
from vtorque_core.resources.user_disk import UserDisk

SIZE = 1 << 20


def a_disk(tmp_path: Path, **changes: object) -> user_disk.ServedDisk:
    fields: dict[str, object] = {
        "source": str(tmp_path / "disk.raw"),
        "socket": str(tmp_path / "sock"),
        "lock": str(tmp_path / "lock"),
        "log": str(tmp_path / "log"),
        "uid": os.geteuid(),
        "gid": os.getegid(),
        "groups": (1000, 2000),
        "socket_owner": 64055,
    }
    return user_disk.ServedDisk(**(fields | changes))  # type: ignore[arg-type]


def a_plan(path: Path, **changes: object) -> _user_daemon_exec.DaemonPlan:
    fields: dict[str, object] = dict.fromkeys(_user_daemon_exec.DaemonPlan._fields, 0)
    fields |= {"uid": os.geteuid(), "source": str(path), "disk": "raw", "readonly": False}
    return _user_daemon_exec.DaemonPlan(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk.raw"
    path.touch()
    os.truncate(path, SIZE)
    return path


@pytest.fixture
def opened_disk() -> Iterator[list[int]]:
    descriptors: list[int] = []
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def test_messages_name_the_option_of_the_file(tmp_path: Path) -> None:
    assert a_disk(tmp_path).label == f"disk={tmp_path}/disk.raw"
    assert a_disk(tmp_path, readonly=True).label == f"img={tmp_path}/disk.raw"


def test_valid_file_is_opened_for_writing(disk: Path, opened_disk: list[int]) -> None:
    opened_disk.append(_user_daemon_exec._open_disk(a_plan(disk)))
    assert os.pwrite(opened_disk[0], b"x", 5) == 1
    assert not os.get_inheritable(opened_disk[0])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({4: b"\0\0\0\2", 72: b"\xff" * 8}, None),  # version 2 has no features
        ({0: b"QFI\xfa"}, "is not in qcow2 format"),
        ({4: b"\0\0\0\4"}, "is a qcow of version 4; versions 2 and 3"),
        ({8: b"\0\0\0\0\0\0\2\0"}, "has a backing file"),
        ({79: b"\4"}, "has an external data file"),
        ({35: b"\1"}, "is encrypted"),
        ({100: b"\0\0\0\0"}, "features that QEMU does not support"),  # header_length
        ({96: b"\0\0\0\7"}, "features that QEMU does not support"),  # refcount_order
        ({74: b"\1"}, "features that QEMU does not support"),
        ({24: b"\x7f"}, "tables do not fit its size of 9"),  # nearly 8 EiB
        ({31: b"\1"}, "tables do not fit its size of 1 bytes"),  # without a table
        ({36: b"\xff"}, "tables do not fit its size"),
        ({56: b"\xff"}, "tables do not fit its size"),
        ({60: b"\xff"}, "tables do not fit its size"),  # snapshots
    ],
)
def test_qcow2_that_refers_to_another_file_is_refused(
    disk: Path, opened_disk: list[int], changes: dict[int, bytes], why: str | None
) -> None:
    """The header fields are those of QEMU's docs/interop/qcow2.txt."""
    with disk.open("r+b") as file:
        for at, content in {0: b"QFI\xfb\0\0\0\3", 23: b"\x10", 103: b"h", **changes}.items():
            file.seek(at)
            file.write(content)
    if why is None:
        opened_disk.append(_user_daemon_exec._open_disk(a_plan(disk, disk="qcow2")))
        return
    with pytest.raises(_user_daemon_exec._Denied, match=why):
        _user_daemon_exec._open_disk(a_plan(disk, disk="qcow2"))


def test_format_is_chosen_by_the_file_name(tmp_path: Path) -> None:
    named = {name: a_disk(tmp_path, source=f"/d/{name}") for name in ("a", "a.qcow2", "qcow2")}
    assert {name: disk.disk for name, disk in named.items()} == {
        "a": "raw", "a.qcow2": "qcow2", "qcow2": "raw",
    }  # fmt: skip
    assert any("driver=qcow2,node-name=disk" in each for each in named["a.qcow2"].argv(3))


def test_read_only_disk_cannot_be_written_and_can_be_shared(
    disk: Path, opened_disk: list[int]
) -> None:
    for _ in range(2):
        opened_disk.append(_user_daemon_exec._open_disk(a_plan(disk, readonly=True)))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(opened_disk[0], b"x")
    with pytest.raises(_user_daemon_exec._Denied, match="in use by another job"):
        _user_daemon_exec._open_disk(a_plan(disk))


def test_disk_is_locked_for_one_job_while_its_daemon_lives(disk: Path) -> None:
    first = _user_daemon_exec._open_disk(a_plan(disk))
    os.close(os.open(disk, os.O_RDONLY))  # would end a lock of the process, not one of the file
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    os.close(first)
    with pytest.raises(_user_daemon_exec._Denied, match="in use by another job"):
        _user_daemon_exec._open_disk(a_plan(disk))
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(_user_daemon_exec._open_disk(a_plan(disk)))


def test_disk_locked_by_another_program_is_refused(disk: Path) -> None:
    """QEMU and qemu-img lock single bytes from 100 on (QEMU 7.2, block/file-posix.c)."""
    with disk.open("rb") as other:
        request = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 101, 1, 0)
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, request)
        with pytest.raises(_user_daemon_exec._Denied, match="in use by another job or program"):
            _user_daemon_exec._open_disk(a_plan(disk))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "does not exist on the node"),
        ("file/below", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("link", "symbolic link"),
        ("directory", "is a directory"),
        ("fifo", "is not a regular file"),
        ("socket", "is not a regular file"),
        ("empty", "has 0 bytes"),
        ("odd", "has 1000 bytes"),
    ],
)
def test_unusable_disk_is_refused_with_the_reason(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_bytes(bytes(512))
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    (tmp_path / "odd").write_bytes(bytes(1000))
    with socket.socket(socket.AF_UNIX) as place:
        place.bind(str(tmp_path / "socket"))
    with pytest.raises(_user_daemon_exec._Denied, match=why):
        _user_daemon_exec._open_disk(a_plan(tmp_path / name))


def test_disk_of_another_user_is_refused(disk: Path) -> None:
    with pytest.raises(
        _user_daemon_exec._Denied, match=f"belongs to uid {os.geteuid()}, not to you"
    ):
        _user_daemon_exec._open_disk(a_plan(disk, uid=os.geteuid() + 1))


def test_only_the_users_fault_is_marked() -> None:
    for error, mark in ((_user_daemon_exec._Denied("x"), "!"), (_user_daemon_exec._Step("x"), "")):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            _user_daemon_exec._report(a_plan(Path("/"), report_fd=write_end), error)
        os.waitpid(child, 0)
        os.close(write_end)
        assert os.read(read_end, 10).decode() == f"{mark}x"
        os.close(read_end)


def test_arguments_contain_no_path_of_the_user(tmp_path: Path) -> None:
    argv = a_disk(tmp_path, source="/home/u/a,b=c{source}").argv(7)
    assert argv == (
        "/usr/bin/qemu-storage-daemon",
        "--blockdev",
        "driver=file,node-name=file,filename=/proc/self/fd/{source},locking=off,"
        "auto-read-only=off,discard=unmap",
        "--blockdev",
        "driver=raw,node-name=disk,file=file,discard=unmap",
        "--nbd-server",
        "addr.type=fd,addr.str=7",
        "--export",
        "type=nbd,id=disk,node-name=disk,name=,writable=on",
    )


def test_read_only_disk_is_exported_read_only(tmp_path: Path) -> None:
    argv = " ".join(a_disk(tmp_path, readonly=True).argv(7))
    assert argv.count("read-only=on") == 2
    assert argv.endswith("writable=off")
    assert "discard" not in argv


def test_namespace_maps_no_root() -> None:
    assert user_daemon.id_map(None, [1000, 1001, 5]) == "5 5 1\n1000 1000 2\n"


def test_job_of_root_creates_no_disk(tmp_path: Path) -> None:
    with pytest.raises(HostFault, match="id 0"):
        a_disk(tmp_path, uid=0).start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "ready"),
    [
        (b"NBDMAGICIHAVEOPT\0\x03", True),
        (b"", False),
        (b"SSH-2.0-OpenSSH_9.2", False),
    ],
)
def test_ready_is_a_greeting(tmp_path: Path, said: bytes, ready: bool) -> None:
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as probe:
        listener.bind(path)
        listener.listen(1)
        probe.setblocking(False)
        assert user_disk._sends_greeting(probe, path) is False  # no output yet
        server = listener.accept()[0]
        with server:
            server.sendall(said)
            assert user_disk._sends_greeting(probe, path) is ready
            server.settimeout(180)
            if ready:
                # Client flags, then NBD_OPT_ABORT without data.
                assert server.recv(100) == b"\0\0\0\1IHAVEOPT\0\0\0\2\0\0\0\0"


def test_record_contains_only_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(user_disk.ServedDisk, "start", lambda d: calls.append(("start", d)))
    monkeypatch.setattr(user_daemon, "stop", lambda lock, end: calls.append(("stop", lock)))
    disk = a_disk(tmp_path)
    UserDisk(disk).create()
    again = core_kind("userdisk")(lock=disk.lock)  # type: ignore[call-arg]
    again.release()
    assert calls == [("start", disk), ("stop", disk.lock)]
    with pytest.raises(ValueError, match="the field 'service' is required"):
        again.create()


CALLS = """
import ctypes, errno, os, socket, threading
from pathlib import Path
from vtorque_core.resources import _user_daemon_exec as launcher
libc = ctypes.CDLL(None, use_errno=True)
launcher.restrict_disk_calls()

def refused(name, call):
    try:
        call()
    except PermissionError:
        return
    print(name, "was possible")

def raw(number, *arguments):
    if libc.syscall(ctypes.c_long(number), *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

refused("fork", os.fork)
refused("socket", lambda: socket.socket(socket.AF_INET))
refused("unshare", lambda: launcher.unshare(launcher.CLONE_NEWUSER))
refused("mount", lambda: launcher._mount("none", "/none", None, 0))
refused("open_tree", lambda: raw(launcher.SYS_OPEN_TREE, -1, b"", 0))
refused("io_uring_setup", lambda: raw(425, 1, None))
thread = threading.Thread(target=print, args=("threads are",), kwargs={"flush": True})
thread.start()
thread.join()
with open(os.devnull, "rb") as file:
    print("files are", file.read() == b"")
"""


def test_storage_daemon_may_start_threads_and_open_no_more_files() -> None:
    done = subprocess.run(
        (sys.executable, "-c", CALLS), capture_output=True, text=True, check=True, timeout=LONG
    )
    assert done.stdout == "threads are\nfiles are True\n"


def test_numbers_of_refused_system_calls_match_the_kernel() -> None:
    """The kernel's numbers come from linux-libc-dev, which libc6-dev needs."""
    header = Path("/usr/include/asm-generic/unistd.h").read_text()
    said = dict(re.findall(r"#define __NR_(\w+)\s+([0-9]+)$", header, re.MULTILINE))
    names = {int(number): name for name, number in said.items()}
    numbers = [call for call in _user_daemon_exec._NOT_FOR_A_DISK if isinstance(call, int)]
    assert [names.get(number) for number in numbers] == [
        "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick",
        "mount_setattr", "quotactl_fd", None,
    ]  # fmt: skip


def test_served_file_is_identified_and_a_dead_daemon_is_a_host_fault(tmp_path: Path) -> None:
    lock, file = tmp_path / "disk-data.lock", tmp_path / "user.raw"
    lock.touch()
    file.write_bytes(b"12345")
    code = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with file.open() as source:
        number = source.fileno()
        words = [str(lock), f"driver=file,filename=/proc/self/fd/{number},locking=off"]
        held = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[number],
        )
    with held:
        assert held.stdout is not None and held.stdout.readline() == b"locked\n"
        file.rename(tmp_path / "elsewhere")  # by no path
        found = user_disk.served_file(lock)
        assert (found.st_ino, found.st_size) == ((tmp_path / "elsewhere").stat().st_ino, 5)
        held.communicate(b"")
    with pytest.raises(HostFault, match="cannot read the status of the file of disk-data"):
        user_disk.served_file(lock)
