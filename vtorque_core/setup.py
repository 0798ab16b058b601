"""Prepare a node: directories, site secret, guest network; and take it all away again.

Runs as root from ``vtorque setup install|uninstall``; idempotent, each step says what it did.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import quoteattr

from vtorque_core import accel, hypervisor, safefs
from vtorque_core.config import Site
from vtorque_core.config_schema import Network
from vtorque_core.errors import HostFault
from vtorque_core.resources import netfilter
from vtorque_core.trust import require_secret

Say = Callable[[str], None]
_LEAST_SECRET = 32  # bytes, as a job's start demands

# libvirt writes the MACs of every network's guests here, but makes it only for its first dnsmasq,
# which our network does without (libvirt 9.0, src/network/bridge_driver.c).
_MACS = Path("/var/lib/libvirt/dnsmasq")


def install(site: Site, say: Say, *, secret: bytes | None = None, dry_run: bool = False) -> None:
    """Make this node ready for guests; ``secret``: the site's, from the host that sets up all.

    Raises HostFault if libvirt does not answer, a path is not root's, or jobs run with another
    secret.
    """
    steps: list[tuple[str, Callable[[], None]]] = []
    for directory, mode in _directories(site):
        if not _is_right(directory, mode):
            make = functools.partial(_mkdir, directory, mode)
            steps.append((f"make {directory} root's, mode {mode:o}", make))
    place = site.paths.secret
    if secret is not None and not (place.exists() and place.read_bytes() == secret):
        steps.append((f"write {place}, as on the other nodes", lambda: _take_secret(site, secret)))
    elif not place.exists():
        steps.append((f"create {place}", lambda: _write_secret(place, secrets.token_bytes(64))))
    if _wants_network(site.network) and not hypervisor.network_active(
        site.node.libvirt_uri, site.network.source
    ):
        steps.append((f"start network {site.network.source}", lambda: _start_network(site)))
    if _wants_network(site.network) and not _MACS.is_dir():
        steps.append((f"make {_MACS}", lambda: _mkdir(_MACS, 0o755)))
    if _wants_network(site.network):
        steps.append(("keep guests from the node's own services", lambda: _guard(site)))
    steps.append(("look for KVM (once per boot)", lambda: _probe(site)))
    for text, action in steps:
        say(f"would {text}" if dry_run else text)
        if not dry_run:
            action()


def _probe(site: Site) -> None:
    """Let the first job not wait for the probe: 3 s where KVM opens but does not execute."""
    accel.choose("auto", site.paths.run, site.node.qemu_user)


def _guard(site: Site) -> None:
    netfilter.load(netfilter.node_guard(site.network, site.node.libvirt_uri))


def require_idle(site: Site) -> None:
    """Raise HostFault while a job still holds something here."""
    journals = sorted(site.paths.journal.glob("*.jsonl"))
    if journals:
        raise HostFault(
            f"{len(journals)} jobs still hold something on this node (see vmgr ps): "
            "let them end, or run vtorque reap"
        )


def uninstall(site: Site, config: Path, say: Say, *, purge: bool = False) -> None:
    """Take back what :func:`install` made; ``purge`` also removes images, secret and config."""
    if _wants_network(site.network):
        hypervisor.remove_network(site.node.libvirt_uri, site.network.source)
        netfilter.unguard(site.network.source)
        say(f"removed network {site.network.source}")
    shutil.rmtree(site.paths.run, ignore_errors=True)
    say(f"removed {site.paths.run}")
    if purge:
        shutil.rmtree(site.paths.state, ignore_errors=True)
        config.unlink(missing_ok=True)
        say(f"removed {site.paths.state} and {config}")


def _directories(site: Site) -> list[tuple[Path, int]]:
    paths = site.paths
    return [
        (paths.state, 0o755),
        (paths.state / "jobs", 0o711),
        (paths.journal, 0o700),
        (site.images.pool, 0o755),
        (paths.run, 0o755),
        (paths.run / "jobs", 0o711),
        (paths.run / "locks", 0o700),
        (paths.run / "proof", 0o755),
    ]


def runtime_directories(site: Site) -> None:
    """Create what a reboot has taken away (``/run`` is in memory). Called by every root hook.

    What others can write on disk (the image pool, say) is not mended here but refused later: it
    may have been changed by then, and an admin should look.
    """
    for directory, mode in _directories(site):
        in_memory = directory.is_relative_to(site.paths.run)
        if not os.path.lexists(directory) or (in_memory and not _is_right(directory, mode)):
            _mkdir(directory, mode)


def _is_right(directory: Path, mode: int) -> bool:
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return False
    return status.st_mode == stat.S_IFDIR | mode and status.st_uid == 0


def _mkdir(directory: Path, mode: int) -> None:
    """Make the directory, or mend it. Raises HostFault if something else is in its place."""
    directory.mkdir(parents=True, exist_ok=True)
    if directory.is_symlink() or not directory.is_dir():
        raise HostFault(f"{directory} is not a directory of vTorque's: move it away")
    os.chown(directory, 0, 0)
    directory.chmod(mode)


def site_secret(site: Site, say: Say) -> bytes:
    """Return the secret that all nodes of the site get; this host makes it if it has none."""
    place = site.paths.secret
    if not place.exists():
        say(f"create {place}")
        _mkdir(site.paths.state, 0o755)
        _write_secret(place, secrets.token_bytes(64))
    require_secret(place)
    return place.read_bytes()


def _take_secret(site: Site, secret: bytes) -> None:
    if len(secret) < _LEAST_SECRET:
        raise HostFault(
            f"a site secret of {len(secret)} bytes came in; {_LEAST_SECRET} is the least"
        )
    if site.paths.secret.exists():
        require_idle(site)
    _write_secret(site.paths.secret, secret)


def _write_secret(path: Path, secret: bytes) -> None:
    safefs.replace(str(path), secret, mode=0o600)


def _wants_network(network: Network) -> bool:
    return network.kind == "network"


def _start_network(site: Site) -> None:
    hypervisor.start_network(site.node.libvirt_uri, network_xml(site.network))


def network_xml(network: Network) -> str:
    """Return libvirt's XML of the guests' NAT network: no DHCP, no DNS server, no open port.

    See https://libvirt.org/formatnetwork.html.
    """
    subnet = ipaddress.IPv4Network(network.subnet)
    gateway = network.gateway or str(subnet.network_address + 1)
    return (
        f"<network><name>{_text(network.source)}</name><forward mode='nat'/>"
        f"<bridge name={quoteattr(network.source[:14] + '0')} stp='off' delay='0'/>"
        f"<dns enable='no'/><ip address='{gateway}' netmask='{subnet.netmask}'/></network>"
    )


def _text(value: str) -> str:
    return value.replace("&", "&amp;").replace("<", "&lt;")
