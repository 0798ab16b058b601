"""Validate ``[network]`` and all ``[networks.<name>]`` tables together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from vtorque_core.config.schema import ExtraNetwork, Network

Problem = tuple[str, str, str]
"""A problem: table, key (or empty text), message."""

# Part of names in /etc/hosts and of interface aliases. Not a number: <host>-0 is a guest's name.
_NAME = re.compile(r"[a-z][a-z0-9]{0,14}", re.ASCII)


def network_problems(
    first: Network, others: Mapping[str, ExtraNetwork], *, personal: bool = False
) -> Iterator[Problem]:
    """Yield the problems of the guests' networks. ``personal``: a site without root."""
    if personal:
        needs = "needs root, but your personal site runs without root: use user or none"
        yield from ((f"networks.{name}", "", needs) for name in others)
        if first.kind not in {"user", "none"}:
            yield "network", "kind", f'"{first.kind}" {needs}'
    elif first.kind == "user":
        message = "can be user only without root: guests would reach the node's services"
        yield "network", "kind", message
    tables: dict[str, Network | ExtraNetwork] = {"network": first}
    tables |= {f"networks.{name}": network for name, network in others.items()}
    for table, network in tables.items():
        yield from _problems_of_one(table, network)
    for name, network in others.items():
        yield from _problems_of_extra(f"networks.{name}", name, network)
    if others and first.kind == "none":
        message = "must not be none with [networks]: guests' names need the first interface"
        yield "network", "kind", message
    yield from _overlaps(tables)


def _problems_of_one(table: str, network: Network | ExtraNetwork) -> Iterator[Problem]:
    unfiltered = not network.filter or network.kind == "direct"
    if network.kind not in {"none", "user"} and unfiltered and not network.opt_in_unfiltered:
        message = "lets guests forge addresses: set opt_in_unfiltered = true to accept that"
        yield table, "kind" if network.filter else "filter", message
    if network.addressing == "command" and not network.command.startswith("/"):
        yield table, "addressing", "needs command = an absolute path of a program"
    if network.node_ports and network.kind != "network":
        yield table, "node_ports", 'has an effect only with kind = "network"'
    if network.ipv6 and assigns(network):
        yield table, "ipv6", 'has an effect only with addressing = "dhcp" or "none"'


def _problems_of_extra(table: str, name: str, network: ExtraNetwork) -> Iterator[Problem]:
    if not _NAME.fullmatch(name):
        message = "must have a name of 1 to 15 lower-case letters and digits, first a letter"
        yield table, "", message
    if not network.source or not network.source.isprintable():
        yield table, "source", "must name a libvirt network, bridge or host interface"
    if assigns(network) and not network.subnet:
        yield table, "subnet", f'must be set with addressing = "{network.addressing}"'


def assigns(network: Network | ExtraNetwork) -> bool:
    return network.kind not in {"none", "user"} and network.addressing in {"static", "command"}


def _overlaps(tables: Mapping[str, Network | ExtraNetwork]) -> Iterator[Problem]:
    planned = [(name, n.subnet) for name, n in tables.items() if assigns(n) and n.subnet]
    if len(planned) < 2:
        return
    import ipaddress  # noqa: PLC0415 (6 ms, only for a site with several networks)

    subnets = [(name, ipaddress.IPv4Network(subnet)) for name, subnet in planned]
    for (one, first), (other, second) in itertools.combinations(subnets, 2):
        if first.overlaps(second):
            message = f"{second} overlaps {first} of [{one}]: two interfaces would share addresses"
            yield other, "subnet", message
