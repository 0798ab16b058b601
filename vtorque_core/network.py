"""Where a guest's address comes from: assigned under the site's plan, never discovered.

Every node computes the same addresses for the same (node, slot, guest), with no exchange.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from typing import TYPE_CHECKING

from vtorque_core.api_node import Address, PoolClaim, run_tool
from vtorque_core.errors import HostFault

if TYPE_CHECKING:
    from vtorque_core.api_batch import BatchJob
    from vtorque_core.config_schema import Network

POOL = "address"


def node_number(node: str, pattern: str) -> int:
    """Return the number in a node's batch name, 0 where ``[network] node_number`` finds none."""
    match = re.search(pattern, node.split(".", maxsplit=1)[0])
    return int(match[1]) if match else 0


def claim(network: Network, job: BatchJob, guests: int, index: int) -> PoolClaim | None:
    """Return the claim for one guest's address, or None where the site does not assign any.

    A job on one node takes any address of this node that is free. On several nodes its addresses
    are fixed, see :func:`address_of`. Raises HostFault if the site's plan has no room.
    """
    if network.kind == "none" or network.addressing == "dhcp":
        return None
    if len(job.nodes) == 1 and network.addressing == "static":
        return PoolClaim(POOL, items=_candidates(network, job.node))
    return PoolClaim(POOL, items=(address_of(network, job, job.node, guests, index),))


def address_of(network: Network, job: BatchJob, node: str, guests: int, index: int) -> str:
    """Return the address of one guest on any node of the job, as each of its nodes computes it.

    With static addressing it follows from the job id, in the upper half of the node's addresses:
    jobs submitted one after the other get different ones, and jobs on one node begin at the lower
    end. If another job has it, the start fails on that node. Raises HostFault.
    """
    if network.addressing == "command":
        return _from_command(network, node, guests, index)
    addresses = _candidates(network, node)
    upper = addresses[len(addresses) // 2 :]
    seats = len(upper) // guests
    if not seats:
        raise HostFault(
            f"{guests} guests per node of a job on several nodes need {2 * guests} addresses; "
            f"[network] per_node is {network.per_node}"
        )
    return upper[_number(job.id) % seats * guests + index]


def _number(job_id: str) -> int:
    """Return the sequence number of ``22.server``, the sum of ``22[3].server``, else a hash."""
    match = re.match(r"([0-9]+)(?:\[([0-9]*)\]|_([0-9]+))?(?:\.|$)", job_id, re.ASCII)
    if match is None:
        return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:4], "big")
    return int(match[1]) + int(match[2] or match[3] or 0)


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
