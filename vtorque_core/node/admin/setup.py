"""Prepare a node (directories, site secret, guest network), or undo that. As root.

Idempotent; each step reports its changes.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from vtorque_core.base import hypervisor, kvm, safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.node.admin import setup_commands
from vtorque_core.node.start import directories
from vtorque_core.node.start.spare import PREFIX
from vtorque_core.plan.guest_network import of_site
from vtorque_core.plan.placement import node_hardware
from vtorque_core.records import reading
from vtorque_core.resources import netfilter
from vtorque_core.site.config import Site
from vtorque_core.site.schema import ExtraNetwork, Network

Say = Callable[[str], None]
_MADE = "https://vtorque.org/xmlns/network/1"  # marks libvirt networks that vTorque created
_LEAST_SECRET = 32  # bytes; a job's start requires this too

# libvirt writes guests' MACs here, but creates the directory only with its first dnsmasq, which
# vTorque's networks do not use (libvirt 9.0, src/network/bridge_driver.c).
_MACS = Path("/var/lib/libvirt/dnsmasq")


def install(site: Site, say: Say, *, secret: bytes | None = None, dry_run: bool = False) -> None:
    """Prepare this node for guests. ``secret`` is the site secret of the other nodes, if any.

    Raises HostFault if jobs use another secret.
    """
    steps: list[tuple[str, Callable[[], None]]] = []
    for directory, mode in directories.wanted(site):
        if not directories.is_right(directory, mode):
            make = functools.partial(directories.make, directory, mode)
            steps.append((f"make {directory} root's, mode {mode:o}", make))
    place = site.paths.secret
    if secret is not None and not (place.exists() and place.read_bytes() == secret):
        steps.append((f"write {place}, as on the other nodes", lambda: _take_secret(site, secret)))
    elif not place.exists():
        steps.append((f"create {place}", lambda: _take_secret(site, os.urandom(64))))
    networks = libvirt_networks(site)
    for network in networks:
        if not hypervisor.network_active(site.node.libvirt_uri, network.source):
            start = functools.partial(_start_network, site, network)
            steps.append((f"start network {network.source}", start))
    if networks and not _MACS.is_dir():
        steps.append((f"make {_MACS}", lambda: directories.make(_MACS, 0o755)))
    if networks:
        steps.append(("keep guests from the node's own services", lambda: _guard(site)))
    steps.append(("look for KVM (once per boot)", lambda: _probe(site)))
    steps.append(("let libvirt look at QEMU", lambda: _probe_libvirt(site, say)))
    for text, action in steps:
        say(f"would {text}" if dry_run else text)
        if not dry_run:
            action()
    commands, modulefiles = site.paths.commands, site.paths.modulefiles
    setup_commands.install(commands, modulefiles, say, dry_run=dry_run)


def _probe(site: Site) -> None:
    """Probe KVM in advance: this takes 3 s on machines where KVM opens but does not work."""
    kvm.choose("auto", site.paths.run, site.node.qemu_user)


def _probe_libvirt(site: Site, say: Say) -> None:
    try:
        node_hardware.topology(site.node.libvirt_uri)
    except HostFault as error:
        say(f"{error}: the first job on this node will start 2 s later")


def _guard(site: Site) -> None:
    for network in libvirt_networks(site):
        if guard := netfilter.node_guard(network, site.node.libvirt_uri):
            netfilter.load(guard)


def require_idle(site: Site, *, spares: bool = True) -> None:
    """Raise HostFault if a job holds resources on this node, or with ``spares`` a warm guest."""
    names = [path.name for path in reading.journals(site.paths)]
    held = [name for name in names if spares or not name.startswith(PREFIX)]
    if held:
        raise HostFault(
            f"{len(held)} jobs or waiting guests still hold something on this node (see vmgr ps "
            "--placement): let them end, or run vtorque reap"
        )


def uninstall(site: Site, config: Path, say: Say, *, purge: bool = False) -> None:
    """Undo :func:`install`; ``purge`` also removes images, secret and config."""
    uri = site.node.libvirt_uri
    for network in libvirt_networks(site):
        made = _MADE in (hypervisor.network_xml(uri, network.source) or "")
        if network is site.network or made:  # other networks are the site's
            hypervisor.remove_network(uri, network.source)
            say(f"removed network {network.source}")
        netfilter.unguard(network.source)
    setup_commands.uninstall(site.paths.commands, site.paths.modulefiles, say)
    shutil.rmtree(site.paths.run, ignore_errors=True)
    say(f"removed {site.paths.run}")
    if purge:
        shutil.rmtree(site.paths.state, ignore_errors=True)
        config.unlink(missing_ok=True)
        say(f"removed {site.paths.state} and {config}")


def _take_secret(site: Site, secret: bytes) -> None:
    if len(secret) < _LEAST_SECRET:
        raise HostFault(
            f"a site secret of {len(secret)} bytes came in; {_LEAST_SECRET} is the least"
        )
    if site.paths.secret.exists():
        require_idle(site)
    safefs.replace(str(site.paths.secret), secret, mode=0o600)


def libvirt_networks(site: Site) -> list[Network | ExtraNetwork]:
    wanted: dict[str, Network | ExtraNetwork] = {}
    for network in of_site(site).values():
        if network.kind == "network":
            wanted.setdefault(network.source, network)
    return list(wanted.values())


def _start_network(site: Site, network: Network | ExtraNetwork) -> None:
    keep = network is not site.network
    hypervisor.start_network(site.node.libvirt_uri, network_xml(network), keep=keep)


def network_xml(network: Network | ExtraNetwork) -> str:
    """Return the libvirt XML of a guest network, without DHCP and DNS.

    ``[network]`` and networks with a gateway use NAT. Others connect only the node's guests.
    Format: https://libvirt.org/formatnetwork.html.
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
