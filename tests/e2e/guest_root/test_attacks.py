"""Root inside a guest attacks the host by its files, ports and console; see ``guest_attacks``.

Every test checks the state of the host afterwards, not the guest's output.
"""

import hashlib
import os
import pwd
import re
import shutil
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from guest_attacks import PLACE, Meeting, attack, by_the_user, tree
from vtorque_core.base.errors import EXIT_GUEST_DIED
from vtorque_core.config.site_file import Node

pytestmark = pytest.mark.e2e

SUBORDINATE = Node().subordinate_ids
OTHER = "vte2e2"
SECRET = "the-other-users-secret"


# -- Root in the guest: files ----------------------------------------------------------------------


def test_guest_root_cannot_create_files_of_host_root_or_other_users(guest):
    user, other = pwd.getpwnam(guest.user), pwd.getpwnam(OTHER)
    root = SUBORDINATE + user.pw_uid
    for name in ("victim", "to-other", "capable", "to-group"):
        by_the_user(guest, name)
    _, said = attack(
        guest,
        "t setuid sh -c 'cp /bin/busybox suid && chown 0:0 suid && chmod 6755 suid'\n"
        "t block mknod blk b 254 0\n"
        "t char mknod chr c 1 3\n"
        "t chown-root chown 0:0 victim\n"
        f"t chown-other chown {other.pw_uid}:{other.pw_gid} to-other\n"
        "t chgrp-shadow chgrp 42 to-group\n"
        "t capability /bin/rootsh xattr capable security.capability"
        " 0100000200040000000000000000000000000000\n"
        "t directory sh -c 'mkdir -m 2777 dir; chown 0:0 dir; cp suid dir/suid; chmod 4755 dir/*'\n"
        "t link ln -s /etc/shadow link\n"
        "t through-link sh -c 'echo x >>link'\n",
    )
    assert said["setuid"] == "ok"  # otherwise the attack did not reach the host
    assert {said[k] for k in ("block", "char", "chown-other", "chgrp-shadow", "capability")} == {
        "fail"
    }
    found = [guest.home, *guest.home.rglob("*")]
    assert guest.home / "suid" in found
    assert guest.home / "dir/suid" in found
    for path in found:
        status = path.lstat()
        assert status.st_uid in (user.pw_uid, root), path
        assert status.st_gid in (user.pw_gid, root), path
        assert not stat.S_ISBLK(status.st_mode) and not stat.S_ISCHR(status.st_mode), path
        assert "security.capability" not in os.listxattr(path, follow_symlinks=False), path
    assert (guest.home / "suid").stat().st_uid == root
    assert (guest.home / "to-other").stat().st_uid == user.pw_uid
    assert b"\nx\n" not in Path("/etc/shadow").read_bytes()
    # run by another user of the node, the setuid file gives no other user's privileges
    copy = PLACE / "busybox"
    shutil.copy2(guest.home / "suid", copy)
    os.chown(copy, root, root)
    copy.chmod(0o6755)
    shown = guest.as_user(str(copy), "id", "-u", user=OTHER).stdout.split()
    assert int(shown[0]) in (other.pw_uid, root)


CHANGE_SOFTWARE = (
    "t read cat /opt-hpc/lib/data\n"
    "t create touch /opt-hpc/new\n"
    "t write sh -c 'echo x >>/opt-hpc/lib/data'\n"
    "t write-users sh -c 'echo x >>/opt-hpc/users'\n"
    "t unlink rm /opt-hpc/users\n"
    "t chmod chmod 6777 /opt-hpc/users\n"
    "t chown chown 0:0 /opt-hpc/users\n"
    "t mkdir mkdir /opt-hpc/dir\n"
    "t mknod mknod /opt-hpc/dev c 1 3\n"
    "t rename mv /opt-hpc/users /opt-hpc/mine\n"
    "t times touch -d 2001-01-01 /opt-hpc/users\n"
    "t xattr /bin/rootsh xattr /opt-hpc/users user.x 00\n"
    "t remount sh -c 'mount -o remount,rw,suid,dev /opt-hpc && echo x >>/opt-hpc/users'\n"
    "mkdir -p /mnt/o\n"
    "t again sh -c 'mount -t virtiofs -o rw opt /mnt/o && echo x >>/mnt/o/users'\n"
)


def test_guest_root_cannot_read_other_homes_or_change_shared_software(guest):
    before = tree(PLACE / "opt")
    theirs = Path("/home", OTHER)
    theirs.chmod(0o755)  # accessible to all on the host, but not in the guest
    (theirs / "secret").write_text(SECRET)
    (theirs / "secret").chmod(0o644)
    (guest.home / "to-them").symlink_to(theirs / "secret")
    (guest.home / "up").symlink_to(f"../{OTHER}/secret")
    result, said = attack(
        guest,
        "echo homes $(ls /home)\n"
        f"cat /home/{OTHER}/secret ../{OTHER}/secret to-them up /proc/1/root/home/{OTHER}/secret\n"
        f"for tag in {OTHER} home-{OTHER} /home/{OTHER} root / etc opt-hpc h1 data share; do\n"
        "  mkdir -p /mnt/x; t tag-$tag mount -t virtiofs $tag /mnt/x && umount /mnt/x; done\n"
        f"mkdir -p /mnt/h; mount -t virtiofs home /mnt/h && ls -a /mnt/h/.. && "
        f"cat /mnt/h/../{OTHER}/secret /mnt/h/up\n"
        "umount /mnt/h\n" + CHANGE_SOFTWARE + "exit 0\n",
    )
    theirs.chmod(0o700)
    (theirs / "secret").unlink()
    assert f"homes {guest.user}\n".encode() in result.out
    assert said.pop("read") == "ok"
    assert set(said.values()) == {"fail"} and len(said) == 10 + 13
    assert tree(PLACE / "opt") == before
    assert SECRET.encode() not in result.out + result.err
    assert OTHER.encode() not in re.sub(rb"(?m)^@@.*$", b"", result.out)


# -- Root in the guest: ports and console ----------------------------------------------------------

PORTS = """
agent=$(pidof vtorque-agent)
port() {
  for fd in /proc/$agent/fd/*; do
    at=$(readlink $fd)
    case $at in /dev/vport*) ;; *) continue ;; esac
    read -r name <"/sys/class/virtio-ports/${at##*/}/name" || :
    case $name in *"$1"*) echo ${fd##*/} ;; esac
  done
}
"""
HEADER = struct.Struct("<BBHI")
GARBAGE = {
    "random": lambda: os.urandom(200_000),
    "huge-length": lambda: HEADER.pack(4, 1, 0, 0xFFFFFFFF) + b"x" * 1000,
    "flood-without-credit": lambda: (HEADER.pack(4, 1, 0, 65536) + b"y" * 65536) * 200,
    "escapes": lambda: (
        HEADER.pack(10, 0, 0, 40) + b"\x1b]0;owned\x07\x1b[2J\r\nvtorque: all is well\n\0\0\0"
    ),
    "signal-out-of-range": lambda: HEADER.pack(9, 0, 0, 4) + struct.pack("<BBH", 1, 0, 9999),
}


OTHERS = [
    pytest.param(kind, marks=pytest.mark.full)
    for kind in ("random", "huge-length", "flood-without-credit", "signal-out-of-range")
]


@pytest.mark.parametrize("kind", ["escapes", *OTHERS])
def test_garbage_on_the_run_port_ends_the_job_with_a_reason(guest, kind):
    (guest.home / "garbage").write_bytes(GARBAGE[kind]())
    result, _ = attack(
        guest,
        PORTS + 'fd=$(port run); [ -n "$fd" ] || exit 98\n'
        "kill -STOP $agent\n"
        "/bin/rootsh steal $agent $fd <garbage\nsleep 20\n",
    )
    assert result.code == EXIT_GUEST_DIED
    assert b"\x1b" not in result.err and b"Traceback" not in result.err
    (line,) = result.err.splitlines()
    assert line.startswith(b"vtorque: the guest v") and b"died while the job ran" in line


def test_guest_root_cannot_write_seed_or_image_or_end_the_job_by_its_status(guest):
    (guest.home / "garbage").write_bytes(b"READY\nFAILED you have been had\n" + os.urandom(300_000))
    pool = tree(guest.state / "images")
    meeting = Meeting(
        guest,
        "for at in /sys/block/vd*; do read -r serial <$at/serial || :\n"
        "  [ $serial != vtseed ] || disk=/dev/${at##*/}; done\n"
        "meet begin\n"
        "blockdev --setrw $disk; echo 0 >/sys/block/${disk##*/}/ro\n"
        "dd if=/dev/urandom of=$disk bs=4096 count=16 conv=notrunc,fsync; sync\n"
        "[ $(head -c 100000 $disk | wc -c) = 100000 ] && echo read\n"
        "meet end\n" + PORTS + "fd=$(port status); echo fd=$fd\n"
        'for node in /dev/vport*; do (timeout 3 sh -c "cat garbage >$node") 2>/dev/null & done\n'
        '[ -z "$fd" ] || timeout 3 /bin/rootsh steal $agent $fd <garbage\n'
        "wait; echo alive; exit 7\n",
    )
    meeting.wait("begin")
    key, _ = guest.running()
    seed = guest.state / "jobs" / key / "g0/seed.iso"
    before = hashlib.sha256(seed.read_bytes()).digest()
    meeting.go("begin")
    meeting.wait("end")
    after = hashlib.sha256(seed.read_bytes()).digest()
    meeting.go("end")
    result = meeting.end()
    assert b"read\n" in result.out
    assert before == after
    assert tree(guest.state / "images") == pool
    assert result.out.endswith(b"alive\n")
    assert result.code == 7


@pytest.mark.full
def test_console_without_line_ends_is_bounded(guest):
    """All guests share root's virtlogd, so a flood must cost virtlogd nothing."""

    def read_by_virtlogd():
        pid = subprocess.check_output(["pgrep", "-x", "virtlogd"], text=True).split()[0]
        counts = Path("/proc", pid, "io").read_text()
        return int(re.search(r"^rchar: (\d+)$", counts, re.MULTILINE)[1])

    before = read_by_virtlogd()
    meeting = Meeting(
        guest,
        "(timeout 20 sh -c 'tr \"\\0\" x </dev/zero >/dev/ttyS0')\nmeet end\n",
    )
    meeting.wait("end")
    key, _ = guest.running()
    (log,) = (guest.state / "jobs" / key / "g0").glob("console.log*")
    status, read = log.stat(), read_by_virtlogd() - before
    owner = guest.as_user("/usr/bin/tail", "-c", "9", str(log)).stdout
    meeting.go("end")
    assert meeting.end().code == 0
    assert 300_000 < status.st_size <= 2 << 20
    assert stat.S_IMODE(status.st_mode) == 0o640, (
        "not mode 0600 with an ACL entry for the job's owner"
    )
    assert owner == b"x" * 9
    assert read < 100_000
