"""Several NICs in real guests: a bridge and a macvtap made here, and the node's own network."""

import platform
import re
import socket
import subprocess

import pytest

pytestmark = pytest.mark.e2e

BRIDGE, HOST, SUBNET = "vte2ebr0", "10.231.0.1", "10.231.0.0/16"
LOWER, FAR, FAR_IP = "vte2eve0", "vte2eve1", "10.232.0.1"
BAD_IP, BAD_MAC = "10.231.250.250", "52:54:00:ba:dd:ad"
ALL = 3  # ETH_P_ALL, packet(7)


def ip(*words):
    subprocess.run(["ip", *words], check=True, timeout=180)


@pytest.fixture
def site(clean):
    """Return a function that adds text to the node's config until the test ends."""
    own = clean.config.read_text()
    yield lambda text: clean.config.write_text(own + text)
    clean.config.write_text(own)


@pytest.fixture
def bridge():
    """Make a bridge with an address of the node on it."""
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", f"{HOST}/16", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    yield BRIDGE
    ip("link", "del", BRIDGE)


@pytest.fixture
def cable():
    """Make a pair of interfaces: one for a macvtap, the other is the network's far end."""
    ip("link", "add", LOWER, "type", "veth", "peer", "name", FAR)
    ip("addr", "add", f"{FAR_IP}/16", "dev", FAR)
    for name in (LOWER, FAR):
        ip("link", "set", name, "up")
    yield LOWER
    ip("link", "del", LOWER)


@pytest.fixture
def guest_prologue(clean, site):
    """Return a function that lets every guest run a script as root before its job."""
    place = clean.config.parent / "guest-prologue-nets"

    def put(text, networks):
        place.mkdir()
        script = place / "10-test"
        script.write_text(text)
        script.chmod(0o755)
        site(f'\n[plugin.linux-guest]\nprologue = "{place}"\n{networks}')

    yield put
    subprocess.run(["rm", "-rf", place], check=True)


def hpc(**keys):
    lines = {"source": BRIDGE, "subnet": SUBNET, **keys}
    text = "".join(f"{k} = {str(v).lower() if v is True else repr(v)}\n" for k, v in lines.items())
    return f"\n[networks.hpc]\n{text}"


def test_second_nic_on_a_bridge_has_separate_host_names(clean, site, bridge):
    site(hpc(mtu=1400))
    host = platform.node().split(".")[0]
    result = clean.job(
        "#!/bin/sh\n"
        "ip -4 -o addr show scope global | awk '{print $2, $4}'\n"
        "ip route | grep -c default; ip route | awk '/default/{print $3, $5}'\n"
        f"cat /etc/hosts; cat /sys/class/net/eth1/mtu\n"
        f"echo; nc -w 3 v{host}-1-hpc 9 </dev/null 2>&1; nc -w 3 {HOST} 9 </dev/null 2>&1\n",
        "-vm", "vms_per_node=2",
    )  # fmt: skip
    out = result.out.decode()
    nics = dict(re.findall(r"^(eth\d) (10\S+)$", out, re.MULTILINE))
    assert re.fullmatch(r"10\.87\.0\.\d+/16", nics["eth0"]), (out, result.err)
    assert re.fullmatch(r"10\.231\.\S+/16", nics["eth1"])
    assert "\n1\n10.87.0.1 eth0\n" in out
    for index in (0, 1):
        assert re.search(rf"^10\.87\.\S+ v{host}-{index}$", out, re.MULTILINE)
        assert re.search(rf"^10\.231\.\S+ v{host}-{index}-hpc$", out, re.MULTILINE)
    assert "\n1400\n" in out
    assert out.count("onnection refused") == 2, out  # both exist, and no process listens


@pytest.mark.full
def test_guest_root_cannot_forge_addresses_on_the_second_nic(clean, guest_prologue, bridge):
    guest_prologue(
        "#!/bin/sh\n"
        f"ping -c 1 -W 2 {HOST} || exit 1\n"
        f"ip addr add {BAD_IP}/16 dev eth1\n"
        f"ping -c 2 -W 1 -I {BAD_IP} {HOST}\n"
        f"ip link set eth1 down; ip link set eth1 address {BAD_MAC}; ip link set eth1 up\n"
        f"ping -c 2 -W 1 {HOST}\n"
        f"ip link set eth0 down\nping -c 2 -W 1 -I eth1 {HOST}\nexit 0\n",
        hpc(),
    )
    heard = _heard(BRIDGE, lambda: clean.job("#!/bin/sh\necho ran\n"))
    assert heard.result.out == b"ran\n", heard.result.err
    own = [f for f in heard.frames if f[12:14] == b"\x08\x00" and f[23] == 1]
    assert own, "the guest's own ping was not captured: this test shows nothing"
    for claim in (bytes.fromhex(BAD_MAC.replace(":", "")), socket.inet_aton(BAD_IP)):
        assert not [f for f in heard.frames if claim in f]


@pytest.mark.full
def test_forged_addresses_are_seen_without_the_filter(clean, guest_prologue, bridge):
    """A control: the test above would see a forged frame."""
    guest_prologue(
        f"#!/bin/sh\nip addr add {BAD_IP}/16 dev eth1\nping -c 2 -W 1 -I {BAD_IP} {HOST}\nexit 0\n",
        hpc(opt_in_unfiltered=True).replace("opt_in", "filter = false\nopt_in"),
    )
    heard = _heard(BRIDGE, lambda: clean.job("#!/bin/sh\necho ran\n"))
    assert heard.result.out == b"ran\n", heard.result.err
    assert [f for f in heard.frames if socket.inet_aton(BAD_IP) in f]


@pytest.mark.full
def test_macvtap_nic_works(clean, site, cable):
    site(hpc(source=LOWER, subnet="10.232.0.0/16", kind="direct", opt_in_unfiltered=True))
    result = clean.job(
        "#!/bin/sh\n"
        "ip -4 -o addr show dev eth1 | awk '{print $4}'\n"
        f"nc -w 3 {FAR_IP} 9 </dev/null 2>&1\n"
    )
    out = result.out.decode()
    assert re.match(r"10\.232\.\S+/16\n", out), result.err
    assert "onnection refused" in out


def test_macvtap_is_refused_unless_the_site_accepts_it(clean, site, cable):
    site(hpc(source=LOWER, subnet="10.232.0.0/16", kind="direct"))
    done = clean.root("vtorque", "config", "check", "--file", str(clean.config), check=False)
    assert done.returncode == 1
    assert b"[networks.hpc] kind: lets guests forge addresses" in done.stderr


LAN = """
<network><name>vtorque-e2e-lan</name><bridge name='vte2elan0' stp='off' delay='0'/>
<ip address='10.233.0.1' netmask='255.255.255.0'>
<dhcp><range start='10.233.0.50' end='10.233.0.60'/></dhcp></ip></network>
"""


@pytest.fixture
def lan(tmp_path):
    """Run a libvirt network whose DHCP server also offers a router and a name server."""
    xml = tmp_path / "network.xml"
    xml.write_text(LAN)
    subprocess.run(["virsh", "-q", "net-create", xml], check=True, timeout=180)
    yield "vtorque-e2e-lan"
    subprocess.run(["virsh", "-q", "net-destroy", "vtorque-e2e-lan"], check=True, timeout=180)


LAN_TABLE = """
[networks.lan]
kind = "network"
source = "vtorque-e2e-lan"
addressing = "dhcp"
"""
SHOW = (
    "#!/bin/sh\n"
    "for try in $(seq 100); do\n"
    "  ip -4 -o addr show dev eth2 | grep -q inet && break; sleep 0.2\ndone\n"
    "ip -4 -o addr show scope global | awk '{print $2, $4}'\n"
    "ip route | grep default; cat /etc/resolv.conf /run/systemd/resolve/resolv.conf\n"
)


def _three_nics(result):
    out = result.out.decode()
    nics = dict(re.findall(r"^(eth\d) (10\S+)$", out, re.MULTILINE))
    assert {k: v.rsplit(".", 2)[0] for k, v in nics.items()} == {
        "eth0": "10.87", "eth1": "10.231", "eth2": "10.233",
    }, (out, result.err)  # fmt: skip
    assert re.findall(r"^default via (\S+) dev (\S+)", out, re.MULTILINE) == [("10.87.0.1", "eth0")]
    assert "10.233.0.1\n" not in out
    return out


@pytest.mark.full
def test_dhcp_on_another_network_adds_no_route(clean, site, bridge, lan):
    site(hpc() + LAN_TABLE)
    _three_nics(clean.job(SHOW))


@pytest.mark.full
def test_debian_guest_has_the_same_networks(clean, site, bridge, lan):
    if clean.root("vmgr", "images", "show", "debian", check=False).returncode:
        clean.root("vmgr", "images", "build", "debian", "debian", timeout=600)
    site(hpc(mtu=1400) + LAN_TABLE)
    ssh = f"ssh v{platform.node().split('.')[0]}-hpc 'echo by ssh on $(hostname)'\n"
    mtu = "cat /sys/class/net/eth1/mtu\n"
    result = clean.job(SHOW + ssh + mtu, "-vm", "img=debian,ram=512M", timeout=300)
    out = _three_nics(result)
    assert f"by ssh on v{platform.node().split('.')[0]}\n" in out, result.err
    assert out.endswith("\n1400\n")


class _heard:
    """All frames of a bridge while ``work`` ran, and the result of ``work``."""

    def __init__(self, name, work):
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            listener.bind((name, 0))
            listener.setblocking(False)
            self.result = work()
            self.frames = []
            try:
                while True:
                    self.frames.append(listener.recv(4096))
            except BlockingIOError:
                pass
