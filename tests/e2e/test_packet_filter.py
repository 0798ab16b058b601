"""Test the packet filter of guests with real nft and real packets, in a new network namespace.

The tests replace QEMU at a tap device on a bridge, so they can send any frame as the guest.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import socket
import struct
import subprocess
import sys
import time
from fcntl import ioctl
from pathlib import Path

import pytest

from patience import eventually
from vtorque_core.base.names import tap_name
from vtorque_core.resources.netfilter import Netfilter, filter_tap, guard, remove_guard
from vtorque_own_images.job_filter import JobFilter

pytestmark = pytest.mark.e2e

MAC, OTHER_MAC = "52:54:00:76:74:01", "52:54:00:76:74:02"
NODE_MAC, ROUTER_MAC = "52:54:00:ff:00:01", "52:54:00:ff:00:02"
GATEWAY, IP, OTHER, OUTSIDE = "10.86.0.1", "10.86.0.16", "10.86.0.17", "198.18.0.1"
GATEWAY6, IP6 = "fd00:86::1", "fd00:86::16"
NOBODY, EVERYBODY = "0.0.0.0", "255.255.255.255"  # noqa: S104
CLONE_NEWNET = 0x40000000
LIMIT = 512  # connections of a guest
TABLE = 262144  # entries of the node's connection tracking table
IPV4, ARP, RARP, IPV6 = 0x0800, 0x0806, 0x8035, 0x86DD
TCP, UDP, ICMP, ICMPV6 = 6, 17, 1, 58
FIN, SYN, RST, ACK = 1, 2, 4, 16


# -- packets ----------------------------------------------------------------------------------


def mac_bytes(mac):
    return bytes.fromhex(mac.replace(":", ""))


def frame(kind, payload, source=MAC, target=NODE_MAC):
    return mac_bytes(target) + mac_bytes(source) + struct.pack("!H", kind) + payload


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def ipv4(payload, protocol, source=IP, target=OUTSIDE, fragment=0, ihl=5):
    """Return an IPv4 packet (RFC 791); an ``ihl`` above 5 adds words of NOP options."""
    options = b"\x01" * 4 * (ihl - 5)
    addresses = socket.inet_aton(source) + socket.inet_aton(target)
    length = 4 * ihl + len(payload)
    head = struct.pack("!BBHHHBBH", 0x40 | ihl, 0, length, 1, fragment, 64, protocol, 0)
    total = checksum(head + addresses + options)
    return head[:10] + struct.pack("!H", total) + addresses + options + payload


def ipv6(payload, header, source=IP6, target=GATEWAY6):
    addresses = b"".join(socket.inet_pton(socket.AF_INET6, each) for each in (source, target))
    return struct.pack("!IHBB", 6 << 28, len(payload), header, 255) + addresses + payload


def with_checksum6(payload, header, source, target, at):
    """Return an IPv6 packet whose payload has its checksum at offset ``at`` (RFC 8200, 8.1)."""
    addresses = b"".join(socket.inet_pton(socket.AF_INET6, each) for each in (source, target))
    pseudo = addresses + struct.pack("!II", len(payload), header)
    total = checksum(pseudo + payload + b"\0" * (len(payload) % 2))
    return ipv6(payload[:at] + struct.pack("!H", total) + payload[at + 2 :], header, source, target)


def udp(source, target, data=b""):
    return struct.pack("!HHHH", source, target, 8 + len(data), 0) + data  # no checksum


def tcp(source, target, flags, addresses, sequence=1, acknowledged=0):
    head = struct.pack("!HHIIBBHHH", source, target, sequence, acknowledged, 0x50, flags, 512, 0, 0)
    pseudo = b"".join(map(socket.inet_aton, addresses)) + struct.pack("!HH", TCP, len(head))
    return head[:16] + struct.pack("!H", checksum(pseudo + head)) + head[18:]


def echo(identifier, kind=8):
    head = struct.pack("!BBHHH", kind, 0, 0, identifier, 1)
    return head[:2] + struct.pack("!H", checksum(head)) + head[4:]


def arp(operation, sender_mac, sender, target, target_mac="00:00:00:00:00:00"):
    return (
        struct.pack("!HHBBH", 1, IPV4, 6, 4, operation)
        + mac_bytes(sender_mac) + socket.inet_aton(sender)
        + mac_bytes(target_mac) + socket.inet_aton(target)
    )  # fmt: skip


def long_arp(operation, sender_mac, sender, target):
    """Return an ARP packet whose hardware addresses have 8 bytes and begin with the MAC."""
    own = arp(operation, sender_mac, sender, target)
    return struct.pack("!HHBBH", 1, IPV4, 8, 4, operation) + own[8:18] + bytes(14)


def dhcp(operation, client_mac, relay="0.0.0.0"):  # noqa: S104
    """Return a BOOTP message (RFC 951); ``operation`` is 1 for a request, 2 for a reply."""
    head = struct.pack("!BBBB20x", operation, 1, 6, 0) + socket.inet_aton(relay)
    return head + mac_bytes(client_mac).ljust(208, b"\0")


# -- A node ----------------------------------------------------------------------------------------


def run(*words):
    subprocess.run(words, check=True, timeout=180, stdout=subprocess.DEVNULL)


def open_tap(name, flags=0x1002):  # IFF_TAP, IFF_NO_PI
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", name.encode(), flags))
    run("ip", "link", "set", name, "up")
    # With a queue, the kernel's own frames on another CPU could delay a frame that a test expects.
    run("tc", "qdisc", "replace", "dev", name, "root", "noqueue")
    return descriptor


class NodeNetwork:
    """A node's network: a bridge of guests, and NAT to an outside network."""

    peer = None  # another guest of the same job

    def __init__(self, *, bridged=False):
        run("ip", "link", "set", "lo", "up")
        run(
            "ip",
            "link",
            "add",
            "name",
            "vt-br",
            "address",
            NODE_MAC,
            "type",
            "bridge",
            "mcast_snooping",
            "0",
        )
        Path("/proc/sys/net/ipv6/conf/vt-br/accept_dad").write_text("0")
        for tap in (MAC, OTHER_MAC):
            setattr(self, "guest" if tap == MAC else "other", open_tap(tap_name(tap)))
            run("ip", "link", "set", tap_name(tap), "address", f"fe{tap[2:]}")  # as libvirt
            run("ip", "link", "set", tap_name(tap), "master", "vt-br")
        self.outside = open_tap("out")
        for words in (
            ("address", "add", f"{GATEWAY}/16", "dev", "vt-br"),
            ("address", "add", f"{GATEWAY6}/64", "dev", "vt-br", "nodad"),
            ("link", "set", "vt-br", "up"),
            ("address", "add", "198.18.255.1/16", "dev", "out"),
            ("neighbor", "add", OUTSIDE, "lladdr", ROUTER_MAC, "dev", "out"),
            ("route", "add", "default", "via", OUTSIDE),
            ("neighbor", "add", IP, "lladdr", MAC, "dev", "vt-br"),
            ("neighbor", "add", IP6, "lladdr", MAC, "dev", "vt-br"),
        ):
            run("ip", *words)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        Path("/proc/sys/net/ipv4/conf/all/rp_filter").write_text("0")
        Path("/proc/sys/net/netfilter/nf_conntrack_tcp_loose").write_text("1")
        for family in ("iptables", "ip6tables"):
            Path(f"/proc/sys/net/bridge/bridge-nf-call-{family}").write_text(f"{bridged:d}")
        nat = (
            "table ip nat { chain post { type nat hook postrouting priority 100;"
            ' oifname "out" masquerade; }; }'
        )
        run("nft", nat)

    def close(self):
        """Close the taps: hundreds of tests in one process would keep a thousand descriptors."""
        for descriptor in (self.guest, self.other, self.outside, self.peer):
            if descriptor is not None:
                os.close(descriptor)

    def send(self, payload, kind=IPV4, **words):
        os.write(self.guest, frame(kind, payload, **words))

    def drain(self, descriptor):
        with contextlib.suppress(BlockingIOError):
            while True:
                yield os.read(descriptor, 70000)

    def tracked(self):
        return int(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text())

    def can_connect(self):
        """Return whether a new connection of the node itself works."""
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
            client.settimeout(2)
            try:
                client.connect(server.getsockname())
            except OSError:
                return False
        return True


@contextlib.contextmanager
def own_network():
    """Move the calling thread, and the processes that it starts, to a new network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    host = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        assert libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(host, CLONE_NEWNET) == 0
        os.close(host)


@pytest.fixture(params=["routed", "br_netfilter"])
def node(request):
    with own_network():
        made = NodeNetwork(bridged=request.param == "br_netfilter")
        yield made
        made.close()


@contextlib.contextmanager
def packet_filter(ip=IP, ports=("udp/7", "tcp/7"), mac=MAC, ipv6=False):
    own = guard("test", "vt-br", ports, dhcp=ip is None)
    table = Netfilter(tap_name(mac), mac, ip, own, LIMIT, ipv6)
    table.create()
    try:
        yield table
    finally:
        table.release()


# -- Floods ----------------------------------------------------------------------------------------


def ports():
    return itertools.product(range(1024, 65536), range(1, 65536))


def flood_udp_ports(target):
    return (ipv4(udp(a, b), UDP, target=target) for a, b in ports())


def flood_one_port(target):
    return (ipv4(udp(a, 7), UDP, target=target) for a in range(1, 65536))


def flood_syn(target):
    for a, b in ports():
        yield ipv4(tcp(a, b, SYN, (IP, target)), TCP, target=target)


def flood_syn_one_port(target):
    return (ipv4(tcp(a, 7, SYN, (IP, target)), TCP, target=target) for a in range(1, 65536))


def flood_ack(target):
    for a, b in ports():
        yield ipv4(tcp(a, b, ACK, (IP, target), acknowledged=1), TCP, target=target)


def flood_echo(target):
    return (ipv4(echo(number), ICMP, target=target) for number in range(65536))


def flood_protocols(target):
    return (ipv4(b"\0" * 8, protocol, target=target) for protocol in range(140, 255))


def flood_addresses(_):
    for number in range(1 << 17):
        target = socket.inet_ntoa(struct.pack("!I", 0x09000000 + number))
        yield ipv4(udp(9, 9), UDP, target=target)


FORWARDED = [flood_udp_ports, flood_syn, flood_ack, flood_echo, flood_protocols, flood_addresses]


@pytest.mark.parametrize("flood", FORWARDED)
def test_forwarded_flood_stays_below_limit(node, flood):
    with packet_filter():
        for packet in itertools.islice(flood(OUTSIDE), 20000):
            node.send(packet)
        assert 0 < node.tracked() <= LIMIT
        assert node.can_connect()
    assert node.tracked() <= 2, (
        "connection tracking still has the guest's entries"
    )  # can_connect() leaves two


@pytest.mark.parametrize("flood", [flood_one_port, flood_syn_one_port, flood_echo])
def test_flood_of_the_node_stays_below_limit(node, flood):
    with packet_filter(), socket.create_server((GATEWAY, 7), backlog=1):
        for packet in itertools.islice(flood(GATEWAY), 20000):
            node.send(packet)
        assert 0 < node.tracked() <= LIMIT
        assert node.can_connect()
    assert node.tracked() <= 2


GROUPS = {  # name: MAC, IP address
    "broadcast": ("ff:ff:ff:ff:ff:ff", EVERYBODY),
    "subnet broadcast": ("ff:ff:ff:ff:ff:ff", "10.86.255.255"),
    "multicast": ("01:00:5e:00:00:fb", "224.0.0.251"),
    "forwarded multicast": ("01:00:5e:01:02:03", "239.1.2.3"),
    "node by broadcast": ("ff:ff:ff:ff:ff:ff", GATEWAY),
    "guest by broadcast": ("ff:ff:ff:ff:ff:ff", OTHER),
    "outside by broadcast": ("ff:ff:ff:ff:ff:ff", OUTSIDE),
    "group by the node's mac": (NODE_MAC, "239.1.2.3"),
    "broadcast by the node's mac": (NODE_MAC, EVERYBODY),
    "unknown mac": ("52:54:00:00:00:09", OTHER),
    "all nodes": ("33:33:00:00:00:01", "ff02::1"),
    "mdns6": ("33:33:00:00:00:fb", "ff02::fb"),
    "node by broadcast, ipv6": ("ff:ff:ff:ff:ff:ff", GATEWAY6),
    "guest by its port's mac": (f"fe{OTHER_MAC[2:]}", OTHER),
    "outside by the guest's port's mac": (f"fe{MAC[2:]}", OUTSIDE),
    "outside by another port's mac": (f"fe{OTHER_MAC[2:]}", OUTSIDE),
    "node by another port's mac, ipv6": (f"fe{OTHER_MAC[2:]}", GATEWAY6),
}


@pytest.mark.parametrize("mac, target", GROUPS.values(), ids=GROUPS)
def test_flood_of_a_group_stays_below_limit(node, mac, target):
    """The kernel may confirm the entry of such a frame before the hook input (Linux 6.8)."""
    kind, ip = (IPV6, None) if ":" in target else (IPV4, IP)
    with packet_filter(ip, ipv6=True):
        for a, b in itertools.islice(ports(), 20000):
            if kind == IPV6:
                packet = with_checksum6(udp(a, b), UDP, IP6, target, 6)
            else:
                packet = ipv4(udp(a, b), UDP, target=target)
            node.send(packet, kind, target=mac)
        assert node.tracked() <= LIMIT
        assert node.can_connect()
    assert node.tracked() <= 2, "connection tracking still has the guest's entries"


def test_flood_of_another_guest_on_a_bridge_stays_below_limit():
    with own_network():
        node = NodeNetwork(bridged=True)
        with packet_filter():
            for packet in itertools.islice(flood_udp_ports(OTHER), 20000):
                node.send(packet, target=OTHER_MAC)
            assert 0 < node.tracked() <= LIMIT
            assert node.can_connect()
        assert node.tracked() <= 2


def test_connections_from_an_accomplice_to_the_guest_stay_below_limit():
    """The accomplice is no guest of this node, so no filter limits its packets."""
    with own_network():
        node = NodeNetwork(bridged=True)
        with packet_filter():
            for a, b in itertools.islice(ports(), 20000):
                packet = ipv4(udp(a, b), UDP, OTHER, IP)
                os.write(node.other, frame(IPV4, packet, OTHER_MAC, MAC))
            assert 0 < node.tracked() <= LIMIT
            before = node.tracked()
            node.send(ipv4(udp(9, 9), UDP))  # the guest's own connections have another limit
            assert node.tracked() == before + 1
        assert node.tracked() == 0


def handshake(node, port, *last):
    """Open a connection to port 80 outside, where an accomplice answers; then send ``last``."""
    there = (IP, OUTSIDE)
    node.send(ipv4(tcp(port, 80, SYN, there), TCP))
    for received in node.drain(node.outside):
        if received[12:14] != struct.pack("!H", IPV4) or received[23] != TCP:
            continue
        source, target = (socket.inet_ntoa(received[at : at + 4]) for at in (26, 30))
        (translated,) = struct.unpack("!H", received[34:36])
        if not received[47] & SYN:
            continue
        reply = tcp(80, translated, SYN | ACK, (target, source), 1, 2)
        packet = ipv4(reply, TCP, target, source)
        os.write(node.outside, frame(IPV4, packet, ROUTER_MAC, source_mac(received)))
        for flags in (ACK, *last):
            node.send(ipv4(tcp(port, 80, flags, there, 2, 2), TCP))


def source_mac(sent):
    """Return the source MAC of a frame."""
    return ":".join(f"{byte:02x}" for byte in sent[6:12])


@pytest.mark.parametrize("last", [(), (RST,)], ids=["established", "closed"])
def test_flood_with_an_accomplice_outside_stays_below_limit(node, last):
    """``ct count`` does not count closed connections, whose entries still take room."""
    with packet_filter():
        for port in range(1024, 9024):
            handshake(node, port, *last)
        assert 0 < node.tracked() <= 2 * LIMIT
        assert node.can_connect()
    assert node.tracked() <= 2


@pytest.mark.parametrize("end", [RST, FIN], ids=["reset", "finished"])
def test_guest_cannot_keep_entries_of_closed_connections(node, end):
    """``ct count`` does not count such entries, and packets would renew their timeouts."""
    node.send(ipv4(udp(9, 9), UDP))
    out = next(source_mac(each) for each in node.drain(node.outside) if each[23] == UDP)

    number = 3 if end == FIN else 2  # a FIN takes a sequence number

    def send_of_each_connection(flags):
        for port in range(1024, 1034):
            node.send(ipv4(tcp(port, 80, flags, (IP, OUTSIDE), number, number), TCP))

    def states():
        lines = Path("/proc/thread-self/net/nf_conntrack").read_text().splitlines()
        return [line.split()[5] for line in lines if " tcp " in line]

    with packet_filter():
        for port in range(1024, 1034):
            handshake(node, port, end | ACK)
            packet = tcp(80, port, FIN | ACK, (OUTSIDE, "198.18.255.1"), 2, 3)
            packet = ipv4(packet, TCP, OUTSIDE, "198.18.255.1")
            if end == FIN:
                os.write(node.outside, frame(IPV4, packet, ROUTER_MAC, out))
        for _ in range(4):
            send_of_each_connection(ACK)
            time.sleep(1.5)
        send_of_each_connection(ACK)
        assert states() == ["ESTABLISHED"] * 10, "entries of closed connections are kept"


def test_limit_counts_connections_that_the_site_has_marked():
    with own_network():
        node = NodeNetwork(bridged=True)
        run("nft", "table inet site { chain p { type filter hook prerouting priority -150;"
            " ct mark set 5; }; }")  # fmt: skip
        with packet_filter():
            for a, b in itertools.islice(ports(), 5000):
                packet = ipv4(udp(a, b), UDP, OTHER, IP)
                os.write(node.other, frame(IPV4, packet, OTHER_MAC, MAC))
            assert 0 < node.tracked() <= LIMIT
            for packet in itertools.islice(flood_udp_ports(OUTSIDE), 5000):
                node.send(packet)
            assert node.tracked() <= 2 * LIMIT


def test_limit_does_not_affect_open_connections_and_other_guests(node):
    other = {"ip": OTHER, "mac": OTHER_MAC}
    with packet_filter(), packet_filter(**other):
        handshake(node, 1024)
        for packet in itertools.islice(flood_udp_ports(OUTSIDE), 5000):
            node.send(packet)
        list(node.drain(node.outside))
        node.send(ipv4(tcp(1024, 80, ACK, (IP, OUTSIDE), 2, 2), TCP))
        packet = ipv4(udp(9, 9), UDP, OTHER)
        os.write(node.other, frame(IPV4, packet, OTHER_MAC))
        received = [each[23] for each in node.drain(node.outside) if each[12:14] == b"\x08\0"]
    assert sorted(received) == [TCP, UDP]


def test_connections_below_limit_pass(node):
    with packet_filter():
        for packet in itertools.islice(flood_syn(OUTSIDE), LIMIT // 2):
            node.send(packet)
        assert node.tracked() == LIMIT // 2


# -- Services of the node --------------------------------------------------------------------------


@pytest.mark.parametrize("ip", [IP, None], ids=["assigned", "unassigned"])
@pytest.mark.parametrize("first", [GATEWAY, IP], ids=["answer", "request"])
@pytest.mark.parametrize("mac", [OTHER_MAC, "ff:ff:ff:ff:ff:ff"], ids=["guest", "broadcast"])
@pytest.mark.parametrize("kind", [IPV4, IPV6], ids=["ipv4", "ipv6"])
def test_guest_cannot_open_a_closed_port_by_a_forged_connection(node, ip, first, mac, kind):
    """With br_netfilter the node also tracks packets between guests: here, request and answer."""
    family, any_address = (socket.AF_INET, NOBODY) if kind == IPV4 else (socket.AF_INET6, "::")
    node_address, own = (GATEWAY, IP) if kind == IPV4 else (GATEWAY6, IP6)

    def send(source, target, ports, mac):
        data = udp(*ports, b"forged")
        if kind == IPV4:
            packet = ipv4(data, UDP, source, target)
        else:
            packet = with_checksum6(data, UDP, source, target, 6)
        node.send(packet, kind, target=mac)

    with packet_filter(ip, ipv6=True), socket.socket(family, socket.SOCK_DGRAM) as service:
        service.bind((any_address, 9))
        request, answer = (own, node_address, (4000, 9)), (node_address, own, (9, 4000))
        for packet in (answer, request) if first == GATEWAY else (request, answer):
            send(*packet, mac)
        send(*request, NODE_MAC)
        node.send(ipv4(echo(1), ICMP, target=GATEWAY))
        eventually(lambda: any(each[23:24] == b"\x01" for each in node.drain(node.guest)))
        with pytest.raises(BlockingIOError):
            service.recv(100, socket.MSG_DONTWAIT)


# -- Services that the node publishes by DNAT ------------------------------------------------------

PUBLISHED, INSIDE, INSIDE6, OUT6 = 8080, "198.18.0.9", "fd00:18::9", "fd00:18::1"


@pytest.fixture
def publishing(node):
    """Add DNAT rules that forward ports of the node to a container and to the guest itself."""
    run("ip", "neighbor", "add", INSIDE, "lladdr", ROUTER_MAC, "dev", "out")
    run("ip", "address", "add", f"{OUT6}/64", "dev", "out", "nodad")
    run("ip", "neighbor", "add", INSIDE6, "lladdr", ROUTER_MAC, "dev", "out")
    Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")
    rules = (
        "table inet publish { chain pre { type nat hook prerouting priority -100;"
        f" fib daddr type local tcp dport {PUBLISHED} dnat ip to {INSIDE}:80;"
        f" fib daddr type local udp dport {PUBLISHED} dnat ip to {INSIDE}:80;"
        f" ip6 daddr {GATEWAY6} tcp dport {PUBLISHED} dnat ip6 to [{INSIDE6}]:80;"
        f" ip daddr 198.18.255.1 tcp dport 2222 dnat ip to {IP}:22; "
        "}; }"
    )
    run("nft", rules)
    return node


def published_attempts(node):
    """Return the ways to the published port, name to whether the way leads out of the node."""
    node_addresses = {"bridge": GATEWAY, "other": "198.18.255.1"}
    tries = {}
    for name, target in node_addresses.items():
        tries[f"tcp {name}"] = (
            IPV4,
            ipv4(tcp(999, PUBLISHED, SYN, (IP, target)), TCP, target=target),
        )
        tries[f"udp {name}"] = IPV4, ipv4(udp(999, PUBLISHED), UDP, target=target)
    tries["tcp6"] = IPV6, tcp6_syn(999, PUBLISHED)
    tries["elsewhere"] = IPV4, ipv4(udp(9, 9), UDP)
    passed = {}
    for name, (kind, packet) in tries.items():
        list(node.drain(node.outside))
        node.send(packet, kind)
        heads = [struct.unpack("!H", each[12:14])[0] for each in node.drain(node.outside)]
        passed[name] = kind in heads
    return passed


def tcp6_syn(source, target):
    head = struct.pack("!HHIIBBHHH", source, target, 1, 0, 5 << 4, SYN, 512, 0, 0)
    return with_checksum6(head, TCP, IP6, GATEWAY6, 16)


@pytest.mark.parametrize("ip", [IP, None], ids=["assigned", "unassigned"])
def test_ports_that_the_node_publishes_by_dnat_obey_node_ports(publishing, ip):
    every = {"tcp bridge", "udp bridge", "tcp other", "udp other", "tcp6", "elsewhere"}
    expected = every if ip is None else every - {"tcp6"}
    for ports, closed in (
        ((), every - {"elsewhere"}),
        (("tcp/80", "udp/80"), every - {"elsewhere"}),  # the container's port is not the node's
        ((f"tcp/{PUBLISHED}",), {"udp bridge", "udp other"}),
        ((f"tcp/{PUBLISHED}", f"udp/{PUBLISHED}"), set()),
    ):
        with packet_filter(ip, ports, ipv6=True):
            passed = {name for name, out in published_attempts(publishing).items() if out}
        assert passed == expected - closed, ports


def test_port_of_the_guest_that_the_node_publishes_still_answers(publishing):
    with packet_filter(ports=()):
        publishing.send(ipv4(udp(9, 9), UDP))
        out = next(
            source_mac(each) for each in publishing.drain(publishing.outside) if each[23] == UDP
        )
        syn = tcp(1234, 2222, SYN, (OUTSIDE, "198.18.255.1"))
        packet = ipv4(syn, TCP, OUTSIDE, "198.18.255.1")
        os.write(publishing.outside, frame(IPV4, packet, ROUTER_MAC, out))
        assert any(each[23] == TCP for each in publishing.drain(publishing.guest))
        answer = tcp(22, 1234, SYN | ACK, (IP, OUTSIDE), 1, 2)
        publishing.send(ipv4(answer, TCP))
        assert any(each[23] == TCP for each in publishing.drain(publishing.outside))


# -- Other tables of the node's kernel -------------------------------------------------------------


def neighbors(family="-4"):
    words = ("ip", family, "neighbor", "show", "nud", "all", "dev", "vt-br")
    return subprocess.run(words, check=True, capture_output=True, timeout=180).stdout.splitlines()


@pytest.mark.parametrize("kind", [IPV4, IPV6], ids=["ipv4", "ipv6"])
def test_icmp_errors_of_a_guest_do_not_change_the_nodes_path_mtu(node, kind):
    """The kernel believes each error that quotes an echo reply of the node."""
    reply = bytes([0, 0, 255, 255, 0, 0, 0, 0])
    if kind == IPV4:
        host = "198.18.0.77"
        quoted = ipv4(reply, ICMP, "198.18.255.1", host)
        head = struct.pack("!BBHHH", 3, 4, 0, 0, 552)
        total = struct.pack("!H", checksum(head + quoted))
        packet = ipv4(head[:2] + total + head[4:] + quoted, ICMP, target=GATEWAY)
    else:
        host = "fd00:86::77"
        quoted = with_checksum6(b"\x81" + bytes(7), ICMPV6, GATEWAY6, host, 2)
        head = struct.pack("!BBHI", 2, 0, 0, 1280)
        packet = with_checksum6(head + quoted, ICMPV6, IP6, GATEWAY6, 2)

    def has_mtu():
        words = ("ip", "route", "get", host)
        return b"mtu" in subprocess.run(words, check=True, capture_output=True, timeout=180).stdout

    with packet_filter(IP if kind == IPV4 else None, ipv6=True):
        node.send(packet, kind)
        assert not has_mtu()
    remove_guard("test")
    node.send(packet, kind)
    assert has_mtu(), "the packet has no effect without the filter, either: this test shows nothing"


def test_scan_of_the_guests_subnet_leaves_room_in_the_neighbor_table(node):
    """The kernel's limit is 1,024 entries (gc_thresh3), for all of the node's networks."""
    with packet_filter():
        for number in range(1, 10000):
            target = f"10.86.{100 + number // 250}.{1 + number % 250}"
            node.send(ipv4(udp(9, 9), UDP, target=target))
        assert len(neighbors()) < 512


def test_repeated_scan_by_a_guest_leaves_room_in_the_neighbor_table(monkeypatch):
    """The rate limit exempts destinations that answer, but none of these answers."""
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 8192)
    targets = [f"10.86.{100 + number // 250}.{1 + number % 250}" for number in range(900)]
    with own_network():
        node = NodeNetwork()
        with packet_filter():
            end = time.monotonic() + 8  # the rate lets all 900 pass once
            while time.monotonic() < end:
                for target in targets:
                    node.send(ipv4(udp(9, 9), UDP, target=target))
            looking = ("ip", "-4", "neighbor", "show", "nud", "incomplete")
            said = subprocess.run(looking, check=True, capture_output=True, timeout=180).stdout
            assert 0 < len(said.splitlines()) < 600


def test_destinations_that_answer_have_no_rate_limit(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 8192)
    hosts = [f"9.0.{number // 250}.{1 + number % 250}" for number in range(600)]
    with own_network():
        node = NodeNetwork()
        with packet_filter():
            node.send(ipv4(udp(9, 9), UDP))
            router = next(source_mac(each) for each in node.drain(node.outside) if each[23] == UDP)
            for host in hosts:
                packet = ipv4(udp(9, 9), UDP, host, IP)
                os.write(node.outside, frame(IPV4, packet, ROUTER_MAC, router))
            for host in hosts * 4:
                node.send(ipv4(udp(9, 9), UDP, target=host))
                passed = [each for each in node.drain(node.outside) if each[23] == UDP]
                assert len(passed) == 1


@pytest.mark.parametrize("kind", ["arp", "echo", "ipv6"])
def test_invented_senders_leave_room_in_the_neighbor_table(node, kind):
    """If vTorque does not know the guest's address, the guest may use several."""
    with packet_filter(None, ipv6=True):
        for number in range(1, 5000):
            source = f"10.86.{100 + number // 250}.{1 + number % 250}"
            source6 = f"fd00:86::5:{number:x}"
            if kind == "arp":
                node.send(arp(1, MAC, source, GATEWAY), ARP)
            elif kind == "echo":
                node.send(ipv4(echo(1), ICMP, source, GATEWAY))
            else:
                head = struct.pack("!BBHHH", 128, 0, 0, 1, 1)
                node.send(with_checksum6(head, ICMPV6, source6, GATEWAY6, 2), IPV6)
        assert 0 < len(neighbors("-6" if kind == "ipv6" else "-4")) < 256


def test_invented_macs_do_not_fill_the_bridges_table(node):
    with packet_filter():
        for number in range(5000):
            mac = f"52:54:00:00:{number >> 8:02x}:{number & 255:02x}"
            node.send(ipv4(udp(9, 9), UDP), source=mac)
        words = ("bridge", "fdb", "show", "br", "vt-br")
        shown = subprocess.run(words, check=True, capture_output=True, timeout=180).stdout
    assert b"52:54:00:00:" not in shown


# -- Frames ----------------------------------------------------------------------------------------


def multicast(last):
    return f"224.0.0.{last}"


def igmp(kind):
    head = struct.pack("!BBH4s", kind, 0, 0, socket.inet_aton("239.1.2.3"))
    return head[:2] + struct.pack("!H", checksum(head)) + head[4:]


def icmpv6(kind, source="fe80::16", target="ff02::1"):
    return with_checksum6(struct.pack("!BBHI16x", kind, 0, 0, 0), ICMPV6, source, target, 2)


def late_header(kind):
    """Return a first fragment that ends before its ICMPv6 header (RFC 7112, RFC 7113)."""
    return ipv6(struct.pack("!BBHI", 60, 0, 1, 7) + bytes([58, 1]) + bytes(6), 44)


def behind_header(number, content, kind=134):
    """Return an ICMPv6 packet with one extension header, which has eight bytes (RFC 8200)."""
    whole = icmpv6(kind)
    head = bytes([whole[6]]) + content
    length = struct.pack("!HB", len(whole) - 40 + len(head), number)
    return whole[:4] + length + whole[7:40] + head + whole[40:]


def dhcp_packet(source, target, operation=1, mac=MAC, address=IP, relay=NOBODY):
    return ipv4(udp(source, target, dhcp(operation, mac, relay)), UDP, address, EVERYBODY)


# name: EtherType, payload, passes if vTorque assigns the address, passes if it does not (IPv6: only
# with ipv6 = true)
FRAMES = {
    "udp": (IPV4, ipv4(udp(9, 9), UDP), True, True),
    "udp with options": (IPV4, ipv4(udp(9, 9), UDP, ihl=7), True, True),
    "later fragment": (IPV4, ipv4(b"\0C\0D" * 10, UDP, fragment=9), True, True),
    "tcp to port 67": (IPV4, ipv4(tcp(9, 67, SYN, (IP, OTHER)), TCP, target=OTHER), True, True),
    "mdns": (IPV4, ipv4(udp(5353, 5353), UDP, target=multicast(251)), True, True),
    "igmp report": (IPV4, ipv4(igmp(0x22), 2, target=multicast(22)), True, True),
    "igmp leave": (IPV4, ipv4(igmp(0x17), 2, target=multicast(2)), True, True),
    "arp request": (ARP, arp(1, MAC, IP, OTHER), True, True),
    "arp reply": (ARP, arp(2, MAC, IP, OTHER, OTHER_MAC), True, True),
    "announcement": (ARP, arp(1, MAC, IP, IP), True, True),
    "own probe": (ARP, arp(1, MAC, NOBODY, IP), True, True),
    "migrated": (RARP, arp(3, MAC, NOBODY, NOBODY, MAC), True, True),
    "ipv6": (IPV6, ipv6(udp(9, 9), UDP), False, True),
    "router solicitation": (IPV6, icmpv6(133), False, True),
    "neighbor": (IPV6, icmpv6(136), False, True),
    "dhcp client": (IPV4, dhcp_packet(68, 67), False, True),
    "dhcp client without address": (IPV4, dhcp_packet(68, 67, address=NOBODY), False, True),
    "dhcpv6 client": (IPV6, ipv6(udp(546, 547, b"\x01"), UDP, target="ff02::1:2"), False, True),
    "mdns6": (IPV6, ipv6(udp(5353, 5353), UDP, target="ff02::fb"), False, True),
    "neighbor solicitation": (IPV6, icmpv6(135, target="ff02::1:ff00:1"), False, True),
    "mld report": (IPV6, icmpv6(143, target="ff02::16"), False, True),
    "ping6": (IPV6, icmpv6(128, IP6, GATEWAY6), False, True),
    "own group of one link": (IPV6, ipv6(udp(9, 9), UDP, target="ff12::9"), False, True),
    "other address": (IPV4, ipv4(udp(9, 9), UDP, OTHER), False, True),
    "probe for another": (ARP, arp(1, MAC, NOBODY, OTHER), False, True),
    "answer to a probe for another": (ARP, arp(2, MAC, OTHER, NOBODY, OTHER_MAC), False, True),
    "probe as reply": (ARP, arp(2, MAC, NOBODY, IP), False, True),
    # frames that never pass
    "dhcp client of another mac": (IPV4, dhcp_packet(68, 67, mac=OTHER_MAC), False, False),
    "dhcp from another port": (IPV4, dhcp_packet(999, 67), False, False),
    "dhcp server": (IPV4, dhcp_packet(67, 68, 2), False, False),
    "dhcp server with options": (
        IPV4, ipv4(udp(67, 68, dhcp(2, MAC)), UDP, ihl=9), False, False
    ),
    "dhcp server from another port": (IPV4, dhcp_packet(999, 68, 2), False, False),
    "dhcp relay": (IPV4, dhcp_packet(67, 67), False, False),
    "dhcp client as relay": (IPV4, dhcp_packet(68, 67, relay=OTHER), False, False),
    "dhcp server in fragments": (
        IPV4, ipv4(udp(67, 68), UDP, target=EVERYBODY, fragment=0x2000), False, False
    ),
    "longer than its frame": (IPV4, ipv4(udp(67, 68, b"x" * 9), UDP)[:-9], False, False),
    "pxe server": (IPV4, ipv4(udp(4011, 68), UDP, target=OTHER), False, False),
    "pxe boot server": (IPV4, ipv4(udp(4011, 4011), UDP, target=OTHER), False, False),
    "dhcpv6 relay": (IPV6, ipv6(udp(546, 547, b"\x0c"), UDP), False, False),
    "dhcpv6 server": (IPV6, ipv6(udp(547, 546), UDP), False, False),
    "router advertisement": (IPV6, icmpv6(134), False, False),
    "router advertisement behind a hop-by-hop header": (
        IPV6, behind_header(0, b"\0\x01\x04\0\0\0\0"), False, False
    ),
    "router advertisement behind destination options": (
        IPV6, behind_header(60, b"\0\x01\x04\0\0\0\0"), False, False
    ),
    "router advertisement behind an authentication header": (
        IPV6, behind_header(51, b"\0\0\0\0\0\0\0"), False, False
    ),
    "router advertisement in one fragment": (IPV6, behind_header(44, bytes(7)), False, False),
    "first fragment of a router advertisement": (
        IPV6, behind_header(44, b"\0\0\x01\0\0\0\x07"), False, False
    ),
    "router advertisement in a vlan": (0x8100, b"\0\x01\x86\xdd" + icmpv6(134), False, False),
    "router advertisement in vlan 0": (0x8100, b"\0\0\x86\xdd" + icmpv6(134), False, False),
    "router renumbering": (IPV6, icmpv6(138), False, False),
    "ipv6 redirect": (IPV6, icmpv6(137), False, False),
    "mld query": (IPV6, icmpv6(130), False, False),
    "late header": (IPV6, late_header(134), False, False),
    "vrrp": (IPV4, ipv4(bytes(8), 112, target=multicast(18)), False, False),
    "vrrp unicast": (IPV4, ipv4(bytes(8), 112, target=OTHER), False, False),
    "vrrp6": (IPV6, ipv6(bytes(8), 112, target="ff02::12"), False, False),
    "ospf": (IPV4, ipv4(bytes(8), 89, target=multicast(5)), False, False),
    "hsrp": (IPV4, ipv4(udp(1985, 1985), UDP, target=multicast(2)), False, False),
    "rip": (IPV4, ipv4(udp(520, 520), UDP, target=multicast(9)), False, False),
    "rip broadcast": (IPV4, ipv4(udp(520, 520), UDP, target=EVERYBODY), False, False),
    "rip unicast": (IPV4, ipv4(udp(9, 520), UDP, target=OTHER), False, False),
    "hsrp broadcast": (IPV4, ipv4(udp(1985, 1985), UDP, target=EVERYBODY), False, False),
    "hsrp6": (IPV6, ipv6(udp(2029, 2029), UDP, target="ff02::66"), False, False),
    "ripng": (IPV6, ipv6(udp(521, 521), UDP, target="ff02::9"), False, False),
    "igmp query": (IPV4, ipv4(igmp(0x11), 2, target=multicast(1)), False, False),
    "igmp router": (IPV4, ipv4(igmp(0x30), 2, target=multicast(106)), False, False),
    "igmp router's end": (IPV4, ipv4(igmp(0x32), 2, target=multicast(106)), False, False),
    "dvmrp": (IPV4, ipv4(igmp(0x13), 2, target=multicast(4)), False, False),
    "pim version 1": (IPV4, ipv4(igmp(0x14), 2, target=multicast(2)), False, False),
    "multicast router in ipv6": (IPV6, icmpv6(151, target="ff02::6a"), False, False),
    "end of multicast router in ipv6": (IPV6, icmpv6(153, target="ff02::6a"), False, False),
    "rpl": (IPV6, icmpv6(155), False, False),
    "inverse neighbor": (IPV6, icmpv6(142), False, False),
    "olsr": (IPV4, ipv4(udp(698, 698), UDP, target=EVERYBODY), False, False),
    "olsr6": (IPV6, ipv6(udp(698, 698), UDP, target="ff02::6d"), False, False),
    "babel": (IPV6, ipv6(udp(6696, 6696), UDP, target="ff02::1:6"), False, False),
    "babel unicast": (IPV6, ipv6(udp(6696, 6696), UDP), False, False),
    "glbp6": (IPV6, ipv6(udp(3222, 3222), UDP, target="ff02::66"), False, False),
    "icmp redirect": (IPV4, ipv4(echo(1, 5), ICMP, target=OTHER), False, False),
    "icmp router": (IPV4, ipv4(echo(1, 9), ICMP, target=multicast(1)), False, False),
    "rarp for another": (RARP, arp(3, OTHER_MAC, NOBODY, NOBODY, OTHER_MAC), False, False),
    "rarp answer": (RARP, arp(4, MAC, OTHER, OTHER), False, False),
    "arp of another mac": (ARP, arp(1, OTHER_MAC, IP, OTHER), False, False),
    "arp of longer addresses": (ARP, long_arp(2, MAC, IP, OTHER), False, False),
    "inverse arp": (ARP, arp(9, MAC, IP, OTHER), False, False),
    "vlan": (0x8100, b"\0\x01\x08\0" + ipv4(udp(9, 9), UDP), False, False),
    "vlan 0": (0x8100, b"\0\0\x08\0" + ipv4(udp(9, 9), UDP), False, False),
    "provider vlan": (0x88A8, b"\0\x01\x08\0" + ipv4(udp(9, 9), UDP), False, False),
    "vlan in provider vlan": (
        0x88A8, b"\0\x01\x81\0\0\x01\x08\0" + ipv4(udp(9, 9), UDP), False, False
    ),
    "pppoe": (0x8863, bytes(40), False, False),
    "ipv4 in pppoe": (
        0x8864, b"\x11\0\0\x01\0\x1e\0\x21" + ipv4(udp(9, 9), UDP), False, False
    ),
    "ipv6 in pppoe": (0x8864, b"\x11\0\0\x01\0\x3a\0\x57" + icmpv6(134), False, False),
    "mpls": (0x8847, b"\0\0\x01\xff" + ipv4(udp(9, 9), UDP), False, False),
    "snap": (90, b"\xaa\xaa\3\0\0\0\x86\xdd" + icmpv6(134).ljust(82, b"\0"), False, False),
    "roce": (0x8915, bytes(40), False, False),
    "lldp": (0x88CC, bytes(40), False, False),
    "llc": (60, b"\x42\x42\x03" + bytes(57), False, False),
    "experimental": (0x88B5, bytes(40), False, False),
}  # fmt: skip


@pytest.mark.parametrize("ipv6_key", [False, True], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("ip", [IP, None], ids=["assigned", "unassigned"])
def test_only_allowed_frames_pass(ip, ipv6_key):
    wanted = {}
    with own_network():
        node = NodeNetwork()
        with packet_filter(ip, ipv6=ipv6_key):
            passed = {}
            for name, (kind, payload, assigned, unassigned) in FRAMES.items():
                list(node.drain(node.other))
                node.send(payload, kind, target="ff:ff:ff:ff:ff:ff")
                passed[name] = any(each[6:12] == mac_bytes(MAC) for each in node.drain(node.other))
                wanted[name] = assigned if ip else unassigned and (ipv6_key or kind != IPV6)
    assert passed == wanted


def test_dhcp_client_sends_a_limited_number_of_requests(node):
    """Each request can get another address: the client chooses its identifier (option 61)."""
    with packet_filter(None):
        for _ in range(500):
            node.send(dhcp_packet(68, 67), target="ff:ff:ff:ff:ff:ff")
        passed = [each for each in node.drain(node.other) if each[6:12] == mac_bytes(MAC)]
    assert 0 < len(passed) < 100


def test_release_twice_deletes_only_the_guests_entries(node):
    table = Netfilter(tap_name(MAC), MAC, IP)  # as a release reads it from the journal
    table.release()
    table.release()
    node.send(ipv4(udp(9, 9), UDP))
    assert node.tracked() == 1
    table.release()
    assert node.tracked() == 1, "the release deleted an entry of another sender"


# -- Guests of users' own images (plugins/own-images) ----------------------------------------------

PEER, PEER_MAC = "10.86.0.18", "52:54:00:76:74:03"
SECOND = "10.96.0.16"  # a guest of another job in a second network of the site
METADATA = "169.254.169.254"


@pytest.fixture
def several_guests(node):
    """Add a second guest of the same job, and hosts that own images must not reach."""
    node.peer = open_tap(tap_name(PEER_MAC))
    run("ip", "link", "set", tap_name(PEER_MAC), "address", f"fe{PEER_MAC[2:]}")
    run("ip", "link", "set", tap_name(PEER_MAC), "master", "vt-br")
    for ip, mac, device in (
        (OTHER, OTHER_MAC, "vt-br"), (PEER, PEER_MAC, "vt-br"), (METADATA, ROUTER_MAC, "out"),
        (SECOND, ROUTER_MAC, "out"), ("100.100.100.200", ROUTER_MAC, "out"),
    ):  # fmt: skip
        run("ip", "neighbor", "add", ip, "lladdr", mac, "dev", device)
        if device == "out" and ip != METADATA:
            run("ip", "route", "add", ip, "dev", "out")
    run("ip", "route", "add", METADATA, "dev", "out")
    with packet_filter(), packet_filter(PEER, mac=PEER_MAC), packet_filter(OTHER, mac=OTHER_MAC):
        yield node


@pytest.fixture
def own_guest(several_guests):
    """Filter two guests as those of a job with a user's own image."""
    taps = tuple(map(tap_name, (MAC, PEER_MAC)))
    subnets = "10.86.0.0/16", "10.96.0.0/16"
    made = [JobFilter(tap, GATEWAY, (IP, PEER), taps, subnets) for tap in taps]
    for each in made:
        each.create()
        each.create()  # replaces the first
    yield several_guests
    for each in made:
        each.release()
        each.release()
    tables = subprocess.run(["nft", "list", "tables"], check=True, capture_output=True).stdout
    assert b"-own" not in tables


def own_tcp(source, target_port, target=OUTSIDE):
    return ipv4(tcp(source, target_port, SYN, (IP, target)), TCP, target=target)


def own_udp(source, target_port, target=OUTSIDE):
    return ipv4(udp(source, target_port), UDP, target=target)


def arrivals(node, packet, kind=IPV4, **words):
    """Return where a frame of the guest arrives, other than at the node itself."""
    places = {"outside": node.outside, "other": node.other, "peer": node.peer}
    for descriptor in places.values():
        list(node.drain(descriptor))
    node.send(packet, kind, **words)
    received = {name: list(node.drain(descriptor)) for name, descriptor in places.items()}
    ether = struct.pack("!H", kind)
    return {name for name, frames in received.items() if any(f[12:14] == ether for f in frames)}


OWN_PASSES = {
    "https": (own_tcp(1024, 443), {"outside"}),
    "dns": (own_udp(40000, 53), {"outside"}),
    "ping": (ipv4(echo(1), ICMP), {"outside"}),
    "ephemeral": (own_tcp(65535, 8080), {"outside"}),
}


@pytest.mark.parametrize("packet, expected", OWN_PASSES.values(), ids=OWN_PASSES)
def test_guest_of_own_image_reaches_other_hosts(own_guest, packet, expected):
    assert arrivals(own_guest, packet) == expected


OWN_DROPPED = {
    **{f"{n} from {p}": own(p, 80) for n, own in (("tcp", own_tcp), ("udp", own_udp))
       for p in (0, 1, 22, 111, 665, 700, 1023)},
    **{f"{n} to {p}": own(2000, p) for n, own in (("tcp", own_tcp), ("udp", own_udp))
       for p in (111, 2049, 20048, 20049, 4791)},
    "metadata": own_tcp(2000, 80, METADATA),
    "metadata ping": ipv4(echo(1), ICMP, target=METADATA),
    "other metadata": own_tcp(2000, 80, "100.100.100.200"),
    "guest of another network": own_tcp(2000, 80, SECOND),
    "first fragment": ipv4(udp(2000, 80, bytes(8)), UDP, fragment=0x2000),
    "later fragment": ipv4(bytes(16), UDP, fragment=1),
    "tiny segment": ipv4(b"\x03", TCP),
    "sctp from 700": ipv4(struct.pack("!HHII", 700, 80, 0, 0), 132),
    "dccp": ipv4(bytes(16), 33),
    "udp-lite": ipv4(udp(2000, 80), 136),
    "gre": ipv4(b"\0\0\x08\0" + own_tcp(2000, 80), 47),
    "ipip": ipv4(own_tcp(700, 2049), 4),
    "options": ipv4(udp(2000, 80), UDP, ihl=7),
}  # fmt: skip


@pytest.mark.parametrize("packet", OWN_DROPPED.values(), ids=OWN_DROPPED)
def test_guest_of_own_image_cannot_send(own_guest, packet):
    assert arrivals(own_guest, packet) == set()


# The node never forwards a fragment whose others are missing.
PASSING = {name: packet for name, packet in OWN_DROPPED.items() if "fragment" not in name}


@pytest.mark.parametrize("packet", PASSING.values(), ids=PASSING)
def test_guest_of_another_image_can_send_it(several_guests, packet):
    assert arrivals(several_guests, packet) == {"outside"}


# -- The wait for a tap device ------------------------------------------------------------------

WAITS = """
import os, subprocess, threading
from vtorque_core.resources.netfilter import await_tap

def run(words):
    subprocess.run(words.split(), check=True)

def waiting(tap):
    thread = threading.Thread(target=lambda: print(tap, await_tap(tap, end)))
    thread.start()
    return thread

run("mount -t sysfs none /sys")
run("ip link add br0 type bridge")
end, ended = os.pipe()
first = waiting("tap0")
run("ip tuntap add tap0 mode tap")
run("ip link set tap0 master br0")
first.join(120)
other = waiting("tap1")
run("ip tuntap add tap1 mode tap")
os.close(ended)
other.join(120)
"""


def test_wait_for_a_tap_device_ends_when_it_is_on_its_bridge_or_libvirt_has_ended():
    argv = ["unshare", "--net", "--mount", sys.executable, "-c", WAITS]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout == "tap0 True\ntap1 False\n"


# -- Checksum offload ------------------------------------------------------------------------------


def offload(node):
    """Give the guest a NIC with virtio's checksum offload, as QEMU does."""
    os.close(node.guest)
    node.guest = open_tap(tap_name(MAC), 0x5002)  # also IFF_VNET_HDR
    run("ip", "link", "set", tap_name(MAC), "address", f"fe{MAC[2:]}")
    run("ip", "link", "set", tap_name(MAC), "master", "vt-br")
    filter_tap(tap_name(MAC))
    return node


@pytest.fixture
def offloading_guest(several_guests):
    return offload(several_guests)


@pytest.fixture
def offloading_own_guest(own_guest):
    return offload(own_guest)


def send_offloaded(node, payload, start, offset, kind=IPV4, target=NODE_MAC, gso=(0, 0)):
    """Send a frame whose checksum Linux writes; return the frames that it sends to other hosts.

    The checksum covers the bytes from ``start`` on (struct virtio_net_hdr of the virtio
    specification 1.2, 5.1.6, with VIRTIO_NET_HDR_F_NEEDS_CSUM). ``gso`` is the type and size of
    segments.
    """
    header = struct.pack("<BBHHHH", 1, gso[0], 54 if gso[0] else 0, gso[1], 14 + start, offset)
    last = ipv4(udp(5000, 5000, b"last"), UDP)
    for descriptor in (node.outside, node.other):
        list(node.drain(descriptor))
    os.write(node.guest, header + frame(kind, payload, target=target))
    os.write(node.guest, bytes(10) + frame(IPV4, last))
    received = []

    def has_last():
        received.extend(node.drain(node.outside))
        return any(each[14:][20:] == last[20:] for each in received)

    eventually(has_last)
    received += node.drain(node.other)
    ether = struct.pack("!H", kind)
    return [f for f in received if f[12:14] == ether and f[14:][20:] != last[20:]]


def test_guest_of_own_image_can_offload_checksums(offloading_own_guest):
    (sent,) = send_offloaded(offloading_own_guest, ipv4(udp(4000, 443, b"data"), UDP), 20, 6)
    assert sent[34:38] + sent[42:] == udp(4000, 443, b"data")[:4] + b"data"
    assert sent[40:42] != bytes(2)


def large_tcp(length):
    """Return an IPv4 packet with so many bytes of TCP data, whose checksum Linux completes."""
    addresses = socket.inet_aton(IP) + socket.inet_aton(OUTSIDE)
    partial = ~checksum(addresses + struct.pack("!HH", TCP, 20 + length)) & 0xFFFF
    head = struct.pack("!HHIIBBHHH", 4000, 443, 1, 1, 5 << 4, ACK, 1024, partial, 0)
    return ipv4(head + bytes(length), TCP, fragment=0x4000)


@pytest.mark.parametrize("length", [3000, 30000])
def test_guest_can_offload_segmentation(offloading_guest, length):
    sent = send_offloaded(offloading_guest, large_tcp(length), 20, 16, gso=(1, 1000))
    assert [len(each) for each in sent] == [1054] * (length // 1000)
    for each in sent:
        addresses = socket.inet_aton("198.18.255.1") + socket.inet_aton(OUTSIDE)
        assert checksum(addresses + struct.pack("!HH", TCP, 1020) + each[34:]) == 0


@pytest.mark.parametrize("length", [3000, 30000])
@pytest.mark.parametrize("gso", [(0, 0), (1, 1000)], ids=["whole", "segments"])
@pytest.mark.parametrize("start", [20, 12], ids=["port", "address"])
def test_large_packet_cannot_forge_by_a_checksum(offloading_guest, length, gso, start):
    """A large TCP packet keeps its offload past the filter, because Linux divides it later."""
    try:
        sent = send_offloaded(offloading_guest, large_tcp(length), start, 0, gso=gso)
    except OSError as error:  # newer kernels reject the frame
        assert error.errno == errno.EINVAL
    else:
        assert not sent


def forge(node, packet, place, value, **words):
    """Send a frame in which Linux writes ``value`` over two bytes that the filter has checked."""
    add = (~value - ~checksum(packet(0)[place:])) % 0xFFFF
    assert checksum(packet(add)[place:]) == value
    return send_offloaded(node, packet(add), place, 0, **words)


def number_udp(target):
    return lambda number: ipv4(udp(4000, 443, struct.pack("!H", number)), UDP, target=target)


def number_arp(number):
    return arp(2, MAC, IP, OTHER, OTHER_MAC) + struct.pack("!H", number)


FORGED_IN_BRIDGE = {  # the sender's address becomes the gateway's; the port, that of a DHCP server
    "address": (number_udp(OTHER), 14, 1, IPV4), "port": (number_udp(OTHER), 20, 67, IPV4),
    "arp": (number_arp, 16, 1, ARP),
}  # fmt: skip


@pytest.mark.parametrize("forged", FORGED_IN_BRIDGE.values(), ids=FORGED_IN_BRIDGE)
def test_guest_cannot_forge_by_a_checksum(offloading_guest, forged):
    packet, place, value, kind = forged
    assert forge(offloading_guest, packet, place, value, kind=kind, target=OTHER_MAC) == []


def number_padded(number):
    """Return a small TCP packet in a frame that is as long as a large one."""
    head = tcp(4000, 443, ACK, (IP, OUTSIDE), acknowledged=1)
    return ipv4(head + struct.pack("!H", number), TCP, fragment=0x4000) + bytes(30000)


FORGED = {
    "source port": (number_udp(OUTSIDE), 20, 700), "NFS": (number_udp(OUTSIDE), 22, 2049),
    "portmapper": (number_udp(OUTSIDE), 22, 111), "padded": (number_padded, 20, 700),
    "metadata": (number_udp("198.18.169.254"), 16, 0xA9FE),
}  # fmt: skip


@pytest.mark.parametrize("packet, place, value", FORGED.values(), ids=FORGED)
def test_guest_of_own_image_cannot_forge_by_a_checksum(offloading_own_guest, packet, place, value):
    run("ip", "neighbor", "replace", "198.18.169.254", "lladdr", ROUTER_MAC, "dev", "out")
    assert forge(offloading_own_guest, packet, place, value) == []


def test_release_removes_the_ifb_device(node):
    with packet_filter():
        assert socket.if_nametoindex(f"{tap_name(MAC)}s")
    assert f"{tap_name(MAC)}s" not in {name for _, name in socket.if_nameindex()}


def send_segmented(node, target, start):
    """Send a TCP packet that Linux splits and whose checksums cover the bytes from ``start`` on.

    Return source port, destination port and destination of the packets that leave the node. Linux
    may refuse the packet.
    """
    packet = ipv4(tcp(4000, 443, SYN, (IP, target)) + bytes(400), TCP, target=target)
    sent = []
    with contextlib.suppress(OSError):
        sent = [each[14:] for each in send_offloaded(node, packet, start, 16, gso=(1, 100))]
    return [(*struct.unpack_from("!HH", each, 20), socket.inet_ntoa(each[16:20])) for each in sent]


@pytest.mark.parametrize("target", [OUTSIDE, "198.18.169.254"])
def test_guest_of_own_image_cannot_forge_by_segments(offloading_own_guest, target):
    run("ip", "neighbor", "replace", target, "lladdr", ROUTER_MAC, "dev", "out")
    assert send_segmented(offloading_own_guest, target, 20) == [(4000, 443, target)] * 4
    for place in (0, 4, 6, 16, 22):
        assert set(send_segmented(offloading_own_guest, target, place)) <= {(4000, 443, target)}


OTHER_JOB = {
    "tcp": (own_tcp(2000, 22, OTHER), OTHER_MAC),
    "by the node": (own_tcp(2000, 22, OTHER), NODE_MAC),
    "ping": (ipv4(echo(1), ICMP, target=OTHER), OTHER_MAC),
    "ping by the node": (ipv4(echo(1), ICMP, target=OTHER), NODE_MAC),
    "address of the peer": (own_tcp(2000, 22, PEER), OTHER_MAC),
    "address of the gateway": (own_udp(2000, 9, GATEWAY), OTHER_MAC),
    "address outside": (own_udp(2000, 9), OTHER_MAC),
    "port's mac": (own_udp(2000, 9, OTHER), f"fe{OTHER_MAC[2:]}"),
    "broadcast": (own_udp(2000, 9, EVERYBODY), "ff:ff:ff:ff:ff:ff"),
    "subnet's broadcast": (own_udp(2000, 9, "10.86.255.255"), "ff:ff:ff:ff:ff:ff"),
    "mdns": (own_udp(5353, 5353, "224.0.0.251"), "01:00:5e:00:00:fb"),
    "unknown mac": (own_udp(2000, 9, OTHER), "52:54:00:00:00:09"),
}


@pytest.mark.parametrize("packet, mac", OTHER_JOB.values(), ids=OTHER_JOB)
def test_guest_of_another_job_gets_nothing_of_an_own_image(own_guest, packet, mac):
    assert "other" not in arrivals(own_guest, packet, target=mac)


# A bridge delivers frames to a port's own MAC to the node.
REACHING = {name: attack for name, attack in OTHER_JOB.items() if name != "port's mac"}


@pytest.mark.parametrize("packet, mac", REACHING.values(), ids=REACHING)
def test_guest_of_another_job_gets_it_of_another_image(several_guests, packet, mac):
    assert "other" in arrivals(several_guests, packet, target=mac)


@pytest.mark.parametrize("target", [OTHER_MAC, "ff:ff:ff:ff:ff:ff"])
@pytest.mark.parametrize("operation", [1, 2])
def test_guest_of_another_job_gets_no_arp_of_an_own_image(own_guest, target, operation):
    packet = arp(operation, MAC, IP, OTHER, target)
    assert "other" not in arrivals(own_guest, packet, ARP, target=target)


def test_guests_of_the_job_reach_each_other(own_guest):
    """On any port: they have the same user."""
    for packet in (own_tcp(700, 2049, PEER), own_udp(111, 111, PEER), own_tcp(2000, 22, PEER)):
        assert arrivals(own_guest, packet, target=PEER_MAC) == {"peer"}
    asked = arp(1, MAC, IP, PEER)
    assert arrivals(own_guest, asked, ARP, target="ff:ff:ff:ff:ff:ff") == {"peer"}


def test_guest_of_own_image_gets_nothing_from_another_job(own_guest):
    for packet, kind, target in (
        (ipv4(udp(2000, 9), UDP, OTHER, IP), IPV4, MAC),
        (ipv4(udp(2000, 9), UDP, OTHER, EVERYBODY), IPV4, "ff:ff:ff:ff:ff:ff"),
        (arp(1, OTHER_MAC, OTHER, IP), ARP, "ff:ff:ff:ff:ff:ff"),
    ):
        for descriptor in (own_guest.guest, own_guest.peer):
            list(own_guest.drain(descriptor))
        os.write(own_guest.other, frame(kind, packet, OTHER_MAC, target))
        for descriptor in (own_guest.guest, own_guest.peer):
            sources = [each[6:12] for each in own_guest.drain(descriptor)]
            assert mac_bytes(OTHER_MAC) not in sources
