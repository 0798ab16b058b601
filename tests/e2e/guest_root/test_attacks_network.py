"""Root inside a guest attacks the host and others by the network; see ``guest_attacks``."""

import contextlib
import ipaddress
import re
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from guest_attacks import Meeting

pytestmark = pytest.mark.e2e

BRIDGE, GATEWAY = "vtorque-e2e0", "10.87.0.1"


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
    """Return an ARP announcement (RFC 826; RARP: RFC 903) that claims ``ip`` for ``mac``."""
    raw, address = bytes.fromhex(mac.replace(":", "")), ipaddress.IPv4Address(ip).packed
    return struct.pack("!HHBBH", 1, 0x800, 6, 4, operation) + raw + address + b"\xff" * 6 + address


IPV4, ARP, RARP, IPV6 = b"\x08\x00", b"\x08\x06", b"\x80\x35", b"\x86\xdd"
NOBODY = "0.0.0.0"  # noqa: S104
BAD_MAC, BAD_IP = "52:54:00:ba:dd:ad", "10.87.250.250"


def spoofs(mac, ip, gateway):
    """Return name to frame; each contains its name, or is identified by its forged address."""

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
        "own-rarp": frame(mac, RARP, arp(mac, NOBODY, 3) + data("own-rarp")),
        "rarp-mac": frame(mac, RARP, arp(BAD_MAC, NOBODY, 3) + data("rarp-mac")),
        "rarp-answer": frame(mac, RARP, arp(mac, gateway, 4) + data("rarp-answer")),
        "ipv6": frame(mac, IPV6, router + b"\xff\x02" + b"\0" * 13 + b"\x01" + data("ipv6")),
        "vlan": frame(mac, vlan, ipv4(ip, everybody, data("vlan"))),
        "vlan-spoof": frame(mac, vlan, ipv4(BAD_IP, everybody, data("vlan-spoof"))),
        "bpdu": frame(mac, struct.pack("!H", 60), b"\x42\x42\x03" + data("bpdu") + b"\0" * 40,
                      "01:80:c2:00:00:00"),
        "other": frame(mac, b"\x88\xb5", data("other") + b"\0" * 40),
    }  # fmt: skip


def test_guest_root_cannot_forge_addresses(guest):
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
    assert arrived == {"own", "own-rarp"}
    assert not [f for f in heard if bytes.fromhex(BAD_MAC.replace(":", "")) in f]
    assert not [f for f in heard if ipaddress.IPv4Address(BAD_IP).packed in f]


# libvirtd, sshd, portmapper, displays and migrations of the node
PORTS = "22 111 5900 5901 16509 16514 49152"


def tracked_connections(ip):
    lines = Path("/proc/net/nf_conntrack").read_text().splitlines()
    return [line for line in lines if f"src={ip} " in line.partition("dst=")[0]]


def test_guest_root_cannot_reach_closed_ports_or_fill_connection_tracking(guest):
    own = guest.config.read_text()
    table = ("inet", "vtorque-node-vtorque-e2e")
    with socket.create_server((NOBODY, 0)) as closed, socket.create_server((NOBODY, 0)) as opened:
        closed_port, open_port = (each.getsockname()[1] for each in (closed, opened))
        limits = f'node_ports = ["tcp/{open_port}"]\nmax_connections = 1024\n'
        guest.config.write_text(own.replace("[network]\n", f"[network]\n{limits}"))
        subprocess.run(["nft", "delete", "table", *table], check=True, timeout=180)  # is sent back
        try:
            meeting = Meeting(
                guest,
                f"/bin/rootsh tcp {GATEWAY} {PORTS} {closed_port} {open_port}\n"
                f"/bin/rootsh tcp {_address_of_node()} {closed_port}\n"
                f"t ping ping -c 1 -W 2 {GATEWAY}\n"
                "ip -4 -o addr show scope global >nic\n"
                "/bin/rootsh flood 198.51.100.1 || echo FLOOD-FAILED\n"  # RFC 5737: behind NAT
                "meet flooded\n",
            )
            meeting.wait("flooded")
            ip = re.search(r"inet ([\d.]+)/", (guest.home / "nic").read_text())[1]
            entries = tracked_connections(ip)
            meeting.go("flooded")
            result = meeting.end()
        finally:
            guest.config.write_text(own)
            guest.root("vtorque", "setup", "install", "--config", str(guest.config))
    states = dict(re.findall(r"^([\d.]+ \d+) (.*)$", result.out.decode(), re.MULTILINE))
    assert len(states) == 10
    opened_ones = [where for where, state in states.items() if state == "open"]
    assert opened_ones == [f"{GATEWAY} {open_port}"]
    assert re.findall(rb"^@@ (.*)$", result.out, re.MULTILINE) == [b"ping ok"]
    listed = subprocess.run(["nft", "list", "table", *table], capture_output=True, check=True)
    assert str(open_port).encode() not in listed.stdout
    assert b"FLOOD-FAILED" not in result.out
    assert 512 <= len(entries) <= 1024
    assert tracked_connections(ip) == [], "the release left entries of the guest"


def _address_of_node():
    """Return an address of the node that is not on the guests' bridge."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))  # RFC 5737; nothing is sent
        return probe.getsockname()[0]
