"""Access of root and the user of a real guest to the host through virtiofsd; as root."""

import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import daemons
from bare_guest import OTHER, PROJECT, SUBORDINATE, USER, guest, share, unpack_kernel
from daemons import holders, make
from vtorque_core.resources import user_daemon

pytestmark = pytest.mark.e2e

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp
for m in @MODULES@; do insmod /modules/$m.ko; done
mount -t virtiofs home /home || echo "@@ mount-home fail"
mount -t virtiofs opt /opt || echo "@@ mount-opt fail"
t() {
  name=$1; shift
  if "$@" >/tmp/out 2>&1; then echo "@@ $name ok"; else echo "@@ $name fail"; fi
}
u() { name=$1; shift; t "$name" su -s /bin/sh user -c "$*"; }
echo "@@ begin ok"
cd /home
t root-copy cp /bin/busybox suid
t root-setuid chmod 4755 suid
t root-chown-root chown 0:0 victim
t root-chown-other chown @OTHER@:@OTHER@ mine
t root-mknod-block mknod blk b 254 0
t root-mknod-char mknod chr c 1 3
t root-fifo mkfifo fifo
t root-ls-other ls other
t root-read-other cat other/secret
t root-read-rootsecret cat rootsecret
t root-write-rootfile sh -c 'echo x >>rootfile'
t root-setuid-rootfile chmod 4755 rootfile
t root-chown-rootfile chown @USER@ rootfile
t root-read-own-0600 cat private
u user-create 'echo hello >/home/made; echo more >>/home/made'
u user-chmod 'chmod 640 /home/made'
u user-rename 'mv /home/made /home/renamed'
u user-mkdir 'mkdir /home/dir; cd /home/dir; ln -s ../renamed link; cat link'
u user-chgrp 'cp /home/renamed /home/shared; chgrp project /home/shared'
u user-group-read 'cat /home/group/data'
u user-group-write 'echo mine >/home/group/new'
u user-group-append 'echo appended >>/home/group/data'
u user-closed-group 'ls /home/closed'
u user-unlink 'rm /home/unwanted'
u user-suid-root 'chmod 4755 /home/rootfile'
u user-read-other 'cat /home/other/secret'
u user-own-suid 'cp /bin/busybox /home/ownsuid; chmod 4755 /home/ownsuid'
u user-opt-run '/opt/tool'
u user-opt-write 'echo x >/opt/users/data'
t root-opt-create touch /opt/new
t root-opt-write sh -c 'echo x >/opt/users/data'
t root-opt-unlink rm /opt/users/data
t root-opt-chmod chmod 777 /opt/users/data
t root-opt-remount sh -c 'mount -o remount,rw /opt && touch /opt/users/new'
t root-opt-submount touch /opt/sub/new
t root-opt-submount-read cat /opt/sub/data
t root-owned-dir sh -c 'mkdir rootdir; echo x >rootdir/file; chmod 700 rootdir; cat rootdir/file'
t root-setgid-dir chmod g+s rootdir
dd if=/dev/zero of=/home/big bs=1M count=64 2>/dev/null
t root-sync sync
echo "@@ end ok"
@AT_END@
"""


@pytest.fixture(scope="session")
def kernel() -> Path:
    return unpack_kernel()


def init_script(at_end: str) -> str:
    program = INIT.replace("@AT_END@", at_end)
    return program.replace("@USER@", str(USER)).replace("@OTHER@", str(OTHER))


@pytest.fixture
def place() -> Iterator[Path]:
    with daemons.place_for(user_daemon.stop) as path:
        yield path
        subprocess.run(
            ["umount", "-l", path / "opt/sub"], check=False, capture_output=True, timeout=180
        )


@pytest.fixture
def home(place: Path) -> Path:
    home = place / "home"
    make(home, None, 0o700, USER, USER)
    for name in ("mine", "victim", "private", "unwanted"):
        make(home / name, name, 0o600, USER, USER)
    make(home / "rootfile", "#!/bin/sh\n", 0o755, 0, 0)
    make(home / "rootsecret", "s", 0o600, 0, 0)
    make(home / "other", None, 0o700, OTHER, OTHER)
    make(home / "other/secret", "s", 0o644, OTHER, OTHER)
    make(home / "group", None, 0o770, OTHER, PROJECT)
    make(home / "group/data", "d\n", 0o660, OTHER, PROJECT)
    make(home / "closed", None, 0o770, OTHER, OTHER)
    return home


@pytest.fixture
def opt(place: Path) -> Path:
    opt = place / "opt"
    make(opt, None, 0o755, 0, 0)
    make(opt / "tool", "#!/bin/sh\necho tool\n", 0o755, 0, 0)
    for name in ("users", "sub"):
        make(opt / name, None, 0o777, USER, USER)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "t", opt / "sub"], check=True)
    for name in ("users/data", "sub/data"):
        make(opt / name, "data", 0o666, USER, USER)
    return opt


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def console(
    qemu: subprocess.Popen[str], begun: Callable[[], None] = lambda: None
) -> dict[str, bool]:
    """Read the results up to the end; a guest that hangs is ended by the alarm.

    ``begun`` is called while the guest has its shares: the daemons end with it.
    """
    assert qemu.stdout is not None
    results: dict[str, bool] = {}
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: qemu.kill())
    signal.alarm(90)
    try:
        for line in qemu.stdout:
            seen.append(line)
            if "@@ " in line:
                name, outcome = line.split("@@ ")[1].split()
                results[name] = outcome == "ok"
                if name == "begin":
                    begun()
            if "end" in results:
                return results
    finally:
        signal.alarm(0)
    raise AssertionError("the guest did not finish:\n" + "".join(seen[-40:]))


def test_guest_root_and_user_have_only_the_users_access_to_shares(
    kernel: Path, place: Path, home: Path, opt: Path
) -> None:
    shares = [share(place, "home"), share(place, "opt")]
    for one in shares:
        one.start()
    with guest(kernel, place, init_script("poweroff -f")) as qemu:
        looked = []

        def look() -> None:
            for (daemon,) in (holders(one.lock) for one in shares):
                looked.append(status(daemon))

        results = console(qemu, look)
        assert len(looked) == len(shares)
        for now in looked:
            assert now["Uid"].split() == [str(USER)] * 4
            assert now["Groups"].split() == [str(USER), str(PROJECT)]
            assert now["CapEff"] == now["CapPrm"] == "00000000000000db"
            assert int(now["CapInh"], 16) == int(now["CapAmb"], 16) == 0
        assert qemu.wait(180) == 0
    # Root's attempts in the guest, with their results there ...
    denied = {name for name, worked in results.items() if not worked}
    assert denied == {
        "root-chown-other", "root-mknod-block", "root-mknod-char", "root-ls-other",
        "root-read-other", "root-read-rootsecret", "root-write-rootfile", "root-setuid-rootfile",
        "root-chown-rootfile", "user-closed-group", "user-suid-root", "user-read-other",
        "user-opt-write", "root-opt-create", "root-opt-write", "root-opt-unlink",
        "root-opt-chmod", "root-opt-remount", "root-opt-submount",
    }  # fmt: skip
    # ... and its results on the host.
    facts = {p.relative_to(home).as_posix(): p.lstat() for p in home.rglob("*")}
    ours = {"rootfile", "rootsecret"}
    assert {name for name, s in facts.items() if s.st_uid == 0 or s.st_gid == 0} == ours
    allowed = {USER, SUBORDINATE}
    assert {n for n, s in facts.items() if s.st_uid not in allowed} == {
        *ours, "other", "other/secret", "group", "group/data", "closed",
    }  # fmt: skip
    assert not [n for n, s in facts.items() if stat.S_ISBLK(s.st_mode) or stat.S_ISCHR(s.st_mode)]
    setuid = {n: s.st_uid for n, s in facts.items() if s.st_mode & stat.S_ISUID}
    assert setuid == {"suid": SUBORDINATE, "ownsuid": USER}
    assert facts["rootdir"].st_mode & stat.S_ISGID
    assert facts["rootfile"].st_mode == stat.S_IFREG | 0o755
    assert (facts["mine"].st_uid, facts["victim"].st_uid) == (USER, SUBORDINATE)
    # The user's own work.
    made = facts["renamed"]
    assert (made.st_uid, made.st_gid, made.st_mode) == (USER, USER, stat.S_IFREG | 0o640)
    assert (home / "renamed").read_text() == "hello\nmore\n"
    assert facts["shared"].st_gid == PROJECT
    assert facts["group/new"].st_uid == USER
    assert (home / "group/data").read_text() == "d\nappended\n"
    assert "unwanted" not in facts
    assert facts["big"].st_size == 64 * 2**20
    assert sorted(p.name for p in opt.rglob("*")) == ["data", "data", "sub", "tool", "users"]
    assert (opt / "users/data").read_text() == (opt / "sub/data").read_text() == "data"
    # QEMU has ended: the daemons end without a signal, and stop only cleans up.
    deadline = time.monotonic() + 30
    while any(holders(one.lock) for one in shares) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [holders(one.lock) for one in shares] == [set(), set()]
    for one in shares:
        user_daemon.stop(one.lock, time.monotonic() + 30)
    assert {p.suffix for p in (place / "run").iterdir()} <= {".log"}


@pytest.mark.full
@pytest.mark.releases
def test_stop_ends_a_daemon_in_use(kernel: Path, place: Path, home: Path, opt: Path) -> None:
    shares = [share(place, "home"), share(place, "opt")]
    for one in shares:
        one.start()
    with guest(kernel, place, init_script("while :; do cat /home/big >/dev/null; done")) as qemu:
        console(qemu)
        for one in shares:
            script = "import sys, time; from vtorque_core.resources import user_daemon; "
            script += "user_daemon.stop(sys.argv[1], time.monotonic() + 30)"
            subprocess.run([sys.executable, "-c", script, one.lock], check=True, timeout=180)
        assert [holders(one.lock) for one in shares] == [set(), set()]
        log = (place / "run/home.log").read_text()
    assert daemons.CONNECTED.search(log)
    assert {p.suffix for p in (place / "run").iterdir()} == {".log"}


FILES, DESCRIPTORS = 300_000, 20_000
WALK = f"""
mount -o remount,size=100% /tmp
free() {{ sed -n 's/^MemAvailable: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo; }}
dd if=/dev/zero of=/tmp/fill bs=1024 count=$(($(free) - {DESCRIPTORS})) 2>/dev/null
echo "free KiB: $(free)"
for turn in 1 2; do
  echo "found: $(find /home/tree -type f -size -1 2>/tmp/err | wc -l), errors: $(wc -l </tmp/err)"
done
head -n 3 /tmp/err
poweroff -f
"""


@pytest.mark.full
def test_tree_of_300000_files_is_walked_with_fewer_descriptors(
    kernel: Path, place: Path, home: Path, opt: Path
) -> None:
    """A daemon gets a descriptor per KiB of the guest's memory, so the guest cannot use up all.

    Many machines allow at most 20,000 descriptors, so this guest has as little free memory. It
    must drop cached files, and the daemon closes them.
    """
    for name in ("home", "opt"):
        replace(share(place, name), nofile=DESCRIPTORS).start()
    for number in range(FILES // 1000):
        (home / f"tree/{number}").mkdir(parents=True)
        for file in range(1000):
            (home / f"tree/{number}/{file}").touch()
    subprocess.run(["chown", "-R", f"{USER}:{USER}", home / "tree"], check=True, timeout=180)
    (daemon,) = holders(share(place, "home").lock)
    limits = Path(f"/proc/{daemon}/limits").read_text()
    assert re.search(rf"^Max open files +{DESCRIPTORS} +{DESCRIPTORS} ", limits, re.MULTILINE)
    head, _, _ = INIT.partition('echo "@@ begin ok"')
    with guest(kernel, place, head + WALK) as qemu:
        assert qemu.stdout is not None
        said = qemu.stdout.read()
    assert re.findall(r"found: (\d+), errors: (\d+)", said) == [(str(FILES), "0")] * 2, said
