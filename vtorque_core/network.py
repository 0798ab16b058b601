"""Where a guest's address comes from: assigned under the site's plan, never discovered.

Every node computes the same addresses for the same (node, slot, guest), with no exchange.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from vtorque_core.api_node import Address, PoolClaim, run_tool
from vtorque_core.errors import HostFault

if TYPE_CHECKING:
    from vtorque_core.config_schema import Network

POOL = "address"


def node_number(node: str, pattern: str) -> int:
    """Return the number in a node's batch name, 0 where ``[network] node_number`` finds none."""
    match = re.search(pattern, node.split(".", maxsplit=1)[0])
    return int(match[1]) if match else 0


def claim(network: Network, node: str, guests: int, index: int) -> PoolClaim | None:
    """Return the claim for one guest's address, or None where the site does not assign any.

    Raises HostFault if the site's plan has no room for this node.
    """
    if network.kind == "none" or network.addressing == "dhcp":
        return None
    if network.addressing == "command":
        return PoolClaim(POOL, items=(_from_command(network, node, guests, index),))
    return PoolClaim(POOL, items=_candidates(network, node))


def address(network: Network, mac: str, ip: str | None) -> Address:
    """Return a NIC's full assignment."""
    subnet = ipaddress.IPv4Network(network.subnet)
    gateway = network.gateway or str(subnet.network_address + 1)
    if ip is None:
        return Address(mac=mac)
    return Address(mac=mac, ip=ip, prefix=subnet.prefixlen, gateway=gateway, dns=tuple(network.dns))


def _candidates(network: Network, node: str) -> tuple[str, ...]:
    subnet = ipaddress.IPv4Network(network.subnet)
    number = node_number(node, network.node_number)
    start = network.first + number * network.per_node
    if start + network.per_node >= subnet.num_addresses:
        raise HostFault(
            f"node {node} has number {number}: its {network.per_node} guest addresses lie outside "
            f"{network.subnet}; enlarge [network] subnet or lower per_node"
        )
    first = subnet.network_address + start
    return tuple(str(first + i) for i in range(network.per_node))


def _from_command(network: Network, node: str, guests: int, index: int) -> str:
    answer = run_tool(network.command, node, str(guests), str(index), timeout=10).strip()
    try:
        return str(ipaddress.IPv4Address(answer))
    except ValueError:
        raise HostFault(
            f"[network] command {network.command} {node} {guests} {index}: the answer "
            f"{answer[:80]!r} is not an IPv4 address"
        ) from None
