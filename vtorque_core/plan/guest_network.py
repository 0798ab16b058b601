"""Assign guests' addresses by the site's config, without communication between nodes."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.guest_plan import Address, GuestPlan
from vtorque_core.api.libvirt_domain import Interface
from vtorque_core.base import names
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.base.run_tool import run_tool
from vtorque_core.config.network_config import assigns
from vtorque_core.config.schema import ExtraNetwork, Network

if TYPE_CHECKING:
    from vtorque_core.api.batch_system import BatchJob
    from vtorque_core.config.site_config import Site

POOL = "address"
"""Ledger pool of addresses in ``[network]``; ``address-<name>`` for ``[networks.<name>]``."""

AnyNetwork = Network | ExtraNetwork

# Addresses in QEMU's user network, which has only one guest: qemu-options, "-netdev user".
_OF_QEMU: dict[str, Any] = {"ip": "10.0.2.15", "gateway": "10.0.2.2", "dns": ("10.0.2.3",)}
# Metric of a second default route: larger than that of the first (ip-route(8); DHCP clients use
# 100 to 1024).
_METRIC = 2000


def all_networks(site: Site) -> dict[str, AnyNetwork]:
    """Return the networks of every guest in NIC order; ``[network]`` has an empty name."""
    if site.network.kind == "none":
        return {}
    networks: dict[str, AnyNetwork] = {"": site.network}
    return networks | dict(site.networks)


def pool(name: str) -> str:
    return f"{POOL}-{name}" if name else POOL


def table(name: str) -> str:
    return f"[networks.{name}]" if name else "[network]"


def claims(site: Site, job: BatchJob, guests: int, index: int) -> Iterator[PoolClaim]:
    for name, network in all_networks(site).items():
        wanted = claim(network, job, guests, index, name)
        if wanted is not None:
            yield wanted


def keep_addresses(
    site: Site, job: BatchJob, guest: GuestPlan, leased: Iterable[tuple[str, str]]
) -> Iterator[PoolClaim]:
    """Yield claims for the addresses that a restored guest keeps."""
    had = dict(leased)
    now = {each.pool: each for each in claims(site, job, guest.guests_per_node, guest.index)}
    for name in {**now, **had}:
        both = name in had and name in now
        if not both or not _can_assign(site, now[name], had[name]):
            raise Refused(
                f"the checkpointed guest has the address {had.get(name, 'none')} "
                f"({name}), which this site no longer assigns to guests"
            )
        yield PoolClaim(name, (had[name],))


def _can_assign(site: Site, claimed: PoolClaim, item: str) -> bool:
    network = next(each for name, each in all_networks(site).items() if pool(name) == claimed.pool)
    if network.kind == "none" or network.addressing != "static":
        return item in claimed.items
    subnet = ipaddress.IPv4Network(network.subnet)
    number = int(ipaddress.IPv4Address(item)) - int(subnet.network_address)
    return network.first <= number < subnet.num_addresses - 1


def assign_addresses(
    site: Site, job: BatchJob, site_secret: bytes, guests: Sequence[GuestPlan]
) -> Iterator[GuestPlan]:
    """Yield the placed guests with their addresses and the addresses of the job's other guests."""
    named = peers(site, job, guests), aliases(site, job, guests)
    bare = tuple(replace(node, address=node_address(node.name)) for node in job.bare)
    for guest in guests:
        own = tuple(addresses(site, site_secret, guest))
        yield replace(guest, addresses=own, peers=named[0], aliases=named[1], bare=bare)


def addresses(site: Site, site_secret: bytes, guest: GuestPlan) -> Iterator[Address]:
    for number, (name, network) in enumerate(all_networks(site).items()):
        lease = guest.leased_items(pool(name))
        mac = names.guest_mac(site_secret, guest.name, number, site.network.mac_prefix)
        yield address(network, mac, lease[0] if lease else None, name)


def interfaces(site: Site, guest: GuestPlan) -> Iterator[Interface]:
    networks = all_networks(site)
    for number, nic in enumerate(guest.addresses):
        network = networks[nic.network]
        assert network.kind != "none"  # noqa: S101 - all_networks has no such network
        yield Interface(
            f"nic{number}", kind=network.kind, source=network.source, mac=nic.mac, ip=nic.ip,
            filtered=nic.filtered, ipv6=network.ipv6,
        )  # fmt: skip


def peers(
    site: Site, job: BatchJob, guests: Sequence[GuestPlan], name: str = ""
) -> tuple[tuple[str, str], ...]:
    """Return (hostname, ip) of the job's guests in one network, by rank.

    If the site assigns no addresses, a single-node job has no entries, and every ``ip`` of a
    multi-node job is empty.
    """
    network = all_networks(site).get(name)
    if network is None:
        return ()
    if len(job.nodes) == 1:
        leases = [guest.leased_items(pool(name)) for guest in guests]
        return tuple((g.hostname, a[0]) for g, a in zip(guests, leases, strict=True) if a)
    count = guests[0].guests_per_node
    found = tuple(
        (
            names.guest_hostname(node, index, count),
            address_of(network, job, node, count, index, name) if assigns(network) else "",
        )
        for node in job.nodes
        for index in range(count)
    )
    _require_distinct(found, network, name)
    return found


def _require_distinct(found: Sequence[tuple[str, str]], network: AnyNetwork, name: str) -> None:
    owner: dict[str, str] = {}
    for hostname, ip in found:
        other = owner.setdefault(ip, hostname) if ip else hostname
        if other != hostname:
            cause = (
                f"{table(name)} command {network.command} prints the same address for both"
                if network.addressing == "command"
                else f"node_number {network.node_number!r} finds the same number in both nodes' "
                f"names; set {table(name)} node_number, or addressing and command"
            )
            raise Refused(f"the guests {other} and {hostname} would both have {ip}: {cause}")


def aliases(
    site: Site, job: BatchJob, guests: Sequence[GuestPlan]
) -> tuple[tuple[str, str, str], ...]:
    """Return (``<hostname>-<network>``, hostname, ip) of all guests in each ``[networks.*]``."""
    return tuple(
        (f"{hostname}-{name}", hostname, ip)
        for name, network in all_networks(site).items()
        if name and assigns(network)
        for hostname, ip in peers(site, job, guests, name)
    )


def node_address(node: str) -> str:
    """Return a node's IPv4 address from the name service; empty if none or loopback.

    Can block for the resolver's timeout (resolv.conf(5)).
    """
    try:
        found = socket.gethostbyname(node)
    except (OSError, UnicodeError):
        return ""
    return "" if found.startswith("127.") else found


def node_number(node: str, pattern: str) -> int:
    """Return the number in a node's name, or 0 if ``pattern`` does not match."""
    match = re.search(pattern, node.split(".", maxsplit=1)[0])
    return int(match[1]) if match else 0


def claim(
    network: AnyNetwork, job: BatchJob, guests: int, index: int, name: str = ""
) -> PoolClaim | None:
    """Return the claim for a guest's address, or None if the site assigns no addresses.

    A single-node job gets the lowest free address of this node.
    """
    if not assigns(network):
        return None
    if len(job.nodes) == 1 and network.addressing == "static":
        return PoolClaim(pool(name), items=_candidates(network, job.node, name))
    fixed = address_of(network, job, job.node, guests, index, name)
    return PoolClaim(pool(name), items=(fixed,))


def address_of(
    network: AnyNetwork, job: BatchJob, node: str, guests: int, index: int, name: str = ""
) -> str:
    """Compute a guest's address, equally on every node of the job.

    A static address (multi-node jobs only) is derived from the job id. It is in the upper half of
    the node's addresses, because single-node jobs use the lower half first.
    """
    if network.addressing == "command":
        return _from_command(network, node, guests, index, name)
    candidates = _candidates(network, node, name)
    upper = candidates[len(candidates) // 2 :]
    seats = len(upper) // guests
    if not seats:
        raise HostFault(
            f"{guests} guests per node of a multi-node job need {2 * guests} addresses per node; "
            f"{table(name)} per_node is {network.per_node}: increase it, or request fewer guests"
        )
    return upper[_number(job.id) % seats * guests + index]


def _number(job_id: str) -> int:
    """Return a job id's number plus its array index (25 for ``22[3].server``), or a hash."""
    match = re.match(r"([0-9]+)(?:\[([0-9]*)\]|_([0-9]+))?(?:\.|$)", job_id, re.ASCII)
    if match is None:
        return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:4], "big")
    return int(match[1]) + int(match[2] or match[3] or 0)


def address(network: AnyNetwork, mac: str, ip: str | None, name: str = "") -> Address:
    """Return a NIC's address and settings.

    Only ``[network]`` has name servers, search domains and a gateway by default.
    """
    extra = isinstance(network, ExtraNetwork)
    if network.kind == "user":
        return Address(mac=mac, filtered=False, **_OF_QEMU)
    mtu = (network.mtu or None) if isinstance(network, ExtraNetwork) else None
    filtered = network.filter and network.kind != "direct"
    if ip is None:
        dhcp = network.addressing == "dhcp"
        return Address(mac=mac, network=name, mtu=mtu, dhcp=dhcp, filtered=filtered)
    subnet = ipaddress.IPv4Network(network.subnet)
    gateway = network.gateway or (None if extra else str(subnet.network_address + 1))
    return Address(
        mac=mac,
        ip=ip,
        prefix=subnet.prefixlen,
        gateway=gateway,
        dns=tuple(network.dns) if isinstance(network, Network) else (),
        search=tuple(network.search) if isinstance(network, Network) else (),
        network=name,
        mtu=mtu,
        metric=_METRIC if extra and gateway else None,
        filtered=filtered,
    )


def _candidates(network: AnyNetwork, node: str, name: str) -> tuple[str, ...]:
    subnet = ipaddress.IPv4Network(network.subnet)
    number = node_number(node, network.node_number)
    start = network.first + number * network.per_node
    if start + network.per_node >= subnet.num_addresses:
        raise HostFault(
            f"node {node} has number {number}: its {network.per_node} guest addresses lie outside "
            f"{network.subnet}; enlarge {table(name)} subnet or lower per_node"
        )
    first = subnet.network_address + start
    return tuple(str(first + i) for i in range(network.per_node))


def _from_command(network: AnyNetwork, node: str, guests: int, index: int, name: str) -> str:
    answer = run_tool(network.command, node, str(guests), str(index), timeout=10).strip()
    try:
        return str(ipaddress.IPv4Address(answer))
    except ValueError:
        raise HostFault(
            f"{table(name)} command {network.command} {node} {guests} {index}: the answer "
            f"{answer[:80]!r} is not an IPv4 address"
        ) from None
