"""Hanging, full or redirected user directories: root does not write there and does not wait."""

import ctypes
import json
import os
import pwd
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from patience import eventually
from processes import alive
from vtorque_archive import node, send, write
from vtorque_archive.plugin import Settings
from vtorque_core.api import JobAttempt, Paths, kept_records

pytestmark = pytest.mark.e2e

libc = ctypes.CDLL(None, use_errno=True)
NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def top():
    """Return a directory that all users can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="archive-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.fixture
def place(top):
    (top / "state").mkdir()
    mine = JobAttempt("42.srv", 0, NOBODY.pw_name, NOBODY.pw_uid, "n1")
    kept_records.keep_facts(Paths(top / "state", top / "run"), mine, started=1.0)
    return kept_records.place(Paths(top / "state", top / "run"), mine)


@pytest.fixture
def home(top):
    """Return a directory of the user's."""
    path = top / "home"
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
    return path


def sent(place, directory):
    os.waitpid(send.send(place, Settings(directory=f"{directory}/{{uid}}")), 0)


def archive_directory(directory):
    return directory / str(NOBODY.pw_uid)


def test_archive_is_owned_by_the_user(place, home):
    sent(place, home)
    (path,) = archive_directory(home).iterdir()
    for each in (archive_directory(home), path):
        assert (each.stat().st_uid, each.stat().st_gid) == (NOBODY.pw_uid, NOBODY.pw_gid)


def test_links_give_no_access_beyond_that_of_the_user(place, home, top):
    roots = top / "roots"
    roots.mkdir(mode=0o755)
    (roots / "42.srv.0@n1.zip").write_text("root's")
    archive_directory(home).symlink_to(roots)
    sent(place, home)
    archive_directory(home).unlink()
    archive_directory(home).mkdir(mode=0o777)  # owned by root, as if made before the user's
    sent(place, home)
    assert list(archive_directory(home).iterdir()) == []
    (home / "link").symlink_to(roots)
    sent(place, home / "link")
    assert [(p.name, p.read_text()) for p in roots.iterdir()] == [("42.srv.0@n1.zip", "root's")]


def test_link_in_place_of_the_archive_is_replaced(place, home, top):
    (top / "roots").write_text("root's")
    archive_directory(home).mkdir()
    os.chown(archive_directory(home), NOBODY.pw_uid, NOBODY.pw_gid)
    (archive_directory(home) / "42.srv.0@n1.zip").symlink_to(top / "roots")
    sent(place, home)
    assert (top / "roots").read_text() == "root's"
    assert not (archive_directory(home) / "42.srv.0@n1.zip").is_symlink()


def test_full_file_system_leaves_no_partial_archive(place, home):
    place.write("log.jsonl", os.urandom(1 << 20))
    options = f"size=64k,uid={NOBODY.pw_uid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", home], check=True, timeout=60)
    try:
        sent(place, home)
        assert list(archive_directory(home).iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", home], check=True, timeout=60)


def start_writer(place, directory):
    """Call the hook as the epilogue does, in a child that ends; return the writer's pid."""
    pids, own = os.pipe()
    hook = os.fork()
    if hook == 0:
        real = os.fork

        def told():
            os.fork = real
            pid = real()
            if pid:
                os.write(own, str(pid).encode())
            return pid

        os.fork = told
        node.vtorque_job_ended(place, {Settings: Settings(directory=f"{directory}/{{uid}}")})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(hook, 0)[1]) == 0
    os.close(own)
    pid = int(os.read(pids, 100))
    os.close(pids)
    return pid


def test_hanging_file_system_does_not_block_the_epilogue(place, home, monkeypatch):
    """A FUSE mount without a daemon: the hook has ended, and the writer process ends soon."""
    monkeypatch.setattr(send, "PATIENCE", 1)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id={NOBODY.pw_uid},group_id={NOBODY.pw_gid}"
    assert libc.mount(b"x", bytes(home), b"fuse", 0, options.encode()) == 0, ctypes.get_errno()
    try:
        pid = start_writer(place, home)
        eventually(lambda: not alive(pid))
    finally:
        libc.umount2(bytes(home), 2)  # MNT_DETACH
        os.close(device)


def test_stopped_writer_process_is_killed(place, home, monkeypatch):
    monkeypatch.setattr(send, "PATIENCE", 1)
    seen = home / "pid"

    def stop(*_):
        seen.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(write, "write", stop)
    pid = start_writer(place, home)
    eventually(lambda: not alive(pid))
    assert seen.exists()
    eventually(lambda: not alive(seen.read_text()))


def test_writer_process_has_no_files_or_privileges_of_root(place, home, monkeypatch):
    """Files of root are, for example, a job's lock and the epilogue's output."""
    seen = home / "seen"

    def is_open(number):
        try:
            os.fstat(number)
        except OSError:
            return False
        return True

    def look(*_):
        files = [number for number in range(200) if is_open(number)]
        status = Path("/proc/self/status").read_text().splitlines()
        rights = [line.split()[1] for line in status if line.startswith(("CapEff", "CapPrm"))]
        ids = [*os.getresuid(), *os.getresgid()]
        said = {"files": files, "rights": rights, "ids": ids, "groups": os.getgroups(),
                "dumpable": libc.prctl(3, 0, 0, 0, 0), "session": os.getsid(0),
                "cwd": str(Path.cwd())}  # fmt: skip
        seen.write_text(json.dumps(said))

    monkeypatch.setattr(write, "write", look)
    with tempfile.TemporaryFile() as lock:
        assert lock.fileno() > 2
        sent(place, home)
    said = json.loads(seen.read_text())
    assert said["files"] == [0, 1, 2, 4], "more than /dev/null and the result's descriptor are open"
    assert said["rights"] == ["0" * 16] * 2 and said["cwd"] == "/"
    assert said["dumpable"] != 1, "the user could trace the process (PR_GET_DUMPABLE, prctl(2))"
    assert said["ids"] == [NOBODY.pw_uid] * 3 + [NOBODY.pw_gid] * 3
    assert set(said["groups"]) <= {NOBODY.pw_gid} and said["session"] != os.getsid(0)
