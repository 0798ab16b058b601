"""Real guests under a real libvirtd: its effects on files, sockets, logs and frames.

The guest is one boot sector that writes to its serial port: no kernel, running in 0.1 s.
"""

import contextlib
import grp
import os
import pwd
import re
import shutil
import socket
import stat
import struct
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import sparing
from consoles import recorder
from patience import LONG, wait_for
from vtorque_core.api.boot_source import BootSource
from vtorque_core.api.guest_driver import GuestDriver
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.libvirt_domain import Channel, Disk, Element, Interface
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.api.vm_options import FS_TYPE
from vtorque_core.base import errors, hypervisor, kvm, locks
from vtorque_core.base.names import JobAttempt, Paths, tap_name
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_file import Node
from vtorque_core.node.start import boot
from vtorque_core.node.start.attempt import StartAttempt
from vtorque_core.plan.domain import render as render_module
from vtorque_core.plan.domain.merge import Contributed, merge
from vtorque_core.plan.domain.render import DomainSpec, render
from vtorque_core.plan.guests import GuestSpec
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader, read
from vtorque_core.resources import netfilter, stopped_daemons
from vtorque_core.resources.domain import Domain
from vtorque_core.resources.netfilter import Netfilter
from vtorque_core.resources.user_disk import ServedDisk, UserDisk
from vtorque_survive import domains

pytestmark = pytest.mark.e2e

URI = "qemu:///system"
SAYS = b"VTORQUE-OK\r\n"
MAC = "52:54:00:76:74:01"
IP = "10.86.255.9"
IFF_VNET_HDR = 0x4000  # linux/if_tun.h


def boot_sector(again: bool = False) -> bytes:
    """Return a bootable MiB that writes SAYS to COM1 once, or forever."""
    code = (
        b"\xfa\x31\xc0\x8e\xd8"  # cli; ds = 0
        b"\xbe\x40\x7c\xba\xf8\x03"  # si = text, dx = COM1
        b"\xac\x84\xc0\x74\x03"  # next byte; if 0: out of the loop
        b"\xee\xeb\xf8"  # write it, continue
    )
    code += b"\xeb\xf0" if again else b"\xf4\xeb\xfd"  # from si on, or hlt forever
    sector = code.ljust(0x40, b"\0") + SAYS + b"\0"
    return (sector.ljust(510, b"\0") + b"\x55\xaa").ljust(1 << 20, b"\0")


@pytest.fixture(scope="module", autouse=True)
def libvirt() -> Iterator[None]:
    """Start libvirt, under a subreaper, unless it answers; end only processes started here."""
    hypervisor.close()  # an earlier test in this process may have killed the other end
    started: list[subprocess.Popen[bytes]] = []
    probe = ("virsh", "-c", URI, "version")
    if subprocess.run(probe, capture_output=True, timeout=180, check=False).returncode != 0:
        for command in (("virtlogd",), ("tini", "-s", "--", "libvirtd")):
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        deadline = time.monotonic() + LONG
        while subprocess.run(probe, capture_output=True, timeout=180, check=False).returncode != 0:
            assert time.monotonic() < deadline, "libvirtd does not start"
            time.sleep(0.2)
    kvm = Path("/dev/kvm")
    if kvm.exists():  # as Debian's udev rule; otherwise libvirt probes QEMU anew with each call
        os.chown(kvm, -1, grp.getgrnam("kvm").gr_gid)
        kvm.chmod(0o660)
    yield
    hypervisor.close()
    for process in reversed(started):
        process.terminate()
        process.wait(180)


@pytest.fixture
def guest() -> Iterator[GuestPlan]:
    """Return a guest's plan with its directories, as made by the prologue; end it afterwards."""
    name = f"vt-test-{uuid.uuid4().hex[:8]}"
    state = Path("/var/lib") / name
    state.mkdir(mode=0o711)
    plan = GuestPlan(
        job=JobAttempt("test", 0, "ada", 1000, "n"), index=0, rank=0, guests_per_node=1, name=name,
        uuid=str(uuid.uuid4()), hostname="vn", vcpus=1, ram_mib=64,
        image=Image("none", "linux", "none", "x86_64", ""),
        user=JobUser("nobody", 65534, 65534, (), "/", "/bin/sh"),
        request=JobRequest({}), addresses=(), peers=(), state_dir=state, run_dir=state,
        secret=b"",
    )  # fmt: skip
    yield plan
    hypervisor.destroy_domain(URI, plan.uuid, 30)
    recorder(plan).release()
    shutil.rmtree(state)


def overlay(guest: GuestPlan, again: bool = False) -> Disk:
    base, top = guest.state_dir / "base.raw", guest.state_dir / "root.qcow2"
    base.write_bytes(boot_sector(again))
    base.chmod(0o444)
    subprocess.run(
        ("qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", top),
        check=True,
        timeout=180,
    )
    os.chown(top, hypervisor.qemu_uid("libvirt-qemu"), 0)
    top.chmod(0o600)
    return Disk("root", str(top), "qcow2", boot=1, base=str(base), base_format="raw")


def start(
    guest: GuestPlan, *elements: Element, templates: Path | None = None, **keywords: Any
) -> None:
    merged = merge(Contributed("core", "vtorque-core", e) for e in elements)
    if recorder(guest).is_lost():
        recorder(guest).create()
    spec = DomainSpec(guest, "tcg", templates=templates)
    hypervisor.create_domain(URI, render(spec, merged, **keywords))


def await_console(guest: GuestPlan, text: bytes = SAYS) -> None:
    log = guest.state_dir / "console.log"
    deadline = time.monotonic() + LONG
    while not (log.exists() and text.strip() in log.read_bytes()):
        assert time.monotonic() < deadline, "the text is not on the console"
        time.sleep(0.05)


def owners(guest: GuestPlan) -> dict[str, tuple[int, int, int]]:
    found = {p.name: p.lstat() for p in guest.state_dir.iterdir()}
    return {n: (s.st_uid, s.st_gid, stat.S_IMODE(s.st_mode)) for n, s in found.items()}


def test_libvirt_changes_no_owner_and_the_guest_leaves_no_trace(guest: GuestPlan) -> None:
    disk = overlay(guest)
    before = owners(guest)
    start(guest, disk, Channel("c", "org.vtorque.test", str(guest.run_dir / "c.sock")))
    await_console(guest)
    during = owners(guest)
    assert {n: during[n] for n in before} == before
    assert during["console.log"] == (0, 0, 0o600)
    assert during["c.sock"][:2] == (0, 0)  # the core opens it to its user
    assert hypervisor.domain_runs(URI, guest.uuid)
    hypervisor.destroy_domain(URI, guest.uuid, 30)
    hypervisor.destroy_domain(URI, guest.uuid, 30)
    after = owners(guest)
    assert {n: after[n] for n in before} == before
    assert "c.sock" not in after
    assert not hypervisor.domain_runs(URI, guest.uuid)


def test_qemu_runs_as_the_qemu_user(guest: GuestPlan) -> None:
    start(guest, overlay(guest))
    pid = int(Path(f"/run/libvirt/qemu/{guest.name}.pid").read_text())
    assert Path(f"/proc/{pid}").stat().st_uid == pwd.getpwnam("libvirt-qemu").pw_uid
    hypervisor.destroy_domain(URI, guest.uuid, 30)
    # A zombie, if process 1 reaps slowly, holds nothing any more.
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_guest_uid_may_use_kvm(guest: GuestPlan, tmp_path: Path) -> None:
    """The device that QEMU sees in its mount namespace, where libvirt has made it again."""
    kvm.choose("auto", tmp_path, "libvirt-qemu")
    own = replace(guest, qemu_uid=Node().guest_uids + 7)
    disk = overlay(own)
    os.chown(disk.path, own.qemu_uid, 0)
    start(own, disk)
    pid = int(Path(f"/run/libvirt/qemu/{guest.name}.pid").read_text())
    status = dict(re.findall(r"^(\w+):\s*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.M))
    assert set(status["Uid"].split()) == {str(own.qemu_uid)}
    argv = ("nsenter", "-m", "-t", str(pid), "setpriv", "--reuid", str(own.qemu_uid))
    argv += ("--regid", status["Gid"].split()[0], "--groups", ",".join(status["Groups"].split()))
    subprocess.run((*argv, "sh", "-c", ": <>/dev/kvm"), check=True, timeout=180)


def test_second_domain_of_the_same_name_is_refused(guest: GuestPlan) -> None:
    disk = overlay(guest)
    start(guest, disk)
    with pytest.raises(errors.HostFault, match="already"):
        start(replace(guest, uuid=str(uuid.uuid4())), disk)
    assert hypervisor.domain_runs(URI, guest.uuid)


def read_by_virtlogd() -> int:
    """Return the bytes that root's one virtlogd has read."""
    pid = subprocess.check_output(["pgrep", "-x", "virtlogd"], text=True).split()[0]
    (count,) = re.findall(r"^rchar: (\d+)$", Path("/proc", pid, "io").read_text(), re.MULTILINE)
    return int(count)


def test_flooding_guest_costs_virtlogd_nothing(guest: GuestPlan) -> None:
    """tests/unit/resources/test_console.py tests the limit of the console log."""
    before = read_by_virtlogd()
    start(guest, overlay(guest, again=True))
    log = guest.state_dir / "console.log"
    wait_for(lambda: log.stat().st_size > 512 << 10, LONG, "half a MiB on the console")
    assert read_by_virtlogd() - before < 100_000
    assert [path.name for path in guest.state_dir.glob("console.log*")] == ["console.log"]


CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio")


@pytest.fixture
def control_groups(guest: GuestPlan) -> Iterator[None]:
    """Let libvirtd make control groups of guests; a machine of scripts/machine hides them."""
    mounts = Path("/proc/mounts").read_text()
    if re.search(rf"^\S+ {CGROUPS}\S* cgroup", mounts, re.MULTILINE):
        yield
        return
    own = [line.split(":")[1] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    mounted = [CGROUPS / name for name in CONTROLLERS if name in own] or [CGROUPS]
    for place in mounted:
        place.mkdir(exist_ok=True)
        kind = ["cgroup", "-o", place.name] if place != CGROUPS else ["cgroup2"]
        subprocess.run(["mount", "-t", *kind, "cgroup", place], check=True, timeout=180)
    yield
    hypervisor.destroy_domain(URI, guest.uuid, 30)
    for place in mounted:
        with contextlib.suppress(OSError):  # guests of another machine use it
            (place / "machine").rmdir()
        subprocess.run(["umount", place], check=True, timeout=180)
        if place != CGROUPS:
            place.rmdir()


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def charged_seconds(pid: int) -> float:
    """Return the CPU time that the control group of a process was charged for."""
    groups = dict(
        line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    )
    if "cpuacct" in groups:
        return int(Path(f"{CGROUPS}/cpuacct{groups['cpuacct']}/cpuacct.usage").read_text()) / 1e9
    statistics = Path(f"{CGROUPS}{groups['']}/cpu.stat").read_text()
    return int(re.findall(r"usage_usec (\d+)", statistics)[0]) / 1e6


def test_flooded_console_is_charged_to_the_guest_and_slowed_down(
    control_groups: None, guest: GuestPlan
) -> None:
    start(guest, overlay(guest, again=True))
    pid = locks.holder_of(recorder(guest).lock)
    assert pid is not None
    qemu = int(Path(f"/run/libvirt/qemu/{guest.name}.pid").read_text())
    groups = Path(f"/proc/{pid}/cgroup").read_text()
    assert "/machine" in groups and "qemu" in groups and guest.name[:8] in groups, groups
    assert groups == Path(f"/proc/{qemu}/cgroup").read_text()
    log = guest.state_dir / "console.log"
    wait_for(lambda: log.stat().st_size > 512 << 10, LONG, "half a MiB on the console")
    before, charged, begun = cpu_seconds(pid), charged_seconds(pid), time.monotonic()
    wait_for(lambda: cpu_seconds(pid) > before + 0.2, LONG, "some CPU time of the recorder")
    spent, elapsed = cpu_seconds(pid) - before, time.monotonic() - begun
    assert charged_seconds(pid) - charged > 0.9 * spent
    assert spent < elapsed / 4, "the recorder does not sleep after each read"


def test_guest_runs_on_when_its_recorder_is_killed(guest: GuestPlan) -> None:
    start(guest, overlay(guest, again=True))
    await_console(guest)
    recorder(guest).release()
    before = (guest.state_dir / "console.log").read_bytes()
    spent = hypervisor.on_domain(URI, guest.uuid, "CPU time", lambda d: d.info()[4])
    assert spent is not None

    def has_run() -> bool:
        now = hypervisor.on_domain(URI, guest.uuid, "CPU time", lambda d: d.info()[4])
        return now is not None and now > spent + 10**9

    wait_for(has_run, LONG, "a second of CPU time")
    assert hypervisor.domain_runs(URI, guest.uuid)
    assert (guest.state_dir / "console.log").read_bytes() == before


def test_user_disk_is_opened_as_the_user_and_not_by_qemu(guest: GuestPlan) -> None:
    private = Path("/var/tmp") / guest.name
    private.mkdir(mode=0o700)
    image = private / "disk.img"
    image.write_bytes(boot_sector())
    image.chmod(0o600)
    for path in (private, image):
        os.chown(path, 65534, 65534)
    place = private / "nbd.sock"
    server = subprocess.Popen(
        ("qemu-nbd", "--format=raw", f"--socket={place}", "--persistent", str(image)),
        user=65534, group=65534, extra_groups=(), cwd="/",
    )  # fmt: skip
    try:
        while not place.exists():
            time.sleep(0.05)
        handed = guest.run_dir / "nbd.sock"
        place.rename(handed)
        os.chown(handed, hypervisor.qemu_uid("libvirt-qemu"), 0)
        disk = Disk("data", str(image), "raw", boot=1, user_owned=True)
        start(guest, disk, sockets={"ua-core-data": str(handed)})
        await_console(guest)
    finally:
        hypervisor.destroy_domain(URI, guest.uuid, 30)
        server.terminate()
        server.wait(180)
        image.unlink()
        private.rmdir()


WORKERS = 20  # of libvirtd (libvirtd.conf, max_workers)


def stopped_disk(guest: GuestPlan, number: int) -> tuple[UserDisk, Domain]:
    """Start a daemon of the user nobody and stop it; return it with a domain that uses it."""
    place = guest.state_dir / str(number)
    place.mkdir(mode=0o711)
    image = place / "disk.img"
    image.write_bytes(boot_sector())
    os.chown(image, 65534, 65534)
    stem = place / "disk"
    qemu = hypervisor.qemu_uid("libvirt-qemu")
    daemon = UserDisk(ServedDisk.at_stem(stem, str(image), guest.user, qemu))
    daemon.create()
    recorder(replace(guest, state_dir=place, run_dir=place)).create()
    descriptor = os.open(daemon.lock, os.O_RDWR)
    pid = locks.lock_holder(descriptor)
    os.close(descriptor)
    kill = ("/bin/kill", "-STOP", str(pid))
    subprocess.run(kill, user=65534, group=65534, extra_groups=(), check=True, timeout=180)
    name = f"{guest.name}-{number}"
    plan = replace(guest, name=name, uuid=str(uuid.uuid4()), state_dir=place, run_dir=place)
    disk = Disk("data", str(image), "raw", boot=1, user_owned=True)
    merged = merge([Contributed("core", "vtorque-core", disk)])
    xml = render(DomainSpec(plan, "tcg"), merged, sockets={"ua-core-data": f"{stem}.sock"})

    def boots() -> None:
        with stopped_daemons.kill_stopped([daemon.lock]):
            hypervisor.create_domain(URI, xml)

    return daemon, Domain(plan.name, plan.uuid, URI, boots)


def test_stopped_daemons_do_not_block_workers_of_libvirtd(guest: GuestPlan) -> None:
    held = [stopped_disk(guest, number) for number in range(WORKERS)]

    def attempt(domain: Domain) -> str:
        with pytest.raises(errors.HostFault) as caught:
            domain.create()
        return str(caught.value)

    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            said = pool.map(attempt, [domain for _, domain in held])
            start(guest, overlay(guest))  # another program's
            await_console(guest)
            assert all("a process of yours stopped (SIGSTOP)" in text for text in said)
    finally:
        for daemon, domain in held:
            domain.release()
            daemon.release()
        for number in range(WORKERS):
            place = guest.state_dir / str(number)
            recorder(replace(guest, state_dir=place, run_dir=place)).release()


# -- The packet filter -----------------------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[str]:
    name = "vt-test"
    xml = (
        f"<network><name>{name}</name><bridge name='{name}0' stp='off' delay='0'/>"
        "<dns enable='no'/><ip address='10.86.255.1' netmask='255.255.255.0'/></network>"
    )
    hypervisor.call(URI, "create", lambda c: c.networkCreateXML(xml))
    yield name
    hypervisor.call(URI, "destroy", lambda c: c.networkLookupByName(name).destroy())


def test_filtered_nic_starts_and_stops(guest: GuestPlan, network: str) -> None:
    tap = tap_name(MAC)
    guard = Netfilter(tap, MAC, IP)
    guard.create()
    guard.create()
    try:
        nic = Interface("nic0", "network", network, MAC, IP)
        start(guest, overlay(guest), nic, taps={"ua-core-nic0": tap})
        netfilter.filter_tap(tap)
        assert Path(f"/sys/class/net/{tap}/master").resolve().name == f"{network}0"
        hypervisor.destroy_domain(URI, guest.uuid, 30)
        assert not Path(f"/sys/class/net/{tap}").exists()
    finally:
        guard.release()
        guard.release()
    tables = subprocess.run(("nft", "list", "tables"), capture_output=True, timeout=180, check=True)
    assert tap not in tables.stdout.decode()
    assert not Path(f"/sys/class/net/{tap}s").exists()


@pytest.mark.parametrize("model", ["virtio", "e1000e"])
def test_template_of_a_site_takes_the_checksums_from_guests(
    guest: GuestPlan, network: str, tmp_path: Path, model: str
) -> None:
    """A virtio guest tells Linux where a checksum goes. For an e1000e, QEMU tells it."""
    own = Path(render_module.__file__).with_name("templates") / "interface.xml.j2"
    changed = own.read_text().replace('model type="virtio"', f'model type="{model}"')
    (tmp_path / own.name).write_text(changed)
    nic, tap = Interface("nic0", "network", network, MAC, IP), tap_name(MAC)
    start(guest, overlay(guest), nic, taps={"ua-core-nic0": tap}, templates=tmp_path)
    flags = int(Path(f"/sys/class/net/{tap}/tun_flags").read_text(), 16)
    assert model != "virtio" or flags & IFF_VNET_HDR
    xml = hypervisor.on_domain(URI, guest.uuid, "XML", lambda domain: str(domain.XMLDesc()))
    assert f"<model type='{model}'/>" in str(xml)


def mac_bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def ipv4(mac: str, ip: str) -> bytes:
    """Return a broadcast UDP frame from this MAC and address, with a checksum (RFC 791)."""
    parts = (0x45, 0, 28, 0, 0, 1, 17, 0, socket.inet_aton(ip), b"\xff" * 4)
    head = struct.pack("!BBHHHBBH4s4s", *parts)
    total = sum(struct.unpack("!10H", head))
    check = 0xFFFF - (total % 0xFFFF)
    head = head[:10] + struct.pack("!H", check) + head[12:]
    return b"\xff" * 6 + mac_bytes(mac) + b"\x08\x00" + head + bytes(8)


def arp(mac: str, sender: str, ip: str) -> bytes:
    head = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1)
    body = mac_bytes(sender) + socket.inet_aton(ip) + bytes(6) + socket.inet_aton("10.86.255.1")
    return b"\xff" * 6 + mac_bytes(mac) + b"\x08\x06" + head + body


OTHER = "52:54:00:76:74:99"
# IPv6 falls under the same last rule as other protocols; on this bridge libvirt drops it anyway.
FRAMES = {
    "own": (ipv4(MAC, IP), True, True),
    "own arp": (arp(MAC, MAC, IP), True, True),
    "arp probe for another": (arp(MAC, MAC, "0.0.0.0"), False, True),  # noqa: S104 - RFC 5227
    "other mac": (ipv4(OTHER, IP), False, False),
    "other address": (ipv4(MAC, "10.86.255.77"), False, True),
    "arp for another address": (arp(MAC, MAC, "10.86.255.1"), False, True),
    "arp with another mac inside": (arp(MAC, OTHER, IP), False, False),
    "other protocol": (b"\xff" * 6 + mac_bytes(MAC) + b"\x88\xb5" + bytes(60), False, False),
    "vlan": (b"\xff" * 6 + mac_bytes(MAC) + b"\x81\x00\x00\x01\x08\x00" + bytes(60), False, False),
}


@pytest.fixture
def tap(network: str) -> Iterator[int]:
    """Return the guest's end of a tap device on the test network's bridge."""
    name = tap_name(MAC)
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1002))  # TAP, no header
    for words in (("master", f"{network}0"), ("up",)):
        subprocess.run(("ip", "link", "set", name, *words), check=True, timeout=180)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("ip", [IP, None], ids=["static", "dhcp"])
def test_only_own_frames_pass(tap: int, network: str, ip: str | None) -> None:
    guard = Netfilter(tap_name(MAC), MAC, ip)
    guard.create()
    try:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as bridge:
            bridge.bind((f"{network}0", 0))
            deadline = time.monotonic() + LONG
            while True:  # until the port forwards
                os.write(tap, FRAMES["own"][0])
                if passed(bridge, FRAMES["own"][0]):
                    break
                assert time.monotonic() < deadline, "the bridge forwards nothing"
            for name, (frame, static, dhcp) in FRAMES.items():
                os.write(tap, frame)
                assert passed(bridge, frame) is (static if ip else dhcp), name
    finally:
        guard.release()


# A configuration BPDU by a bridge of the best priority (IEEE 802.1D-2004, 9.3.1) in an LLC frame.
ROOT = b"\0\0" + mac_bytes(MAC)
BPDU = bytes(5) + ROOT + bytes(4) + ROOT + struct.pack("!5H", 0x8001, 0, 20 << 8, 2 << 8, 15 << 8)
HELLO = b"\x01\x80\xc2\0\0\0" + mac_bytes(MAC) + b"\0\x26\x42\x42\x03" + BPDU + bytes(8)


@pytest.fixture(params=["0", "1"], ids=["bridge", "spanning_tree"])
def bridge_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield the descriptor of a tap device that is the port of a bridge."""
    name = tap_name(MAC)
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1002))
    link = ("ip", "link")
    for words in (
        ("add", "vt-tree", "type", "bridge", "stp_state", request.param),
        ("set", "vt-tree", "up"),
        ("set", name, "master", "vt-tree"),
        ("set", name, "up"),
    ):
        subprocess.run((*link, *words), check=True, timeout=180)
    try:
        Netfilter(name, MAC, IP).create()
        deadline = time.monotonic() + LONG
        while Path(f"/sys/class/net/{name}/brport/state").read_text() == "0\n":
            assert time.monotonic() < deadline, "the port stays disabled"
            time.sleep(0.05)
        yield descriptor
    finally:
        Netfilter(name, MAC, IP).release()
        os.close(descriptor)
        subprocess.run((*link, "del", "vt-tree"), check=True, timeout=180)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("bridge_port", ["1"], indirect=True)
def test_guest_cannot_join_the_spanning_tree_of_a_guarded_bridge(
    bridge_port: int, guarded: bool
) -> None:
    """Without the guard, the guest becomes the root bridge and gets the site's traffic."""
    if guarded:
        netfilter.filter_tap(tap_name(MAC))
    root = Path("/sys/class/net/vt-tree/bridge/root_id")
    own = root.read_text()
    os.write(bridge_port, HELLO)
    assert (root.read_text() == own) is guarded


@pytest.mark.parametrize("guarded", [False, True])
def test_frames_to_reserved_macs_reach_only_the_filter(bridge_port: int, guarded: bool) -> None:
    """Without the guard, the node accepts these frames, and the bridge learns these MACs."""
    name = tap_name(MAC)
    if guarded:
        netfilter.filter_tap(name)
    # The bridge consumes frames that a socket for one protocol does not see at its port.
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as port:
        port.bind((name, 0))
        for last in range(16):
            frame = b"\x01\x80\xc2\0\0" + bytes([last]) + ipv4(OTHER, IP)[6:]
            os.write(bridge_port, frame)
        assert received(port) == (not guarded)
    forwards = Path(f"/sys/class/net/{name}/brport/state").read_text() == "3\n"
    learned = mac_bytes(OTHER) in Path("/sys/class/net/vt-tree/brforward").read_bytes()
    assert learned == (forwards and not guarded)


def received(port: socket.socket) -> bool:
    """Return whether a frame has arrived. Tap devices deliver a frame before write(2) returns."""
    try:
        return bool(port.recv(2000, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False


def passed(bridge: socket.socket, frame: bytes) -> bool:
    bridge.settimeout(0.3)
    try:
        while True:
            if bridge.recv(2000) in (frame, frame[:12] + frame[16:]):  # the kernel strips VLAN tags
                return True
    except TimeoutError:
        return False


# -- Boot sources ----------------------------------------------------------------------------------


def template(directory: Path) -> BootSource:
    """Return the boot source of doc/plugins.md, with its files in a directory."""
    page = (Path(__file__).parents[2] / "doc/plugins.md").read_text(encoding="utf-8")
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Template" in b)
    names: dict[str, Any] = {}
    exec(compile(code, "doc/plugins.md", "exec"), names)  # noqa: S102 - our own page
    names["TEMPLATE"] = directory
    (source,) = names["vtorque_boot_sources"](SimpleNamespace(name="from-template"))
    assert isinstance(source, BootSource)
    return source


@pytest.mark.parametrize("memory", sparing.each(3, ["there", "missing", "corrupt"]))
def test_guest_is_restored_from_a_template_or_booted_cold(
    guest: GuestPlan, tmp_path: Path, memory: str
) -> None:
    disk = overlay(guest)
    start(guest, disk)
    await_console(guest)
    hypervisor.suspend_domain(URI, guest.uuid)
    if memory != "missing":
        domains.save_domain(URI, guest.uuid, str(tmp_path / "memory"), 60)
    hypervisor.destroy_domain(URI, guest.uuid)
    recorder(guest).release()
    recorder(guest).create()
    if memory == "corrupt":
        (tmp_path / "memory").write_bytes(b"LibvirtQemudSave, and then nothing")
    paths = Paths(tmp_path / "state", tmp_path / "run")
    paths.run.mkdir()
    node = Node(accel="tcg", qemu_user="libvirt-qemu", libvirt_uri=URI)
    site: Any = SimpleNamespace(node=node, paths=paths, owner=0, templates=Path("/none"))
    driver = mock.create_autospec(GuestDriver, instance=True)  # a boot sector reports nothing
    merged = merge([Contributed("core", "vtorque-core", disk)])
    request = JobRequest({FS_TYPE.key: "sharedfs"})
    uid = hypervisor.qemu_uid("libvirt-qemu")
    plan = replace(guest, request=request, source=template(tmp_path), qemu_uid=uid)
    each = GuestSpec(plan, driver, "t", (), merged, ())
    with Journal.start(paths, JobHeader(guest.job, "local")) as journal:
        until = time.monotonic() + 120
        job = StartAttempt(guest.job, guest.user, site, until, journal, Plugins())
        assert boot.boot_all(job, boot.guest_boots(job, [each])) == [None]
        *_, record = read(journal.path).open
    assert (record.kind, record.args["uuid"]) == ("domain", guest.uuid)
    assert domains.domain_state(URI, guest.uuid) == "runs"
    if memory == "there":  # the boot sector has halted before it was saved
        assert SAYS.strip() not in (guest.state_dir / "console.log").read_bytes()
    else:
        await_console(guest)
    driver.await_ready.assert_called_once()
