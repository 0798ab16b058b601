"""The real virtiofsd, as root, without a guest: its start, its recovery and its end."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import daemons
from daemons import holders, make
from vtorque_core.base.errors import HostFault
from vtorque_core.resources import user_daemon, virtiofs_daemon

pytestmark = pytest.mark.e2e

USER, OTHER, SUBORDINATE = 61001, 61002, 100000
QEMU_UID = 64055  # libvirt-qemu on Debian


@pytest.fixture
def place() -> Iterator[Path]:
    with daemons.place_for(user_daemon.stop) as path:
        yield path


def share(place: Path, name: str) -> virtiofs_daemon.ServedDirectory:
    run = place / "run"
    return virtiofs_daemon.ServedDirectory(
        source=str(place / name), socket=str(run / f"{name}.sock"), lock=str(run / f"{name}.lock"),
        log=str(run / f"{name}.log"), uid=USER, gid=USER, groups=(USER,),
        subordinate_id=SUBORDINATE, readonly=False, socket_owner=QEMU_UID,
        owner_check=True,
    )  # fmt: skip


@pytest.fixture
def home(place: Path) -> Path:
    home = place / "home"
    make(home, None, 0o700, USER, USER)
    make(home / "mine", "mine", 0o600, USER, USER)
    make(home / "other", None, 0o700, OTHER, OTHER)
    return home


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_daemon_is_detached_and_out_of_the_users_reach(place: Path, home: Path) -> None:
    one = share(place, "home")
    one.start()
    (pid,) = holders(one.lock)
    now = status(pid)
    assert now["PPid"] != str(os.getpid())
    assert now["NSpid"].split() == [str(pid), "1"]
    assert os.getsid(pid) == pid
    root, other = (USER, SUBORDINATE) if one.user_is_root else (SUBORDINATE, USER)
    for ids in ("uid_map", "gid_map"):
        mapped = Path(f"/proc/{pid}/{ids}").read_text().split()
        assert mapped == f"0 {root} 1 {other} {other} 1".split()
    # The maps are behind the check of ptrace(2), which also guards the memory.
    done = subprocess.run(
        ["cat", f"/proc/{pid}/maps"], user=USER, group=USER, extra_groups=[],
        capture_output=True, text=True, timeout=180, cwd="/", check=False,
    )  # fmt: skip
    assert "Permission denied" in done.stderr
    limits = Path(f"/proc/{pid}/limits").read_text()
    memory = str((256 << 20) + one.nofile * 1024)
    assert limits.partition("Max data size")[2].split()[:2] == [memory, memory]
    sock = Path(one.socket).stat()
    assert (sock.st_uid, stat.S_IMODE(sock.st_mode)) == (QEMU_UID, 0o600)


@pytest.mark.parametrize("readonly", [False, True])
def test_daemon_mounts_stay_invisible_to_the_host(place: Path, home: Path, readonly: bool) -> None:
    one = replace(share(place, "home"), readonly=readonly)
    script = f"""
import pathlib, socket, time
from vtorque_core.resources import user_daemon, virtiofs_daemon
table = pathlib.Path("/proc/self/mountinfo")
before = table.read_text()
virtiofs_daemon.ServedDirectory(**{vars(one)!r}).start()
assert " shared:" in before and "hidepid" in before
assert table.read_text() == before
with socket.socket(socket.AF_UNIX) as qemu:
    qemu.connect({one.socket!r})
    qemu.settimeout(0.5)
    try:
        raise SystemExit(f"the daemon hung up: {{qemu.recv(1)!r}}")
    except TimeoutError:
        pass
    assert table.read_text() == before
    user_daemon.stop({one.lock!r}, time.monotonic() + 30)
"""
    steps = "mount --make-rshared / && mount -t proc -o hidepid=invisible proc /proc"
    argv = ["unshare", "-m", "sh", "-ec", f'{steps}; exec "$@"', "sh", sys.executable, "-c", script]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert daemons.CONNECTED.search(Path(one.log).read_text())


@pytest.mark.parametrize("readonly", [False, True])
def test_share_cannot_be_left_by_parent_directories_or_links(
    place: Path, home: Path, readonly: bool
) -> None:
    """The user may also move a directory out of the share on the host."""
    one = replace(share(place, "home"), readonly=readonly)
    if not one.user_is_root:
        pytest.skip("QEMU's own enters its directory when QEMU has come, and then by chroot alone")
    make(home / "moved", None, 0o700, USER, USER)
    make(place / "outside", None, 0o700, USER, USER)
    one.start()
    (pid,) = holders(one.lock)
    assert sorted(p.name for p in Path(f"/proc/{pid}/root").iterdir()) == ["mine", "moved", "other"]
    inside = os.open(f"/proc/{pid}/root/moved", os.O_PATH)
    (home / "moved").rename(place / "outside/moved")
    with pytest.raises(FileNotFoundError):
        os.stat("..", dir_fd=inside)
    os.close(inside)


def test_source_is_opened_as_the_user(place: Path, home: Path) -> None:
    make(place / "hidden", None, 0o700, OTHER, OTHER)
    make(place / "hidden/target", None, 0o755, USER, USER)
    cases = {
        "home/other": "belongs to uid",
        "hidden/target": "Permission denied",
        "home/mine": "Not a directory",
        "none": "No such file",
    }
    for source, why in cases.items():
        one = replace(share(place, "home"), source=str(place / source))
        with pytest.raises(HostFault, match=why):
            one.start()
        assert holders(one.lock) == set()
        user_daemon.stop(one.lock, time.monotonic() + 30)
    assert {p.suffix for p in (place / "run").iterdir()} == {".log"}


@pytest.mark.parametrize("readonly", [False, True])
def test_links_of_root_lead_to_the_source(place: Path, home: Path, readonly: bool) -> None:
    """Links such as /home/u to /data/u are absolute, relative or in a parent."""
    make(place / "data", None, 0o755, 0, 0)
    (place / "data/u").symlink_to("../home")
    (place / "link").symlink_to(place / "data/u")
    (place / "way").symlink_to("data")
    (place / "dot").symlink_to("./way/./u")
    for source in ("data/u", "link", "way/u", "dot"):
        one = replace(share(place, "home"), source=str(place / source), readonly=readonly)
        one.start()
        (pid,) = holders(one.lock)
        if one.user_is_root:
            assert sorted(p.name for p in Path(f"/proc/{pid}/root").iterdir()) == ["mine", "other"]
        user_daemon.stop(one.lock, time.monotonic() + 30)


def test_links_that_others_can_create_or_replace_are_not_followed(place: Path, home: Path) -> None:
    """The message names the link and the setting."""
    (place / "theirs").symlink_to("home")
    os.lchown(place / "theirs", USER, USER)
    make(place / "open", None, 0o777, 0, 0)
    (place / "open/link").symlink_to(home)
    make(place / "group", None, 0o775, 0, USER)
    (place / "group/link").symlink_to(home)
    make(place / "user", None, 0o755, USER, USER)
    make(place / "user/roots", None, 0o755, 0, 0)
    (place / "user/roots/link").symlink_to(home)
    (place / "circle").symlink_to("circle")
    for name in ("theirs", "open/link", "group/link", "user/roots/link", "circle"):
        one = replace(share(place, "home"), source=str(place / name))
        refusal = rf"{place / name} is a symbolic link .*source in \[shares\]"
        with pytest.raises(HostFault, match="Too many levels" if name == "circle" else refusal):
            one.start()
        assert holders(one.lock) == set()
        user_daemon.stop(one.lock, time.monotonic() + 30)


def test_root_link_in_a_sticky_directory_is_followed(place: Path, home: Path) -> None:
    make(place / "sticky", None, 0o1777, 0, 0)
    (place / "sticky/link").symlink_to(home)
    one = replace(share(place, "home"), source=str(place / "sticky/link"))
    one.start()
    assert len(holders(one.lock)) == 1


def test_daemon_that_exits_immediately_is_reported(place: Path, home: Path) -> None:
    one = replace(share(place, "home"), program="/bin/false")
    with pytest.raises(HostFault, match=r"/bin/false for .* did not start"):
        one.start(timeout=3600)
    with pytest.raises(HostFault, match="cannot execute /nonexistent"):
        replace(share(place, "home"), program="/nonexistent").start()
    assert holders(one.lock) == set()


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05])
@pytest.mark.parametrize("readonly", [False, True])
def test_killed_start_leaves_nothing(place: Path, home: Path, delay: float, readonly: bool) -> None:
    one = replace(share(place, "home"), readonly=readonly)
    daemons.kill_a_start("virtiofs_daemon", f"ServedDirectory(**{vars(one)!r}).start", delay)
    user_daemon.stop(one.lock, time.monotonic() + 30)
    assert holders(one.lock) == set()
    assert {p.suffix for p in (place / "run").iterdir()} <= {".log"}
