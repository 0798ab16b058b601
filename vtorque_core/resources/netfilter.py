"""Packet filter of a guest's NIC.

The templates in the directory ``filter`` contain the rules and their reasons. Each NIC has one
nftables table of the bridge family (nft(8)). An inet table limits the guest's tracked connections.
A netdev table and an ifb device make Linux compute the checksums that the guest has offloaded.

One inet table per guest network closes the node's services to guests. Each start of a guest loads
this table again, because a reboot or ``nft flush ruleset`` removes it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from vtorque_core.api.acquired import CoreResource, unjournalled
from vtorque_core.api.children import wait_readable
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.base.run_tool import run_tool

if TYPE_CHECKING:
    from vtorque_core.config.schema import ExtraNetwork, Network

_TAP = re.compile(r"[a-z][a-z0-9]{1,14}")
_MAC = re.compile(r"([0-9a-f]{2}:){5}[0-9a-f]{2}")
_BRIDGE = re.compile(r"[A-Za-z0-9_.-]{1,15}")  # no quote, no * (nft's wildcard); IFNAMSIZ is 16
_PORT = re.compile(r"(?:tcp|udp)/[0-9]{1,5}")  # [network] node_ports
# Forward modes with a bridge that libvirt creates for guests only, None for an isolated network
# (https://libvirt.org/formatnetwork.html). Other bridges also connect hosts of the site.
_OWN_BRIDGE = (None, "nat", "route", "open")
_GUARD = "vtorque-node-"
_NO_TABLE = "table inet {0}\ndelete table inet {0}\n"
_CONNTRACK = Path("/proc/sys/net/netfilter/nf_conntrack_max")  # while its module is loaded
_FILTER = Path(__file__).with_name("filter")
_OF_DHCP = ("udp/53", "tcp/53", "udp/67", "udp/547")  # libvirt's dnsmasq: DNS, DHCP, DHCPv6


def rules(tap: str, mac: str, ip: str | None, connections: int = 0, *, ipv6: bool = False) -> str:
    """Return the nft script that filters one guest's NIC, and replaces the NIC's earlier tables.

    The guest may send only from ``mac`` and ``ip``. If ``ip`` is None, any IPv4 address may be the
    source, and ``ipv6`` also allows IPv6, except router messages. ``connections`` limits the
    guest's tracked connections; 0: the node tracks none of them.
    """
    if not _TAP.fullmatch(tap) or not _MAC.fullmatch(mac):
        raise ValueError(f"tap {tap!r} or MAC {mac!r} is not valid for a guest's NIC")
    parts = ["removal", "common", "unassigned" if ip is None else "static"]
    parts += ["ipv6"] * (ipv6 and ip is None) + ["connections"] * bool(connections)
    return _script(
        *parts,
        tap=tap,
        mac=mac,
        hexmac=f"0x{mac.replace(':', '')}",
        ip="" if ip is None else ipaddress.IPv4Address(ip),
        destination=f"ether daddr {mac}" if ip is None else f"ip daddr {ip}",
        part=connections // 64,
        rate=connections // 16,
        burst=connections // 2,
        mark=_mark(mac),
    )


def _script(*parts: str, **values: object) -> str:
    texts = [(_FILTER / f"{part}.nft").read_text(encoding="ascii") for part in parts]
    return Template("".join(texts)).substitute(values)


def _mark(mac: str) -> int:
    return 0x76000000 | int(mac.replace(":", "")[6:], 16)


def forget_connections(mac: str) -> None:
    """Delete a guest's entries in the node's connection tracking table.

    Sends one netlink message (linux/netfilter/nfnetlink_conntrack.h) with the guest's connection
    mark. If that fails, the entries expire later.
    """
    # A header, IPCTNL_MSG_CT_DELETE with an acknowledgment, then CTA_MARK and CTA_MARK_MASK.
    message = struct.pack("=IHHIIBBH", 36, 0x102, 5, 0, 0, 0, 0, 0)
    for kind, value in ((8, _mark(mac)), (21, 0xFFFFFFFF)):
        message += struct.pack("=HH", 8, kind) + struct.pack("!I", value)
    netlink = (socket.AF_NETLINK, socket.SOCK_RAW, 12)  # NETLINK_NETFILTER, linux/netlink.h
    with contextlib.suppress(OSError), socket.socket(*netlink) as kernel:
        kernel.settimeout(10)
        kernel.send(message)
        kernel.recv(4096)


def filter_tap(tap: str) -> None:
    """Complete a NIC's filter when its tap device exists and is on its bridge. Raises HostFault.

    By default, a bridge delivers frames to 01:80:C2:00:00:00-0F to the node, past nftables, and
    learns their source MACs (IEEE 802.1Q, 8.6.3). The bridge must forward them to be filtered.
    """
    load(_script("checksum", tap=tap, longest=_longest_packet()))
    # The kernel rejects bit 1, because it drops pause frames itself.
    with contextlib.suppress(FileNotFoundError):  # not a port of a bridge
        Path(f"/sys/class/net/{tap}/brport/group_fwd_mask").write_bytes(b"0xfffd")


def await_tap(tap: str, end: int) -> bool:
    """Wait until a tap device is a bridge port, or until ``end`` is readable: then return False."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as links:
        links.bind((0, 1))  # RTMGRP_LINK: changes of devices, rtnetlink(7)
        while not Path(f"/sys/class/net/{tap}/brport/group_fwd_mask").exists():
            if end in wait_readable([links.fileno(), end]):
                return False
            with contextlib.suppress(OSError):  # ENOBUFS: changes were lost
                links.recv(1 << 16)
    return True


def _longest_packet() -> int:
    """Return a length in bytes that no device of this node, except lo, sends undivided."""
    longest = 9216
    for mtu in Path("/sys/class/net").glob("*/mtu"):
        with contextlib.suppress(OSError):  # the device has been removed
            if mtu.parent.name != "lo":
                longest = max(longest, int(mtu.read_text()))
    return min(longest + 100, 65535)  # with the headers of Ethernet and of a tunnel


def add_ifb(name: str) -> None:
    """Create an ifb device without checksum offload, and so without segmentation offload."""
    remove_ifb(name)
    run_tool("ip", "link", "add", name, "txqueuelen", "1000", "up", "type", "ifb")
    off = array("I", (0x17, 0))  # ETHTOOL_STXCSUM of SIOCETHTOOL, linux/ethtool.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        ioctl(kernel, 0x8946, struct.pack("16sP16x", name.encode(), off.buffer_info()[0]))


def remove_ifb(name: str) -> None:
    if name in (device for _, device in socket.if_nameindex()):
        run_tool("ip", "link", "delete", name)


def node_guard(network: Network | ExtraNetwork, uri: str) -> str:
    """Return the nft script that closes the node's services to guests of ``network``.

    The script is empty if libvirt did not create the bridge, because the rules would also block
    other hosts on such a bridge.
    """
    if network.kind != "network":
        return ""
    xml = hypervisor.network_xml(uri, network.source)
    if xml is None:
        raise HostFault(
            f"libvirt network {network.source} is not active: run vtorque setup install"
        )
    bridge = guest_bridge(xml)
    if bridge is None:
        return ""
    try:
        return guard(network.source, bridge, network.node_ports, dhcp=network.addressing == "dhcp")
    except ValueError as error:
        raise HostFault(f"libvirt network {network.source}: {error}") from None


def guest_bridge(xml: str) -> str | None:
    """Return the bridge of a libvirt network, or None if libvirt did not create the bridge."""
    root = ElementTree.fromstring(xml)  # noqa: S314 - from libvirt, written by root
    forward, bridge = root.find("forward"), root.find("bridge")
    mode = None if forward is None else forward.get("mode", "nat")
    return bridge.get("name") if bridge is not None and mode in _OWN_BRIDGE else None


def guard_table(network: str) -> str:
    return _GUARD + re.sub(r"[^A-Za-z0-9_.-]", "_", network)[:100]


def guard(network: str, bridge: str, ports: Sequence[str], *, dhcp: bool) -> str:
    """Return the nft script that drops packets from guests on ``bridge`` to the node.

    The script allows replies, ICMP (ping, path MTU, IPv6 neighbors) and ``ports`` (``tcp/2049``).
    With ``dhcp``, it also allows libvirt's dnsmasq. The rules also apply to packets that DNAT
    redirects from the node to another host.
    """
    if not _BRIDGE.fullmatch(bridge):
        raise ValueError(f"bridge {bridge!r} is not a name that nftables can match")
    open_ports = (*ports, *(_OF_DHCP if dhcp else ()))
    for port in open_ports:
        if not _PORT.fullmatch(port):
            raise ValueError(f"port {port!r} is not tcp/PORT or udp/PORT")
    split = [port.split("/") for port in open_ports]
    own = "".join(f"\n    {kind} dport {port} accept" for kind, port in split)
    forwarded = "".join(
        f"\n    meta l4proto {kind} ct original proto-dst {port} accept" for kind, port in split
    )
    names = {"table": guard_table(network), "bridge": bridge}
    return _script("node", **names, ports=own, forwarded_ports=forwarded)


def load(script: str) -> None:
    run_tool("nft", "-f", "-", stdin=script.encode())


def remove_guard(network: str) -> None:
    load(_NO_TABLE.format(guard_table(network)))


def has_guard(network: str) -> bool:
    return guard_table(network) in _guards()


def sweep(uri: str) -> list[str]:
    """Delete the :func:`guard` tables of inactive networks, and return the tables' names.

    Otherwise an old table would filter another network whose bridge gets the same name.
    """
    tables = _guards()
    up = {guard_table(name) for name in hypervisor.network_names(uri)} if tables else set()
    gone = [table for table in tables if table not in up]
    for table in gone:
        load(_NO_TABLE.format(table))
    return gone


def _guards() -> list[str]:
    words = [line.split() for line in run_tool("nft", "list", "tables", "inet").splitlines()]
    return [word[2] for word in words if len(word) == 3 and word[2].startswith(_GUARD)]


@dataclass(frozen=True)
class Netfilter(CoreResource):
    """The packet filter of one guest NIC with the tap device ``tap``, and its ifb device.

    ``guard`` is the script of :func:`node_guard`, which stays loaded after the release.
    """

    kind = "netfilter"
    blocking = True  # so that it is released beside a guest's other helpers
    needs_root = True
    tap: str
    mac: str
    ip: str | None = None
    guard: str = unjournalled("")
    connections: int = unjournalled(0)
    ipv6: bool = unjournalled(False)

    def create(self) -> None:
        # The guard makes the node track connections.
        limit = self.connections if self.guard or _CONNTRACK.exists() else 0
        script = rules(self.tap, self.mac, self.ip, limit, ipv6=self.ipv6) + self.guard
        self._beside(add_ifb, script)

    def release(self) -> None:
        self._beside(remove_ifb, _script("removal", tap=self.tap))
        forget_connections(self.mac)

    def _beside(self, change_ifb: Callable[[str], None], script: str) -> None:
        with ThreadPoolExecutor(1) as pool:  # the kernel takes long to change devices and tables
            changed = pool.submit(change_ifb, f"{self.tap}s")
            load(script)
        changed.result()
