"""Users' own images on a site with an administrator, attacked (plugins/own-images/README.md)."""

import contextlib
import ipaddress
import json
import os
import re
import shutil
import socket
import struct
from pathlib import Path

import pycdlib
import pytest

from busybox_layout import busybox_layout
from forged_request import forged_pairs
from opened_by import opened_by
from users import run

pytestmark = pytest.mark.e2e

ATTACKER = Path(__file__).resolve().parents[1] / "support/attacker.c"
BRIDGE = "vtorque-e2e0"
REPORT = """#!/bin/sh
echo "$(id -u) in $PWD, $GREETING, $(cat /etc/os-release)"
touch work/made
exit 7
"""


@pytest.fixture(scope="module")
def base_image(node):
    """Build the site's base image for own images."""
    node.root("vmgr", "images", "build", "own", "own", timeout=600)


@pytest.fixture(scope="module")
def attack(tmp_path_factory):
    """Return the attacker's program."""
    path = tmp_path_factory.mktemp("attack") / "attack"
    run("musl-gcc", "-static", "-O2", "-o", path, ATTACKER)
    return path.read_bytes()


@pytest.fixture
def work(guest):
    """Return a directory of the user, which guests get."""
    path = guest.home / "work"
    path.mkdir()
    run("chown", f"{guest.user}:", path)
    return path


@pytest.fixture
def layout(guest, work, base_image, attack):
    """Return an OCI layout of the user."""
    yield busybox_layout(work / "app", guest.user, attack=attack)
    shutil.rmtree(guest.home / ".cache/vtorque", ignore_errors=True)


@pytest.fixture
def allowed(config):
    """Let the site accept own images, although this kernel has no AppArmor."""
    config("plugin.own-images", "allow = true\nallow_root = true\nopt_in_unconfined_qemu = true")
    return config


def own_job(node, text, image, *options):
    """Run a job in an own image with the directory "work"; return the result."""
    return node.job(text, "-vm", ",".join((f"img={image}", "work=work", *options)))


def start(node, text, image, *options):
    """Submit a job in an own image; return its id."""
    return node.submit(text, "-vm", ",".join((f"img={image}", "work=work", *options)))


def squashfs(node):
    """Return the only converted image in the user's cache."""
    (found,) = (node.home / ".cache/vtorque/images").glob("*.squashfs")
    return found


def write(path, content, node):
    """Create a file for a waiting script, atomically."""
    part = path.with_name(f".{path.name}")
    part.write_text(content)
    run("chown", f"{node.user}:", part)
    part.rename(path)


# -- Policy ----------------------------------------------------------------------------------------


def test_own_image_is_refused_by_default(guest, layout):
    done = own_job(guest, REPORT, f"oci:{layout}")
    assert done.code == 2
    assert b"which this site does not accept (set by [plugin.own-images] allow)" in done.done.stderr
    value = f"/home/{guest.user}/.cache/vtorque/images/{'a' * 64}.squashfs"
    answer, out, err = forged_pairs(guest, ("img", value), ("work", "home"))
    assert (answer["code"], out) == (121, "") and "does not accept" in err


def test_node_without_confinement_refuses_own_images(guest, layout, config):
    """The test's kernel has neither AppArmor nor SELinux."""
    config("plugin.own-images", "allow = true")
    done = own_job(guest, REPORT, f"oci:{layout}")
    assert done.code == 121, done.done.stderr
    assert b"neither AppArmor nor SELinux confines QEMU" in done.err
    told = guest.root("vtorque", "doctor", "--json", "--config", str(guest.config), check=False)
    failed = [each["message"] for each in json.loads(told.stdout) if each["status"] == "failed"]
    assert any("own images are refused: neither AppArmor" in each for each in failed)


def test_job_of_ordinary_user_runs_in_own_image(guest, layout, allowed):
    done = own_job(guest, REPORT, f"oci:{layout}")
    uid = layout.stat().st_uid
    assert (done.code, done.out) == (
        7, f"{uid} in {guest.home}, hello, ID=mine\n".encode()
    ), (done.done.stderr, done.err)  # fmt: skip
    assert (guest.home / "work/made").stat().st_uid == uid


def test_root_inside_needs_its_own_switch(guest, layout, config):
    config("plugin.own-images", "allow = true\nopt_in_unconfined_qemu = true")
    done = own_job(guest, REPORT, f"oci:{layout}", "root=script")
    assert done.code == 2 and b"[plugin.own-images] allow_root" in done.done.stderr
    value = f"/home/{guest.user}/.cache/vtorque/images/{'a' * 64}.squashfs"
    for pairs in (
        (("img", value), ("root", "script")),
        (("img", value), ("root", "true")),
        (("img", f"{guest.home}/d.raw#512:1:1"),),
    ):
        answer, out, err = forged_pairs(guest, *pairs, ("work", "home"))
        assert (answer["code"], out) == (121, "") and "allow_root" in err, err


def test_network_without_filter_is_refused_on_the_node(guest, layout, allowed):
    assert own_job(guest, REPORT, f"oci:{layout}").code == 7
    allowed("network", "filter = false\nopt_in_unfiltered = true")
    done = guest.job(REPORT, "--no-pull", "-vm", f"img=oci:{layout},work=work")
    assert done.code == 121, done.done.stderr
    assert b"[network] filter is false" in done.err


# -- Root inside -----------------------------------------------------------------------------------

AS_ROOT = """#!/bin/sh
echo "$(id -u) $HOME"
ls -a $HOME
cd $HOME/work
mkdir /written && echo wrote
touch made && cat app/index.json >/dev/null
chown 1:1 made || echo no chown
chown 0:0 made && echo own
mknod device c 1 3 || echo no device
cat /bin/busybox >program && chmod 4755 program || echo no setuid
chmod 2755 program || echo no setgid
chmod 1755 program && echo executable
su -s /bin/sh nobody -c 'cat made' || echo no access as nobody
cat link || echo no link
grep -c '^overlay / overlay [^ ]*nosuid' /proc/mounts
exit 8
"""


def test_script_runs_as_root_with_the_users_ids_on_shares(guest, layout, work, allowed):
    """Files belong to the user. Guest root reaches no other file of the node."""
    uid, gid = work.stat().st_uid, work.stat().st_gid
    (work / "link").symlink_to("/root/.profile")
    (guest.home / "secret").write_text("secret")
    done = own_job(guest, AS_ROOT, f"oci:{layout}", "root=script")
    said = done.out.decode().splitlines()
    assert done.code == 8, (done.done.stderr, done.err)
    assert said == [
        f"0 {guest.home}", ".", "..", "work",
        "wrote", "no chown", "own", "no device", "no setuid", "no setgid", "executable",
        "no access as nobody", "no link", "0",
    ], said  # fmt: skip
    for name in ("made", "program"):
        status = (work / name).stat()
        assert (status.st_uid, status.st_gid) == (uid, gid)
    assert (work / "program").stat().st_mode & 0o7777 == 0o1755
    assert not os.path.lexists(work / "device")


def test_sudo_inside_is_refused_by_debian_12(guest, layout, allowed):
    if b"--translate-uid" in run("/usr/lib/qemu/virtiofsd", "--help").stdout:
        pytest.skip("this virtiofsd translates ids")
    done = own_job(guest, REPORT, f"oci:{layout}", "root=true")
    assert done.code == 2 and b"virtiofsd 1.13" in done.done.stderr
    assert b"root=script" in done.done.stderr


# -- Network ---------------------------------------------------------------------------------------

ATTACKS = """#!/bin/sh
for nic in /sys/class/net/*; do nic=${nic##*/}; [ $nic = lo ] || break; done
cat /sys/class/net/$nic/address >work/.nic; ip -4 -o addr show dev $nic >>work/.nic
nc -ll -p 9000 -e /bin/hostname &
mv work/.nic work/nic
while ! [ -e work/frames ]; do sleep 0.1; done
. work/frames
/bin/attack send $nic $FRAMES || echo SEND-FAILED
/bin/attack tcp $OTHER 22 111 2049
/bin/attack tcp 169.254.169.254 80
ping -c 1 -W 2 $OTHER >/dev/null && echo REACHED-OTHER
arping -c 2 -I $nic $OTHER >/dev/null && echo ARP-REACHED-OTHER
while read address name _; do
  case $address in 10.87.*) ping -c 1 -W 5 $address >/dev/null && echo "peer $name" ;; esac
done </etc/hosts
touch work/sent
while ! [ -e work/pinged ]; do sleep 0.1; done
"""
OTHERS = """#!/bin/sh
for nic in /sys/class/net/*; do nic=${nic##*/}; [ $nic = lo ] || break; done
cat /sys/class/net/$nic/address >.nic; ip -4 -o addr show dev $nic >>.nic; mv .nic nic
while ! [ -e target ]; do sleep 0.1; done
nc -w 5 $(cat target) 9000 </dev/null && echo REACHED-OWN || echo failed
touch pinged
sleep 2
"""


def mac_bytes(mac):
    return bytes.fromhex(mac.replace(":", ""))


def ipv4(source, target, protocol, payload, fragment=0):
    """Return an IPv4 packet (RFC 791)."""
    packed = [ipaddress.IPv4Address(a).packed for a in (source, target)]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 1, fragment, 64, protocol, 0)
    total = sum(struct.unpack("!10H", head + b"".join(packed)))
    total = (total & 0xFFFF) + (total >> 16)
    return (
        head[:10]
        + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF)
        + b"".join(packed)
        + payload
    )


def udp(source, target):
    return struct.pack("!HHHH", source, target, 8, 0)


def nic(path):
    """Return MAC and address of the guest that wrote this file."""
    mac, line = path.read_text().split("\n", 1)
    return mac, re.search(r"inet ([\d.]+)/", line)[1]


def attacks(ip):
    """Return name to (destination, packet); each destination is another one."""
    tries = {
        "allowed": (17, udp(4000, 443), 0), "udp 700": (17, udp(700, 443), 0),
        "udp 1023": (17, udp(1023, 53), 0), "nfs": (17, udp(4000, 2049), 0),
        "portmapper": (17, udp(4000, 111), 0), "mountd": (17, udp(4000, 20048), 0),
        "roce": (17, udp(50000, 4791), 0), "fragment": (17, udp(4000, 443), 0x2000),
        "gre": (47, bytes(24), 0), "sctp": (132, bytes(16), 0),
    }  # fmt: skip
    found = {}
    for number, (name, (protocol, payload, fragment)) in enumerate(tries.items()):
        target = f"198.51.100.{number + 1}"
        found[name] = target, ipv4(ip, target, protocol, payload, fragment)
    found["metadata"] = "169.254.169.254", ipv4(ip, "169.254.169.254", 17, udp(4000, 80))
    return found


@pytest.mark.usefixtures("two_slots")
def test_packets_of_root_inside_reach_neither_services_nor_other_jobs(guest, layout, work, allowed):
    """Real guests: two of a job with an own image, and one of another user's job."""
    other = Path("/home/vte2e2")
    allowed("node", "exclusive = false")  # so that jobs of two users run at the same time
    (other / "job.sh").write_text(OTHERS)
    (other / "job.sh").chmod(0o644)
    guest.as_user("vsub", "-o", "out", "-j", "oe", "job.sh", user="vte2e2")
    guest.wait_for((other / "nic").exists, what="the other job")
    job = start(guest, ATTACKS, f"oci:{layout}", "root=script", "vms_per_node=2")
    guest.wait_for((work / "nic").exists, what="the job in the own image")
    (mac, ip), (other_mac, other_ip) = nic(work / "nic"), nic(other / "nic")
    bridge = Path(f"/sys/class/net/{BRIDGE}/address").read_text().strip()
    tries = attacks(ip)
    frames = [
        mac_bytes(bridge) + mac_bytes(mac) + b"\x08\0" + packet for _, packet in tries.values()
    ]
    for target in (other_mac, bridge, "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:fb"):
        for address in (other_ip, "198.51.100.200", "255.255.255.255", "224.0.0.251"):
            packet = ipv4(ip, address, 17, udp(5353, 5353))
            frames.append(mac_bytes(target) + mac_bytes(mac) + b"\x08\0" + packet)
    uplink = re.search(r"dev (\S+)", run("ip", "-4", "route", "show", "default").stdout.decode())[1]
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as all_nics:
        all_nics.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE, socket(7)
        all_nics.setblocking(False)
        hexed = " ".join(each.hex() for each in frames)
        write(work / "frames", f"OTHER={other_ip}\nFRAMES='{hexed}'\n", guest)
        guest.wait_for((work / "sent").exists, what="the attacks")
        with socket.create_connection((ip, 9000), 60) as service:
            assert service.recv(100).startswith(b"v"), "the node cannot connect to the guest"
        (other / "target").write_text(ip)
        guest.wait_for((other / "pinged").exists, what="the other job's pings")
        write(work / "pinged", "", guest)
        left, at_other = set(), []
        with contextlib.suppress(BlockingIOError):
            while True:
                frame, (name, _, kind, *_) = all_nics.recvfrom(4096)
                if kind != 4:  # PACKET_OUTGOING, packet(7)
                    continue
                if name == uplink and frame[12:14] == b"\x08\0":
                    left.add(str(ipaddress.IPv4Address(frame[30:34])))
                if name == "vt" + other_mac.replace(":", ""):
                    at_other.append(frame)
    guest.wait_for(lambda: guest.state_of(job) is None, what="the job's end")
    guest.wait_for(lambda: not guest.jobs("vte2e2"), what="the other job's end")
    said = (guest.home / "out").read_text()
    assert "SEND-FAILED" not in said and "REACHED" not in said, said
    assert len(re.findall("^peer ", said, re.MULTILINE)) == 2, said
    assert "open" not in said, said
    assert {name for name, (target, _) in tries.items() if target in left} == {"allowed"}
    assert at_other, "no frames were captured: this test shows nothing"
    source = ipaddress.IPv4Address(ip).packed  # of IPv4 and ARP; the node asks for it by ARP
    assert not [f for f in at_other if mac_bytes(mac) in f or source in (f[26:30], f[28:32])]
    told = (other / "out").read_text()
    assert "failed" in told and "REACHED-OWN" not in told, told
    for name in ("job.sh", "nic", "target", "pinged", "out"):
        (other / name).unlink()


# -- Image file and seed ---------------------------------------------------------------------------

WAITS = """#!/bin/sh
touch work/began
while ! [ -e work/go ]; do sleep 0.1; done
exit 9
"""


def waiting(node, work, image, *options):
    """Start a job and wait until its script runs; return its id."""
    job = start(node, WAITS, image, *options)
    node.wait_for((work / "began").exists, what="the script")
    return job


def end(node, work, job):
    """End a job of :func:`waiting`."""
    write(work / "go", "", node)
    node.wait_for(lambda: node.state_of(job) is None, what="the job's end")


def test_only_the_user_opens_the_image(guest, layout, work, allowed):
    guest.as_user("vmgr", "images", "pull", f"oci:{layout}")
    with opened_by(squashfs(guest)) as opened:
        job = waiting(guest, work, f"oci:{layout}")
        end(guest, work, job)
    uid = work.stat().st_uid
    assert {each for each, _ in opened} == {uid}, opened


def test_only_the_user_opens_the_disk(guest, base_image, work, allowed):
    """A disk that does not boot, so that the whole start and the release are covered."""
    disk = work / "own.qcow2"
    run("qemu-img", "create", "-q", "-f", "qcow2", disk, "4M")
    run("chown", f"{guest.user}:", disk)
    allowed("node", "start_timeout = 20")
    with opened_by(disk) as opened:
        done = own_job(guest, REPORT, "work/own.qcow2")
    assert done.code == 121, (done.done.stderr, done.err)
    assert {each for each, _ in opened} == {work.stat().st_uid}, opened


@pytest.fixture
def images(guest, layout, allowed):
    """Return the user's cache with a converted image, and its directory's owner."""
    guest.as_user("vmgr", "images", "pull", f"oci:{layout}")
    return squashfs(guest).parent


def by_link(images, target):
    path = images / f"{'b' * 64}.squashfs"
    path.symlink_to(target)
    return path


def owned_by_root(images):
    path = images / f"{'c' * 64}.squashfs"
    path.write_bytes(bytes(4096))
    return path


def fifo(images):
    path = images / f"{'d' * 64}.squashfs"
    os.mkfifo(path)
    os.chown(path, images.stat().st_uid, -1)
    return path


def sparse(images):
    path = images / f"{'e' * 64}.squashfs"
    path.touch()
    os.truncate(path, 1 << 40)
    os.chown(path, images.stat().st_uid, -1)
    return path


FORGED_FILES = {
    "missing": (lambda images: images / f"{'a' * 64}.squashfs", "does not exist on the node"),
    "link to a device": (lambda images: by_link(images, "/dev/vda"), "squashfs"),
    "link to root's file": (lambda images: by_link(images, "/etc/shadow"), "squashfs"),
    "file of root": (owned_by_root, "belongs to uid 0"),
    "fifo": (fifo, "not a regular file"),
    "too large": (sparse, "the limit is 64G"),
}


@pytest.mark.parametrize("make, why", FORGED_FILES.values(), ids=FORGED_FILES)
def test_forged_image_file_is_refused_on_the_node(guest, images, make, why):
    path = make(images)
    answer, out, err = forged_pairs(guest, ("img", str(path)), ("work", str(guest.home / "work")))
    path.unlink(missing_ok=True)
    assert (answer["code"], out) == (121, ""), (answer, err)
    assert why in err, err


@pytest.mark.parametrize(
    "value",
    ["/etc", "/home", "/home/vte2e2", "HOME/../vte2e2", "HOME/app/../..", "", "relative"],
)
def test_forged_directory_is_refused_on_the_node(guest, images, value):
    file = str(squashfs(guest))
    value = value.replace("HOME", str(guest.home))
    answer, out, err = forged_pairs(guest, ("img", file), ("work", value))
    assert (answer["code"], out) == (121, ""), (answer, err)
    assert "not a directory below your home" in err, err


@pytest.mark.parametrize(
    ("key", "value"),
    [("pci", "gpu:1"), ("vrdma", "true"), ("unclot", "true"), ("resume", "1.vm-1"),
     ("checkpoint", "every:1h"), ("arch", "aarch64"), ("distro", "debian"), ("root", "true")],
)  # fmt: skip
def test_forged_option_is_refused_on_the_node(guest, images, key, value):
    work = str(guest.home / "work")
    answer, out, err = forged_pairs(
        guest, ("img", str(squashfs(guest))), ("work", work), (key, value)
    )
    assert (answer["code"], out) == (121, ""), (answer, err)
    assert key in err, err


SECRET = b"SECRET OF THE SITE"


def seed_listing(path):
    """Return the paths of the files in a seed, and the contents by path."""
    image, found = pycdlib.PyCdlib(), {}
    image.open(str(path))
    for top, _, names in image.walk(rr_path="/"):
        for name in names:
            place = f"{top.rstrip('/')}/{name}"
            with image.open_file_from_iso(rr_path=place) as file:
                found[place] = file.read()
    image.close()
    return found


def test_seed_has_nothing_of_the_site_and_of_other_jobs(guest, layout, work, allowed, scratch):
    for what in ("prologue", "epilogue", "precancel", "cloud_config"):
        (scratch / what).mkdir()
        (scratch / what / "10-site.cfg").write_bytes(b"#!/bin/sh\n# " + SECRET + b"\n")
        allowed("plugin.linux-guest", f'{what} = "{scratch / what}"')
    job = waiting(guest, work, f"oci:{layout}", "root=script")
    (seed,) = guest.state.glob(f"jobs/{job}.*/g0/seed.iso")
    assert SECRET not in seed.read_bytes()
    found = seed_listing(seed)
    end(guest, work, job)
    secret = Path(guest.state, "site.secret").read_bytes().strip()
    assert secret not in b"".join(found.values())
    assert sorted(found) == [
        "/vtorque/agent.conf",
        "/vtorque/files/0000",  # what sudo refuses the user
        "/vtorque/ids/group",
        "/vtorque/ids/passwd",
        "/vtorque/ids/passwd.sh",
        "/vtorque/ids/shadow",
        "/vtorque/setup.sh",
    ]
    accounts = [line.split(":")[0] for line in found["/vtorque/ids/passwd"].decode().split()]
    assert accounts == [guest.user]
    assert b"vte2e2" not in b"".join(found.values())


# -- Failures, and a job that runs -----------------------------------------------------------------


def test_guest_that_does_not_become_ready_fails_its_job_only(guest, images):
    """The next job runs on the same node."""
    file = squashfs(guest)
    file.chmod(0o600)
    file.write_bytes(bytes(file.stat().st_size))
    layout = guest.home / "work/app"
    done = guest.job(REPORT, "--no-pull", "-vm", f"img=oci:{layout},work=work")
    assert done.code == 121, (done.done.stderr, done.err)
    assert b"the guest with your own image did not become ready" in done.err
    assert b"no squashfs that can be mounted" in done.err
    assert guest.job("#!/bin/sh\nexit 5\n").code == 5


# A boot sector for BIOS; see test_personal.py.
BOOT_SECTOR = bytes.fromhex(
    "31c08ed88ec0b80103b9020030f6bb007ccd13721abe387cac84c0741288c4bafd03eca82074fb88e0baf803ee"
    "ebe9ba0505b001eef4ebfd"
)


@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_own_disk_that_is_not_ready_fails_its_job_and_does_not_change(
    guest, work, base_image, allowed, kind
):
    raw, disk = work / "disk", work / f"own.{kind}"
    text = b"vtorque-test: booted and wrote\r\n"
    raw.write_bytes((BOOT_SECTOR + text).ljust(510, b"\0") + b"\x55\xaa" + bytes(1 << 20))
    run("qemu-img", "convert", "-f", "raw", "-O", kind, raw, disk)
    run("chown", f"{guest.user}:", disk)
    before = disk.read_bytes()
    done = own_job(guest, REPORT, f"work/{disk.name}")
    assert done.code == 121, (done.done.stderr, done.err)
    assert b"the guest with your own image did not become ready" in done.err
    assert text.strip() in done.err
    assert disk.read_bytes() == before


def test_disk_changed_after_submission_is_refused(guest, work, base_image, allowed):
    disk = work / "own.raw"
    disk.write_bytes(bytes(1 << 20))
    run("chown", f"{guest.user}:", disk)
    status = disk.stat()
    value = f"{disk}#{status.st_size}:{status.st_ctime_ns - 1}:{status.st_ino}"
    answer, out, err = forged_pairs(guest, ("img", value), ("work", str(work)))
    assert (answer["code"], out) == (121, "") and "changed or replaced" in err, err


def test_job_is_suspended_and_resumed_but_not_saved_or_migrated(
    guest, layout, work, allowed, scratch
):
    allowed("plugin.survive", f'checkpoints = "{scratch}"')
    job = waiting(guest, work, f"oci:{layout}")
    guest.as_user("vmgr", "suspend", job)
    _, domain = guest.running()
    virsh = ("/usr/bin/virsh", "domstate", domain)
    guest.wait_for(lambda: guest.root(*virsh).stdout.strip() == b"paused", what="the suspension")
    guest.as_user("vmgr", "resume", job)
    guest.wait_for(lambda: guest.root(*virsh).stdout.strip() == b"running", what="the resumption")
    refused = guest.as_user("vmgr", "checkpoint", job, check=False)
    assert refused.returncode != 0 and b"OwnImage" in refused.stderr, refused.stderr
    refused = guest.root("vmgr", "migrate", job, "n2", check=False)
    assert refused.returncode != 0, refused.stderr
    end(guest, work, job)
    assert list(scratch.rglob("*.memory")) == []


FLOOD = """#!/bin/sh
dd if=/dev/zero of=/dev/console bs=1M count=8 2>/dev/null &
dd if=/dev/urandom of=/dev/console bs=64k count=16 2>/dev/null &
for port in /dev/virtio-ports/* /dev/vport*; do dd if=/dev/urandom of=$port bs=64k count=4 & done
sleep 10
touch work/flooded
exit 3
"""


def test_flood_of_console_and_ports_is_bounded(guest, layout, work, allowed):
    job = start(guest, FLOOD, f"oci:{layout}", "root=script")
    guest.wait_for((work / "flooded").exists, what="the flood")
    sizes = [path.stat().st_size for path in guest.state.glob(f"jobs/{job}.*/g0/console.log*")]
    assert sizes and sum(sizes) <= 3 << 20
    guest.wait_for(lambda: guest.state_of(job) is None, what="the job's end")
    assert guest.job("#!/bin/sh\nexit 5\n").code == 5
