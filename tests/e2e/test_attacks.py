"""Root inside a guest, and users of the node, attack the host: what each leaves there.

Root in the guest comes from the site's own guest prologue (an admin's feature), which installs
``attacker.c`` setuid root. Every test looks at the host afterwards, not at what the guest says.
"""

import base64
import contextlib
import hashlib
import ipaddress
import os
import pwd
import re
import shutil
import socket
import stat
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vtorque_core.config_schema import Node
from vtorque_core.errors import EXIT_GUEST_DIED

pytestmark = pytest.mark.e2e

PLACE = Path("/srv/vtorque-e2e-attack")
MARK = b"\n# -- tests/e2e/test_attacks.py: until here the node's own\n"
SUBORDINATE = Node().subordinate_id
OTHER = "vte2e2"
SECRET = "the-other-users-secret"
BRIDGE, GATEWAY = "vtorque-e2e0", "10.87.0.1"
CONFIG = f"""
[plugin.linux-guest]
prologue = "{PLACE}/prologue"
[shares.home]
source = "{{home}}"
target = "/home/{{user}}"
user_owned = true
[shares.opt]
source = "{PLACE}/opt"
target = "/opt-hpc"
readonly = true
"""
HEAD = """#!/bin/rootsh sh
t() {
  name=$1; shift
  if "$@" >/tmp/said 2>&1; then echo "@@ $name ok"; else echo "@@ $name fail"; fi
}
meet() { touch $HOME/at-$1; while [ ! -e $HOME/go-$1 ]; do sleep 0.1; done; }
[ "$(id -u)" = 0 ] || exit 99
cd $HOME
"""


@pytest.fixture(scope="module")
def armed(node):
    """Give the node a guest prologue that makes the job's user root, and a read-only share."""
    own = node.config.read_bytes().partition(MARK)[0]
    shutil.rmtree(PLACE, ignore_errors=True)
    (PLACE / "prologue").mkdir(parents=True)
    (PLACE / "opt/lib").mkdir(parents=True)
    binary = PLACE / "rootsh"
    source = Path(__file__).with_name("attacker.c")
    build = ["musl-gcc", "-static", "-O2", "-Wall", "-Wextra", "-Werror", "-o", binary, source]
    subprocess.run(build, check=True, timeout=60)
    coded = base64.encodebytes(binary.read_bytes()).decode()
    script = PLACE / "prologue/10-rootsh"
    script.write_text(
        f"#!/bin/sh\nbase64 -d >/bin/rootsh <<'END'\n{coded}END\nchmod 4755 /bin/rootsh\n"
    )
    entry = pwd.getpwnam(node.user)
    (PLACE / "opt/lib/data").write_text("of the site\n")
    (PLACE / "opt/users").write_text("of the user\n")
    os.chown(PLACE / "opt/users", entry.pw_uid, entry.pw_gid)
    for path in (PLACE, PLACE / "prologue", PLACE / "opt", PLACE / "opt/lib"):
        path.chmod(0o755)
    try:
        node.config.write_bytes(own + MARK + CONFIG.encode())
        yield node
    finally:
        node.config.write_bytes(own)
        shutil.rmtree(PLACE, ignore_errors=True)


@pytest.fixture
def guest(armed, clean):
    """Return the node, for jobs whose scripts are root in the guest; the home is emptied after."""
    yield clean
    for path in clean.home.iterdir():
        if not path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def attack(node, text, *args, timeout=120):
    """Run a script as root in a guest; return the job's result and each attack's outcome."""
    result = node.job(HEAD + text, *args, timeout=timeout)
    assert result.code != 99, "the script was not root in the guest"
    said = dict(re.findall(rb"^@@ (\S+) (ok|fail)$", result.out, re.MULTILINE))
    return result, {name.decode(): how.decode() for name, how in said.items()}


class Meeting:
    """A running attack that waits for the test at named points."""

    def __init__(self, node, text):
        self.node = node
        self.pool = ThreadPoolExecutor(1)
        self.job = self.pool.submit(node.job, HEAD + text)

    def wait(self, point):
        def there():
            assert not self.job.done(), self.job.result().err
            return (self.node.home / f"at-{point}").exists()

        self.node.wait_for(there, 60, f"attack at {point}")

    def go(self, point):
        (self.node.home / f"go-{point}").touch()

    def end(self):
        result = self.job.result(90)
        self.pool.shutdown()
        assert result.code != 99, "the script was not root in the guest"
        return result


def by_the_user(node, name, content="x\n", mode=0o644):
    path = node.home / name
    path.write_text(content)
    entry = pwd.getpwnam(node.user)
    os.chown(path, entry.pw_uid, entry.pw_gid)
    path.chmod(mode)
    return path


def running_guest(node):
    """Return job key and domain name of the only running job."""
    (key,) = [path.name for path in (node.run_dir / "jobs").iterdir()]
    names = subprocess.run(
        ["virsh", "-q", "list", "--name"], capture_output=True, text=True, check=True, timeout=20
    ).stdout.split()
    (domain,) = [each for each in names if each.startswith(f"vt-{key}-")]
    return key, domain


# -- root in the guest: files -------------------------------------------------------------------


def test_guest_root_makes_no_file_of_roots_or_of_others(guest):
    user, other = pwd.getpwnam(guest.user), pwd.getpwnam(OTHER)
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
    assert said["setuid"] == "ok"  # else the attack did not get as far as the host
    assert {said[k] for k in ("block", "char", "chown-other", "chgrp-shadow", "capability")} == {
        "fail"
    }
    found = [guest.home, *guest.home.rglob("*")]
    assert guest.home / "suid" in found
    assert guest.home / "dir/suid" in found
    for path in found:
        status = path.lstat()
        assert status.st_uid in (user.pw_uid, SUBORDINATE), path
        assert status.st_gid in (user.pw_gid, SUBORDINATE), path
        assert not stat.S_ISBLK(status.st_mode) and not stat.S_ISCHR(status.st_mode), path
        assert "security.capability" not in os.listxattr(path, follow_symlinks=False), path
    assert (guest.home / "suid").stat().st_uid == SUBORDINATE
    assert (guest.home / "to-other").stat().st_uid == user.pw_uid
    assert b"\nx\n" not in Path("/etc/shadow").read_bytes()
    # run by another user of the node, the setuid file gives nobody's rights
    copy = PLACE / "busybox"
    shutil.copy2(guest.home / "suid", copy)
    os.chown(copy, SUBORDINATE, SUBORDINATE)
    copy.chmod(0o6755)
    shown = guest.as_user(str(copy), "id", "-u", user=OTHER).stdout.split()
    assert int(shown[0]) in (other.pw_uid, SUBORDINATE)


def test_guest_root_reaches_no_other_home(guest):
    theirs = Path("/home", OTHER)
    theirs.chmod(0o755)  # open to all on the host, and still not in the guest
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
        "exit 0\n",
    )
    theirs.chmod(0o700)
    (theirs / "secret").unlink()
    assert f"homes {guest.user}\n".encode() in result.out
    assert set(said.values()) == {"fail"} and len(said) == 10
    assert SECRET.encode() not in result.out + result.err
    assert OTHER.encode() not in re.sub(rb"(?m)^@@.*$", b"", result.out)


def tree(top):
    """Return what a directory is: names, owners, modes, times and contents."""
    return {
        str(p): (s.st_uid, s.st_gid, s.st_mode, s.st_mtime_ns, s.st_ctime_ns,
                 p.read_bytes() if p.is_file() else None)
        for p in [top, *sorted(top.rglob("*"))] if (s := p.lstat())
    }  # fmt: skip


def test_guest_root_cannot_change_the_sites_software(guest):
    before = tree(PLACE / "opt")
    _, said = attack(
        guest,
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
        "t again sh -c 'mount -t virtiofs -o rw opt /mnt/o && echo x >>/mnt/o/users'\n",
    )
    assert said.pop("read") == "ok"
    assert set(said.values()) == {"fail"} and len(said) == 13
    assert tree(PLACE / "opt") == before


def test_guest_root_cannot_write_seed_or_image(guest):
    pool = tree(guest.state / "images")
    meeting = Meeting(
        guest,
        "for at in /sys/block/vd*; do read -r serial <$at/serial || :\n"
        "  [ $serial != vtseed ] || disk=/dev/${at##*/}; done\n"
        "meet begin\n"
        "blockdev --setrw $disk; echo 0 >/sys/block/${disk##*/}/ro\n"
        "dd if=/dev/urandom of=$disk bs=4096 count=16 conv=notrunc,fsync; sync\n"
        "[ $(head -c 100000 $disk | wc -c) = 100000 ] && echo read\n"
        "meet end\n",
    )
    meeting.wait("begin")
    key, _ = running_guest(guest)
    seed = guest.state / "jobs" / key / "g0/seed.iso"
    before = hashlib.sha256(seed.read_bytes()).digest()
    meeting.go("begin")
    meeting.wait("end")
    after = hashlib.sha256(seed.read_bytes()).digest()
    meeting.go("end")
    assert b"read\n" in meeting.end().out
    assert before == after
    assert tree(guest.state / "images") == pool


# -- root in the guest: network -------------------------------------------------------------------


def frame(source, ether, payload, target="ff:ff:ff:ff:ff:ff"):
    return b"".join(bytes.fromhex(a.replace(":", "")) for a in (target, source)) + ether + payload


def ipv4(source, target, payload):
    """Return a UDP datagram to port 9 in an IPv4 packet (RFC 791, RFC 768)."""
    udp = struct.pack("!HHHH", 9, 9, 8 + len(payload), 0) + payload
    packed = [ipaddress.IPv4Address(a).packed for a in (source, target)]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0) + b"".join(packed)
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    return head[:10] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + head[12:] + udp


def arp(mac, ip, operation=2):
    """Return an ARP announcement (RFC 826) that says that ``ip`` is at ``mac``."""
    raw, address = bytes.fromhex(mac.replace(":", "")), ipaddress.IPv4Address(ip).packed
    return struct.pack("!HHBBH", 1, 0x800, 6, 4, operation) + raw + address + b"\xff" * 6 + address


IPV4, ARP, IPV6 = b"\x08\x00", b"\x08\x06", b"\x86\xdd"
NOBODY = "0.0.0.0"  # noqa: S104
BAD_MAC, BAD_IP = "52:54:00:ba:dd:ad", "10.87.250.250"


def spoofs(mac, ip, gateway):
    """Return name to frame; each carries its name, or is found by what it claims."""

    def data(name):
        return f"vtorque-attack-{name}".encode()

    everybody = "255.255.255.255"
    vlan = b"\x81\x00\x00\x01" + IPV4
    router = b"\x60\0\0\0" + struct.pack("!HBB", 20, 17, 255) + b"\xfe\x80" + b"\0" * 13 + b"\x01"
    return {
        "own": frame(mac, IPV4, ipv4(ip, everybody, data("own"))),
        "mac": frame(BAD_MAC, IPV4, ipv4(ip, everybody, data("mac"))),
        "ip": frame(mac, IPV4, ipv4(BAD_IP, everybody, data("ip"))),
        "gateway-ip": frame(mac, IPV4, ipv4(gateway, everybody, data("gateway-ip"))),
        "dhcp-ip": frame(mac, IPV4, ipv4(NOBODY, everybody, data("dhcp-ip"))),
        "arp-gateway": frame(mac, ARP, arp(mac, gateway) + data("arp-gateway")),
        "arp-mac": frame(mac, ARP, arp(BAD_MAC, ip) + data("arp-mac")),
        "ipv6": frame(mac, IPV6, router + b"\xff\x02" + b"\0" * 13 + b"\x01" + data("ipv6")),
        "vlan": frame(mac, vlan, ipv4(ip, everybody, data("vlan"))),
        "vlan-spoof": frame(mac, vlan, ipv4(BAD_IP, everybody, data("vlan-spoof"))),
        "bpdu": frame(mac, struct.pack("!H", 60), b"\x42\x42\x03" + data("bpdu") + b"\0" * 40,
                      "01:80:c2:00:00:00"),
        "other": frame(mac, b"\x88\xb5", data("other") + b"\0" * 40),
    }  # fmt: skip


def test_guest_root_cannot_send_as_another(guest):
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as bridge:
        bridge.bind((BRIDGE, 0))
        bridge.setblocking(False)
        meeting = Meeting(
            guest,
            "for nic in /sys/class/net/*; do [ ${nic##*/} = lo ] || nic0=${nic##*/}; done\n"
            "cat /sys/class/net/$nic0/address; ip -4 addr show dev $nic0; ip route\n"
            "{ cat /sys/class/net/$nic0/address; ip -4 -o addr show dev $nic0; } >nic\n"
            "meet nic\n"
            "/bin/rootsh send $nic0 $(cat frames) || echo SEND-FAILED\n"
            f"ip link set $nic0 down; ip link set $nic0 address {BAD_MAC}; ip link set $nic0 up\n"
            f"ip addr add {BAD_IP}/16 dev $nic0\n"
            f"ping -c 2 -W 1 {GATEWAY}\n"
            "exit 0\n",
        )
        meeting.wait("nic")
        mac, line = (guest.home / "nic").read_text().split("\n", 1)
        ip = re.search(r"inet ([\d.]+)/", line)[1]
        frames = spoofs(mac, ip, GATEWAY)
        (guest.home / "frames").write_text(" ".join(f.hex() for f in frames.values()))
        meeting.go("nic")
        result = meeting.end()
        heard = []
        with contextlib.suppress(BlockingIOError):
            while True:
                heard.append(bridge.recv(4096))
    assert b"SEND-FAILED" not in result.out
    arrived = {m.decode() for f in heard for m in re.findall(rb"vtorque-attack-([a-z0-9-]+)", f)}
    assert arrived == {"own"}
    assert not [f for f in heard if bytes.fromhex(BAD_MAC.replace(":", "")) in f]
    assert not [f for f in heard if ipaddress.IPv4Address(BAD_IP).packed in f]


def test_guests_reach_no_libvirt_sshd_or_display_of_the_node(guest):
    ports = "22 111 5900 5901 16509 16514 49152"
    result, _ = attack(guest, f"/bin/rootsh tcp {GATEWAY} {ports}\n")
    states = dict(re.findall(rb"^[\d.]+ (\d+) (.*)$", result.out, re.MULTILINE))
    assert len(states) == 7
    assert b"open" not in states.values()


def test_guests_reach_no_service_of_the_node_but_what_the_site_opens(guest):
    own = guest.config.read_text()
    table = ("inet", "vtorque-node-vtorque-e2e")
    with socket.create_server((NOBODY, 0)) as closed, socket.create_server((NOBODY, 0)) as opened:
        closed_port, open_port = (each.getsockname()[1] for each in (closed, opened))
        ports = f'[network]\nnode_ports = ["tcp/{open_port}"]\n'
        guest.config.write_text(own.replace("[network]\n", ports))
        subprocess.run(["nft", "delete", "table", *table], check=True, timeout=20)  # it comes back
        try:
            result, said = attack(
                guest,
                f"/bin/rootsh tcp {GATEWAY} {closed_port} {open_port}\n"
                f"/bin/rootsh tcp {_address_of_node()} {closed_port}\n"
                f"t ping ping -c 1 -W 2 {GATEWAY}\n",
            )
        finally:
            guest.config.write_text(own)
            guest.root("vtorque", "setup", "install", "--config", str(guest.config))
    states = dict(re.findall(r"^([\d.]+ \d+) (.*)$", result.out.decode(), re.MULTILINE))
    assert len(states) == 3
    opened_ones = [where for where, state in states.items() if state == "open"]
    assert opened_ones == [f"{GATEWAY} {open_port}"]
    assert said == {"ping": "ok"}
    listed = subprocess.run(["nft", "list", "table", *table], capture_output=True, check=True)
    assert str(open_port).encode() not in listed.stdout


def _address_of_node():
    """Return an address of the node that is not on the guests' bridge."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))  # RFC 5737; nothing is sent
        return probe.getsockname()[0]


# -- root in the guest: ports and console ---------------------------------------------------------

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
    "random": os.urandom(200_000),
    "huge-length": HEADER.pack(4, 1, 0, 0xFFFFFFFF) + b"x" * 1000,
    "flood-without-credit": (HEADER.pack(4, 1, 0, 65536) + b"y" * 65536) * 200,
    "escapes": HEADER.pack(10, 0, 0, 40)
    + b"\x1b]0;owned\x07\x1b[2J\r\nvtorque: all is well\n\0\0\0",
    "signal-out-of-range": HEADER.pack(9, 0, 0, 4) + struct.pack("<BBH", 1, 0, 9999),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_on_the_run_port_ends_the_job_with_a_reason(guest, kind):
    (guest.home / "garbage").write_bytes(GARBAGE[kind])
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


def test_garbage_on_the_status_port_after_ready_changes_nothing(guest):
    (guest.home / "garbage").write_bytes(b"READY\nFAILED you have been had\n" + os.urandom(300_000))
    result, _ = attack(
        guest,
        PORTS + "fd=$(port status); echo fd=$fd\n"
        'for node in /dev/vport*; do (timeout 3 sh -c "cat garbage >$node") 2>/dev/null & done\n'
        '[ -z "$fd" ] || timeout 3 /bin/rootsh steal $agent $fd <garbage\n'
        "wait; echo alive; exit 7\n",
    )
    assert result.out.endswith(b"alive\n")
    assert result.code == 7


def test_a_console_without_line_ends_is_bounded(guest):
    meeting = Meeting(
        guest,
        "(timeout 20 sh -c 'tr \"\\0\" x </dev/zero >/dev/ttyS0')\nmeet end\n",
    )
    meeting.wait("end")
    key, _ = running_guest(guest)
    logs = list((guest.state / "jobs" / key / "g0").glob("console.log*"))
    sizes = [path.stat().st_size for path in logs]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in logs}
    meeting.go("end")
    assert meeting.end().code == 0
    assert 1_000_000 < sum(sizes) < 9 << 20, sizes
    assert modes == {0o600}
