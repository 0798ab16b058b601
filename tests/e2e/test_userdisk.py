"""The user's own disk at /data, and the privileges of its daemon, on a real node as root."""

import fcntl
import hashlib
import os
import pwd
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import daemons
from daemons import holders
from patience import eventually
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.resources import user_daemon, user_disk

pytestmark = pytest.mark.e2e

MIB = 1 << 20
OTHER = "vte2e2"
QEMU_USER = "libvirt-qemu"


@pytest.fixture
def disk(node) -> Iterator[Path]:
    """An ext4 file system that the user has made in their own file."""
    path = node.home / "data.raw"
    node.as_user("/usr/bin/truncate", "-s", "64M", str(path))
    node.as_user("/usr/sbin/mke2fs", "-q", "-F", "-t", "ext4", str(path))
    path.chmod(0o640)
    yield path
    path.unlink()


def content(disk: Path, name: str) -> bytes:
    """Return a file of the file system as seen by the host."""
    argv = ["debugfs", "-R", f"cat {name}", str(disk)]
    return subprocess.run(argv, check=True, capture_output=True, timeout=180).stdout


# -- In jobs ---------------------------------------------------------------------------------------


def test_raw_disk_keeps_files_written_by_a_job(clean, disk):
    """The first of two guests has it; in the next job that job's only guest."""
    before = disk.stat()
    option = ("-vm", f"disk={disk}")
    wrote = clean.job(
        "#!/bin/sh\nset -e\nstat -c '%U %G' /data\necho kept > /data/kept\nid -u\n"
        "grep -c /data /proc/mounts\n"
        "head -c 5000000 /dev/urandom > /data/big\nsha256sum < /data/big\n",
        "-vm", f"disk={disk},vms_per_node=2",
    )  # fmt: skip
    assert (wrote.code, wrote.err) == (0, b"")
    owner, uid, mounts, digest = wrote.out.decode().splitlines()
    assert mounts == "1"
    assert owner == f"{clean.user} {clean.user}"
    assert content(disk, "kept") == b"kept\n"
    read = clean.job("#!/bin/sh\ncat /data/kept\nsha256sum < /data/big\n", *option)
    assert read.code == 0
    assert read.out.decode().splitlines() == ["kept", digest]
    after = disk.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (
        before.st_uid, before.st_gid, stat.S_IFREG | 0o640,
    )  # fmt: skip
    assert after.st_uid == int(uid)
    assert after.st_size == 64 * MIB


@pytest.mark.full
def test_qcow2_disk_keeps_files_written_by_a_job(clean, disk):
    qcow2 = disk.with_suffix(".qcow2")
    argv = ("qemu-img", "convert", "-f", "raw", "-O", "qcow2", disk, qcow2)
    subprocess.run(argv, check=True, timeout=180)
    os.chown(qcow2, disk.stat().st_uid, disk.stat().st_gid)
    try:
        wrote = clean.job(
            "#!/bin/sh\nhead -c 9000000 /dev/urandom > /data/big && sha256sum < /data/big\n",
            *("-vm", f"disk={qcow2}"),
        )
        assert wrote.code == 0, wrote.err
        subprocess.run(["qemu-img", "check", "-q", "-f", "qcow2", qcow2], check=True, timeout=180)
        argv = ("qemu-img", "convert", "-f", "qcow2", "-O", "raw", qcow2, disk)
        subprocess.run(argv, check=True, timeout=180)
    finally:
        qcow2.unlink()
    assert hashlib.sha256(content(disk, "big")).hexdigest() == wrote.out.split()[0].decode()


@pytest.mark.full
def test_second_job_on_the_same_disk_is_refused(two_slots, clean, disk):
    marks = [clean.home / name for name in ("started", "go")]
    text = (
        "#!/bin/sh\necho one > /data/one\ntouch ~/started\n"
        "while ! [ -e ~/go ]; do sleep 0.1; done\necho two > /data/two\n"
    )
    option = ("-vm", f"disk={disk}")
    outputs = ("-o", "/dev/null", "-j", "oe")
    done = clean.as_user("vsub", *outputs, *option, clean.script(text, "first.sh"))
    first = done.stdout.decode().strip()
    try:
        clean.wait_for(marks[0].exists, what="the first job's start")
        second = clean.job("#!/bin/sh\necho ran\n", *option)
        assert second.code == 121
        assert second.out == b""
        assert f"disk={disk}: is in use by another job" in second.err.decode()
        assert clean.state_of(first) == "R"
    finally:
        clean.as_user("/usr/bin/touch", str(marks[1]))
        clean.wait_for(lambda: clean.state_of(first) in (None, "C"), what="the first job's end")
        for mark in marks:
            mark.unlink(missing_ok=True)
    assert (content(disk, "one"), content(disk, "two")) == (b"one\n", b"two\n")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param("missing", "does not exist on the node", marks=pytest.mark.full),
        pytest.param("link", "symbolic link", marks=pytest.mark.full),
        ("hidden", "Permission denied"),
        ("shared", "belongs to uid"),
        pytest.param("folder", "is a directory", marks=pytest.mark.full),
    ],
)
def test_file_that_is_not_a_disk_of_the_user_is_refused(clean, disk, name, why):
    """Another user's file is neither opened nor changed, with any name."""
    hidden = Path("/home", OTHER, "d.raw")
    hidden.write_bytes(bytes(MIB))
    os.chown(hidden, pwd.getpwnam(OTHER).pw_uid, -1)
    shared = Path("/home", "vte2e-shared.raw")
    shared.write_bytes(bytes(MIB))
    shared.chmod(0o666)
    link = clean.home / "link.raw"
    link.symlink_to(hidden)
    paths = {
        "missing": clean.home / "none.raw", "link": link, "hidden": hidden, "shared": shared,
        "folder": clean.home,
    }  # fmt: skip
    try:
        result = clean.job("#!/bin/sh\necho ran\n", "-vm", f"disk={paths[name]}")
        assert result.code == 121
        assert result.out == b""
        assert f"disk={paths[name]}: " in result.err.decode()
        assert why in result.err.decode()
        assert hidden.read_bytes() == shared.read_bytes() == bytes(MIB)
    finally:
        for path in (link, hidden, shared):
            path.unlink()


@pytest.mark.full
def test_disk_without_a_file_system_is_a_fault_of_the_user(clean):
    """Torque and Slurm would requeue the job, and finally hold it."""
    path = clean.home / "data.QCOW2"
    clean.as_user("/usr/bin/qemu-img", "create", "-q", "-f", "qcow2", str(path), "64M")
    os.truncate(path, MIB)  # otherwise its size shows that it is no raw disk
    try:
        result = clean.job("#!/bin/sh\necho ran\n", "-vm", f"disk={path}")
        assert (result.code, result.out) == (121, b"")
        assert f"disk={path}, in guest " in result.err.decode()
        assert "the file begins like a qcow2, whose name must end in .qcow2" in result.err.decode()
    finally:
        path.unlink()


# -- The daemon alone ------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    with daemons.place_for(user_daemon.stop) as path:
        yield path


@pytest.fixture
def disk_of_unknown_user(place: Path) -> user_disk.ServedDisk:
    """A disk of a user without an entry in the user database."""
    uid, run = 61001, place / "run"
    source = place / "disk, raw"
    source.touch()
    os.truncate(source, MIB)
    os.chown(source, uid, uid)
    source.chmod(0o600)
    return user_disk.ServedDisk(
        source=str(source), socket=str(run / "d.sock"), lock=str(run / "d.lock"),
        log=str(run / "d.log"), uid=uid, gid=uid, groups=(uid, 61010, 0),
        socket_owner=pwd.getpwnam(QEMU_USER).pw_uid,
    )  # fmt: skip


def as_uid(uid: int, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, user=uid, group=uid, extra_groups=[], cwd="/",
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def nbd(one: user_disk.ServedDisk, command: str, uid: int) -> subprocess.CompletedProcess[str]:
    return as_uid(uid, "qemu-io", "-f", "raw", "-c", command, f"nbd+unix:///?socket={one.socket}")


def test_daemon_runs_as_the_user_without_privileges(disk_of_unknown_user):
    disk_of_unknown_user.start()
    (pid,) = holders(disk_of_unknown_user.lock)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    now = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    assert now["Uid"] == now["Gid"] == [str(disk_of_unknown_user.uid)] * 4
    assert now["Groups"] == [str(disk_of_unknown_user.uid), "61010"]
    for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        assert int(now[name][0], 16) == 0
    assert now["NoNewPrivs"] == ["1"]
    assert now["Seccomp"] == ["2"]
    assert now["NSpid"] == [str(pid), "1"]
    assert now["PPid"] != [str(os.getpid())]
    assert os.getsid(pid) == pid
    # The maps are behind the check of ptrace(2), which also guards the memory.
    assert (
        "Permission denied" in as_uid(disk_of_unknown_user.uid, "cat", f"/proc/{pid}/maps").stderr
    )
    place = Path(disk_of_unknown_user.socket).stat()
    assert (place.st_uid, stat.S_IMODE(place.st_mode)) == (disk_of_unknown_user.socket_owner, 0o600)


def test_only_the_qemu_user_can_connect_to_the_daemon(disk_of_unknown_user):
    disk_of_unknown_user.start()
    wrote = nbd(disk_of_unknown_user, "write -P 0x41 4096 512", disk_of_unknown_user.socket_owner)
    assert wrote.returncode == 0, wrote.stderr
    for uid in (disk_of_unknown_user.uid, 65534):
        assert "Permission denied" in nbd(disk_of_unknown_user, "read 0 512", uid).stderr
    assert Path(disk_of_unknown_user.source).read_bytes()[4096:4609] == b"A" * 512 + b"\0"
    assert Path(disk_of_unknown_user.source).stat().st_size == MIB


def test_discarded_blocks_become_holes(disk_of_unknown_user):
    Path(disk_of_unknown_user.source).write_bytes(b"x" * MIB)
    disk_of_unknown_user.start()
    done = nbd(disk_of_unknown_user, "discard 0 512k", disk_of_unknown_user.socket_owner)
    assert done.returncode == 0, done.stderr
    facts = Path(disk_of_unknown_user.source).stat()
    assert (facts.st_size, facts.st_blocks <= 1024 + 16) == (MIB, True)


@pytest.fixture
def packed(disk_of_unknown_user) -> user_disk.ServedDisk:
    """The same disk's name in qcow2, without a file yet."""
    return replace(
        disk_of_unknown_user, source=str(Path(disk_of_unknown_user.source).with_name("disk.qcow2"))
    )


def create(packed: user_disk.ServedDisk, *options: str) -> None:
    argv = ("qemu-img", "create", "-q", "-f", "qcow2", *options, packed.source)
    subprocess.run([*argv, "1M"], check=True, timeout=180)
    os.chown(packed.source, packed.uid, packed.gid)


@pytest.mark.parametrize("compat", ["0.10", "1.1"])
def test_qcow2_is_served_with_its_content(packed, compat):
    create(packed, "-o", f"compat={compat}")
    packed.start()
    wrote = nbd(packed, "write -P 5 64k 64k", packed.socket_owner)
    assert wrote.returncode == 0, wrote.stderr
    user_daemon.stop(packed.lock, time.monotonic() + 10)
    argv = ("qemu-io", "-f", "qcow2", "-r", "-c", "read -P 5 64k 64k", packed.source)
    read = as_uid(packed.uid, *argv)
    assert "65536/65536" in read.stdout and "failed" not in read.stdout, read


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("-F", "raw", "-b", "{raw}"), "has a backing file"),
        (("-o", "data_file={raw}"), "has an external data file"),
    ],
)
def test_qcow2_that_refers_to_another_file_is_refused(disk_of_unknown_user, packed, options, why):
    """The other file may be the user's own: the guest would get a disk that was not requested."""
    other = Path(disk_of_unknown_user.source).with_name("other")
    other.write_bytes(bytes(MIB))
    create(packed, *(word.format(raw=other) for word in options))
    with pytest.raises(Refused, match=why):
        packed.start()


def add_bitmaps(path: Path, count: int) -> None:
    """Add ``count`` bitmaps to a new qcow2 file: 16 MiB of ones in memory, a few bytes in the file.

    Format: "Bitmaps extension" and "Persistent bitmaps" in docs/interop/qcow2.txt of QEMU.
    """
    argv = ("qemu-img", "bitmap", "--add", "-g", "512", path, "first")
    subprocess.run(argv, check=True, timeout=180)
    data = bytearray(path.read_bytes())
    cluster = bytes(-len(data) % 65536)
    extension = data.index(b"\x23\x85\x28\x75") + 8
    (place,) = struct.unpack_from(">Q", data, extension + 16)
    _, entries = struct.unpack_from(">QI", data, place)
    data += cluster + struct.pack(">Q", 1) * entries
    table = len(data) - 8 * entries
    data += bytes(-len(data) % 65536)
    bitmaps = b"".join(
        struct.pack(">QIIBBHI8s", table, entries, 2, 1, 9, 8, 0, b"%08d" % number)
        for number in range(count)
    )
    struct.pack_into(">IIQQ", data, extension, count, 0, len(bitmaps), len(data))
    data += bitmaps
    path.write_bytes(data + bytes(-len(data) % 65536))


def test_qcow2_that_needs_too_much_memory_is_refused(packed):
    """A file of 600 KB would use 1.6 GiB of the node. Without bitmaps it uses 40 MiB."""
    subprocess.run(("qemu-img", "create", "-q", "-f", "qcow2", packed.source, "64G"), check=True)
    add_bitmaps(Path(packed.source), 100)
    os.chown(packed.source, packed.uid, packed.gid)
    with pytest.raises(Refused, match=r"did not start: .*(allocate|memory)"):
        packed.start(timeout=3600)
    assert holders(packed.source) == set()


def test_corrupt_qcow2_is_a_fault_of_the_user(packed):
    """A fault of the host would start the job again on other nodes."""
    create(packed)
    with Path(packed.source).open("r+b") as file:
        file.seek(40)
        file.write(struct.pack(">Q", 513))  # offset of the first-level table
    os.chown(packed.source, packed.uid, packed.gid)
    with pytest.raises(Refused, match=r"did not start: .*L1 table"):
        packed.start()


def test_qcow2_that_ends_its_daemon_is_a_fault_of_the_user(packed):
    create(packed)
    os.chown(packed.source, packed.uid, packed.gid)
    with pytest.raises(Refused, match="did not start"):
        replace(packed, program="/bin/false").start(timeout=3600)


def test_disk_with_a_lease_is_a_fault_of_the_user(disk_of_unknown_user):
    handler = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks to end the lease
    try:
        with Path(disk_of_unknown_user.source).open("rb") as held:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            with pytest.raises(Refused, match="is in use by another job or program"):
                disk_of_unknown_user.start()
    finally:
        signal.signal(signal.SIGIO, handler)


def test_qcow2_header_in_a_raw_disk_is_data(disk_of_unknown_user):
    """A file's content that a guest writes must not be opened as a file by its next job."""
    argv = ("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "/etc/hostname")
    made = Path(disk_of_unknown_user.source).with_name("made")
    subprocess.run([*argv, made, "1M"], check=True, timeout=180)
    Path(disk_of_unknown_user.source).write_bytes(made.read_bytes().ljust(MIB, b"\0"))
    disk_of_unknown_user.start()
    read = nbd(disk_of_unknown_user, "read -v 0 512", disk_of_unknown_user.socket_owner)
    assert "51 46 49 fb" in read.stdout, read


def test_read_only_disk_cannot_be_written(disk_of_unknown_user):
    Path(disk_of_unknown_user.source).chmod(0o400)
    with pytest.raises(Refused, match="cannot be opened by you: Permission denied"):
        disk_of_unknown_user.start()
    replace(disk_of_unknown_user, readonly=True).start()
    assert (
        nbd(disk_of_unknown_user, "write 0 512", disk_of_unknown_user.socket_owner).returncode != 0
    )
    assert Path(disk_of_unknown_user.source).read_bytes() == bytes(MIB)


def test_stop_unlocks_the_disk_and_is_idempotent(disk_of_unknown_user):
    run = Path(disk_of_unknown_user.lock).parent
    second = replace(
        disk_of_unknown_user,
        socket=str(run / "e.sock"),
        lock=str(run / "e.lock"),
        log=str(run / "e.log"),
    )
    disk_of_unknown_user.start()
    with pytest.raises(HostFault, match="already runs"):
        disk_of_unknown_user.start()
    with pytest.raises(Refused, match=r"disk=.*/disk, raw: is in use by another job"):
        second.start()
    script = "import sys, time; from vtorque_core.resources import user_daemon; "
    script += "user_daemon.stop(sys.argv[1], time.monotonic() + 30)"
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", script, disk_of_unknown_user.lock], check=True, timeout=180
        )
    assert holders(disk_of_unknown_user.source) == set()
    second.start()
    user_daemon.stop(second.lock, time.monotonic() + 30)
    assert {path.suffix for path in run.iterdir()} == {".log"}


def test_daemon_that_cannot_start_is_reported(disk_of_unknown_user):
    for program, why in (("/bin/false", "/bin/false for .* did not start"),
                         ("/nonexistent", "cannot execute /nonexistent")):  # fmt: skip
        with pytest.raises(HostFault, match=why):
            replace(disk_of_unknown_user, program=program).start(timeout=3600)
    assert holders(disk_of_unknown_user.source) == holders(disk_of_unknown_user.lock) == set()


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06])
def test_killed_start_leaves_nothing(disk_of_unknown_user, delay):
    disk = disk_of_unknown_user
    daemons.kill_a_start("user_disk", f"ServedDisk(**{vars(disk)!r}).start", delay)
    user_daemon.stop(disk.lock, time.monotonic() + 30)
    assert holders(disk.lock) == set()
    # The process that opens the file does not hold the lock, and ends after the launcher.
    eventually(lambda: holders(disk.source) == set())
    assert {path.suffix for path in Path(disk.lock).parent.iterdir()} <= {".log"}


def on_hung_file_system(when):
    """Return the lines of hung_fuse.py."""
    program = Path(__file__).parents[1] / "support/hung_fuse.py"
    argv = ["unshare", "--mount", sys.executable, program, when]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_hung_file_system_of_a_user_does_not_keep_the_lock_of_the_daemon():
    """Otherwise the job's cores and memory stayed claimed as long as the user wants.

    The user's own image is never the node's fault.
    """
    start, of_image, stop = on_hung_file_system("start")
    assert start.startswith("HostFault: disk=") and start.endswith("the daemon does not answer")
    assert of_image.startswith("Refused: ") and of_image.endswith("the daemon does not answer")
    assert stop == "stopped"


def test_file_system_that_hangs_later_keeps_neither_the_daemon_nor_root():
    """SIGKILL does not end a process that waits for a FUSE server."""
    assert on_hung_file_system("run") == ["started", "has a size", "stopped"]
