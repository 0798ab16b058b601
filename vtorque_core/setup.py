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

from vtorque_core import accel, hypervisor
from vtorque_core.config import Site
from vtorque_core.config_schema import Network
from vtorque_core.errors import HostFault
from vtorque_core.resources import netfilter

Say = Callable[[str], None]

# libvirt writes the MACs of every network's guests here, but makes it only for its first dnsmasq,
# which our network does without (libvirt 9.0, src/network/bridge_driver.c).
_MACS = Path("/var/lib/libvirt/dnsmasq")


def install(site: Site, config: Path, batch: str, say: Say, *, dry_run: bool = False) -> None:
    """Make this node ready for jobs of the batch system ``batch``.

    Raises HostFault if libvirt does not answer or a path is not root's.
    """
    steps: list[tuple[str, Callable[[], None]]] = []
    if not config.exists():
        steps.append((f"write {config}", lambda: _write_config(config, batch)))
    for directory, mode in _directories(site):
        if not _is_right(directory, mode):
            make = functools.partial(_mkdir, directory, mode)
            steps.append((f"make {directory} root's, mode {mode:o}", make))
    if not site.paths.secret.exists():
        steps.append((f"create {site.paths.secret}", lambda: _write_secret(site.paths.secret)))
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


def uninstall(site: Site, config: Path, say: Say, *, purge: bool = False) -> None:
    """Take back what :func:`install` made; ``purge`` also removes images, secret and config.

    Raises HostFault while a job still holds something here.
    """
    journals = sorted(site.paths.journal.glob("*.jsonl"))
    if journals:
        raise HostFault(
            f"{len(journals)} jobs still hold something on this node (see vmgr ps): "
            "let them end, or run vtorque reap"
        )
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


def _write_config(config: Path, batch: str) -> None:
    config.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    config.write_text(
        "# vTorque site config. All keys with their defaults: vtorque config example\n"
        f'[batch]\nsystem = "{batch}"\n'
    )
    config.chmod(0o644)


def _write_secret(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(64))


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
