"""What a guest may send: only from its own MAC and address, and hardly anything to the node.

One nftables table of the bridge family per NIC (nft(8)), made before the domain starts, so that
there is no moment without it. libvirt's ``clean-traffic`` does the same and costs 1.0 s more per
start and 0.7 s per stop of a guest (measured with libvirt 9.0); this costs 0.02 s.

One table of the inet family per guest network keeps guests from the node's own services. It belongs
to the node: each start loads it in the same transaction as the guest's table, since a reboot or
``nft flush ruleset`` takes it away.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from vtorque_core.api.acquired import CoreResource, unjournalled
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.base.record import dataclass
from vtorque_core.base.run_tool import run_tool
from vtorque_core.site.schema import ExtraNetwork, Network

_TAP = re.compile(r"[a-z][a-z0-9]{1,14}")
_MAC = re.compile(r"([0-9a-f]{2}:){5}[0-9a-f]{2}")
_BRIDGE = re.compile(r"[A-Za-z0-9_.-]{1,15}")  # no quote, no * (nft's wildcard); IFNAMSIZ is 16
_PORT = re.compile(r"(?:tcp|udp)/[0-9]{1,5}")  # [network] node_ports
# Bridges that libvirt makes for guests alone (https://libvirt.org/formatnetwork.html); without a
# forward element the network is isolated. Others are the site's: its own hosts are behind them.
_OWN_BRIDGE = (None, "nat", "route", "open")
_GUARD = "vtorque-node-"
_OF_DHCP = ("udp/53", "tcp/53", "udp/67", "udp/547")  # libvirt's dnsmasq: DNS, DHCP, DHCPv6


def rules(tap: str, mac: str, ip: str | None) -> str:
    """Return the nft script that guards one tap device; it replaces an earlier one of that name.

    Without ``ip`` (DHCP) only the MAC is checked. With it: ARP and IPv4 from that address only
    (0.0.0.0 in ARP probes, RFC 5227), no IPv6, nothing else but a RARP request for its own MAC
    (RFC 903): by that QEMU tells switches where a guest is that has just moved. Raises ValueError.
    """
    if not _TAP.fullmatch(tap) or not _MAC.fullmatch(mac):
        raise ValueError(f"tap {tap!r}, MAC {mac!r}: not the names of a guest's NIC")
    lines = [f'iifname != "{tap}" accept', f"ether saddr != {mac} drop"]
    if ip is None:
        lines.append(f"ether type arp arp saddr ether != {mac} drop")
    else:
        address = ipaddress.IPv4Address(ip)
        lines += [
            f"ether type arp arp saddr ether {mac} arp saddr ip {{ {address}, 0.0.0.0 }} accept",
            f"ether type ip ip saddr {address} accept",
            f"ether type 0x8035 @nh,48,16 3 @nh,64,48 0x{mac.replace(':', '')} accept",
            "drop",
        ]
    chain = "".join(f"    {line}\n" for line in lines)
    return (
        _removal("bridge", tap) + f"table bridge {tap} {{\n  chain guest {{\n"
        f"    type filter hook prerouting priority -300; policy accept;\n{chain}  }}\n}}\n"
    )


def refuse_bpdus(tap: str) -> None:
    """Have the bridge close the port of a guest that takes part in its spanning tree. As root.

    A bridge that has one takes such frames (IEEE 802.1D) before any hook of nft's sees them; the
    guest could make itself the root of the site's network. bridge(8), ``guard``.
    """
    with contextlib.suppress(FileNotFoundError):  # no port of a bridge of the kernel's
        Path(f"/sys/class/net/{tap}/brport/bpdu_guard").write_text("1", encoding="ascii")


def node_guard(network: Network | ExtraNetwork, uri: str) -> str:
    """Return the nft script that keeps guests from the node's services; empty: nothing to guard.

    Only a bridge that libvirt made is guarded: a site's own has its hosts behind it. As root.
    Raises HostFault if the network is not up.
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
    dhcp = network.addressing == "dhcp"
    try:
        return guard(network.source, bridge, network.node_ports, dhcp=dhcp)
    except ValueError as error:
        raise HostFault(f"libvirt network {network.source}: {error}") from None


def guest_bridge(xml: str) -> str | None:
    """Return the bridge of a libvirt network if only guests are behind it."""
    root = ElementTree.fromstring(xml)  # noqa: S314 - from libvirt, written by root
    forward, bridge = root.find("forward"), root.find("bridge")
    mode = None if forward is None else forward.get("mode", "nat")
    return bridge.get("name") if bridge is not None and mode in _OWN_BRIDGE else None


def guard_table(network: str) -> str:
    """Return the name of the inet table that keeps a libvirt network's guests from the node."""
    return _GUARD + re.sub(r"[^A-Za-z0-9_.-]", "_", network)[:100]


def guard(network: str, bridge: str, ports: Sequence[str], *, dhcp: bool) -> str:
    """Return the nft script that drops what guests on ``bridge`` send to the node itself.

    Answers, ICMP (ping, path MTU, IPv6's neighbours) and ``ports`` (``tcp/2049``) pass; with
    ``dhcp`` also DHCP and DNS of libvirt's dnsmasq. What the node only forwards is not touched.
    It replaces an earlier one. Raises ValueError.
    """
    if not _BRIDGE.fullmatch(bridge):
        raise ValueError(f"bridge {bridge!r} is not a name that nftables can match")
    lines = [
        f'iifname != "{bridge}" accept',
        "ct state established,related accept",
        "meta l4proto { icmp, ipv6-icmp } accept",
    ]
    for port in (*ports, *(_OF_DHCP if dhcp else ())):
        if not _PORT.fullmatch(port):
            raise ValueError(f"port {port!r} is not tcp/PORT or udp/PORT")
        lines.append(f"{port.replace('/', ' dport ')} accept")
    chain = "".join(f"    {line}\n" for line in (*lines, "drop"))
    table = guard_table(network)
    return (
        _removal("inet", table) + f"table inet {table} {{\n  chain input {{\n"
        f"    type filter hook input priority 0; policy accept;\n{chain}  }}\n}}\n"
    )


def load(script: str) -> None:
    """Give a script to nft, all of it or nothing. Raises HostFault (nft missing or refusing)."""
    run_tool("nft", "-f", "-", stdin=script.encode())


def unguard(network: str) -> None:
    """Take the table of :func:`guard` away; none is fine. Raises HostFault."""
    load(_removal("inet", guard_table(network)))


def guarded(network: str) -> bool:
    """Return whether the table of :func:`guard` is there. Raises HostFault (nft missing)."""
    return guard_table(network) in _guards()


def sweep(uri: str) -> list[str]:
    """Take away the tables of networks that are not up any more; return these tables' names.

    Such a table guards nobody, and another network may get the same bridge. A network that comes
    back gets its own with its first guest. Networks that other installations of vTorque on this
    host use keep theirs. As root. Raises HostFault.
    """
    tables = _guards()
    up = {guard_table(name) for name in hypervisor.network_names(uri)} if tables else set()
    gone = [table for table in tables if table not in up]
    for table in gone:
        load(_removal("inet", table))
    return gone


def _guards() -> list[str]:
    words = [line.split() for line in run_tool("nft", "list", "tables", "inet").splitlines()]
    return [word[2] for word in words if len(word) == 3 and word[2].startswith(_GUARD)]


def _removal(family: str, table: str) -> str:
    # Adding what exists is fine, so this works with and without the table (nft(8), "add table").
    return f"table {family} {table}\ndelete table {family} {table}\n"


@dataclass(frozen=True)
class Netfilter(CoreResource):
    """The packet filter of one guest NIC, by the name of its tap device.

    ``guard``: the node's own table (:func:`guard`), loaded with it and not released with it.
    """

    kind = "netfilter"
    needs_root = True
    tap: str
    mac: str
    ip: str | None = None
    guard: str = unjournalled("")

    def create(self) -> None:
        """Put the table in place in one transaction. Raises HostFault (nft missing or refusing)."""
        load(rules(self.tap, self.mac, self.ip) + self.guard)

    def release(self) -> None:
        """Delete the table; gone already is fine. Raises HostFault."""
        load(_removal("bridge", self.tap))
