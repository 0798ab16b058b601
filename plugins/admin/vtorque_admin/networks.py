"""Define, start and remove the guests' libvirt networks. As root."""

from __future__ import annotations

import ipaddress
import re
from typing import Any
from xml.etree import ElementTree

from vtorque_core.live.libvirt import call, if_exists, network_xml
from vtorque_core.live.node_setup import AnyNetwork, ExtraNetwork, all_networks
from vtorque_core.live.site_config import Site

_MADE = "https://vtorque.org/xmlns/network/1"  # marks libvirt networks that vTorque created


def libvirt_networks(site: Site) -> list[AnyNetwork]:
    """Return the guests' networks that are libvirt networks, without duplicates."""
    wanted: dict[str, AnyNetwork] = {}
    for network in all_networks(site).values():
        if network.kind == "network":
            wanted.setdefault(network.source, network)
    return list(wanted.values())


def is_active(site: Site, name: str) -> bool:
    """Return True if libvirt has started this network."""
    return network_xml(site.node.libvirt_uri, name) is not None


def start(site: Site, network: AnyNetwork) -> None:
    """Define a network, set it to autostart, and start it unless it is active.

    For ``[networks.<name>]``, an existing definition in libvirt stays unchanged.
    """
    xml, keep = definition(network), network is not site.network

    def work(connection: Any) -> None:
        found = _find(connection, network.source) if keep else None
        if found is None:
            found = connection.networkDefineXML(_add_known_uuid(connection, xml))
        found.setAutostart(1)
        if not found.isActive():
            found.create()

    call(site.node.libvirt_uri, "start network", work)


def remove(site: Site, network: AnyNetwork) -> bool:
    """Stop and undefine a network, and return True.

    Return False, without a change, for a network of ``[networks]`` that vTorque did not create.
    """
    uri, name = site.node.libvirt_uri, network.source
    if network is not site.network and _MADE not in (network_xml(uri, name) or ""):
        return False

    def work(connection: Any) -> None:
        found = _find(connection, name)
        if found is None:
            return
        persistent = found.isPersistent()
        if found.isActive():
            found.destroy()
        if persistent:
            found.undefine()

    call(uri, f"remove network {name}", work)
    return True


def _find(connection: Any, name: str) -> Any | None:
    return if_exists(lambda: connection.networkLookupByName(name))


def _add_known_uuid(connection: Any, xml: str) -> str:
    root = ElementTree.fromstring(xml)  # noqa: S314 - from definition()
    known = _find(connection, root.findtext("name") or "")
    if known is None:
        return xml
    ElementTree.SubElement(root, "uuid").text = known.UUIDString()
    return ElementTree.tostring(root, encoding="unicode")


def definition(network: AnyNetwork) -> str:
    """Return the libvirt XML of a guest network, without DHCP and DNS.

    ``[network]`` and networks with a gateway use NAT. Other networks connect only this node's
    guests. Format: https://libvirt.org/formatnetwork.html.
    """
    extra = isinstance(network, ExtraNetwork)
    forward = "" if extra and not network.gateway else "<forward mode='nat'/>"
    size = network.mtu if isinstance(network, ExtraNetwork) else 0
    mtu = f"<mtu size='{size}'/>" if size else ""
    bridge = re.sub(r"[^A-Za-z0-9_.-]", "", network.source)[:14] + "0"  # IFNAMSIZ is 16
    address = ""
    if network.subnet:
        subnet = ipaddress.IPv4Network(network.subnet)
        first = network.gateway or str(subnet.network_address + 1)
        address = f"<ip address='{first}' netmask='{subnet.netmask}'/>"
    return (
        f"<network><name>{_text(network.source)}</name>"
        f"<metadata><vtorque:network xmlns:vtorque='{_MADE}'/></metadata>{forward}"
        f"<bridge name='{bridge}' stp='off' delay='0'/>{mtu}"
        f"<dns enable='no'/>{address}</network>"
    )


def _text(value: str) -> str:
    return value.replace("&", "&amp;").replace("<", "&lt;")
