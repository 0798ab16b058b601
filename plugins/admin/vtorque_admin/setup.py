"""Prepare a node (directories, site secret, guest network), or undo the preparation. As root.

Idempotent; each step reports its changes.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from vtorque_admin import setup_commands
from vtorque_admin.networks import is_active, libvirt_networks, remove, start
from vtorque_core.api import HostFault, replace_file
from vtorque_core.live.node_setup import SPARE_PREFIX, directories, kvm, netfilter, node_hardware
from vtorque_core.live.site_config import Site

Say = Callable[[str], None]
_LEAST_SECRET = 32  # bytes; a job's start requires this too

# libvirt writes guests' MACs here, but creates the directory only with its first dnsmasq, which
# vTorque's networks do not use (libvirt 9.0, src/network/bridge_driver.c).
_MACS = Path("/var/lib/libvirt/dnsmasq")


def install(site: Site, say: Say, *, secret: bytes | None = None, dry_run: bool = False) -> None:
    """Prepare this node for guests. ``secret`` is the site secret of the other nodes, if any.

    Raises HostFault if ``secret`` is too short, or if jobs use a different secret.
    """
    steps: list[tuple[str, Callable[[], None]]] = []
    for directory, mode in directories.node_directories(site):
        if not directories.is_correct(directory, mode):
            make = functools.partial(directories.make, directory, mode)
            steps.append((f"make {directory}, owned by root, mode {mode:o}", make))
    place = site.paths.secret
    if secret is not None and not (place.exists() and place.read_bytes() == secret):
        steps.append((f"write {place}, as on the other nodes", lambda: _take_secret(site, secret)))
    elif not place.exists():
        steps.append((f"create {place}", lambda: _take_secret(site, os.urandom(64))))
    networks = libvirt_networks(site)
    for network in networks:
        if not is_active(site, network.source):
            begin = functools.partial(start, site, network)
            steps.append((f"start network {network.source}", begin))
    if networks and not _MACS.is_dir():
        steps.append((f"make {_MACS}", lambda: directories.make(_MACS, 0o755)))
    if networks:
        steps.append(("keep guests from the node's own services", lambda: _guard(site)))
    steps.append(("test KVM (once per boot)", lambda: _probe(site)))
    steps.append(("let libvirt query QEMU's capabilities", lambda: _probe_libvirt(site, say)))
    for text, action in steps:
        say(f"would {text}" if dry_run else text)
        if not dry_run:
            action()
    commands, modulefiles = site.paths.commands, site.paths.modulefiles
    setup_commands.install(commands, modulefiles, say, dry_run=dry_run)


def _probe(site: Site) -> None:
    """Probe KVM and cache the result, so that no job waits for the probe (up to 3 s)."""
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
    """Raise HostFault if a job holds resources on this node.

    With ``spares``, a warm guest counts as a job.
    """
    names = [path.name for path in site.paths.journal.glob("*.jsonl")]
    held = [name for name in names if spares or not name.startswith(SPARE_PREFIX)]
    if held:
        raise HostFault(
            f"{len(held)} jobs or warm guests still hold resources on this node (see vmgr ps "
            "--placement): let them end, or run vtorque reap"
        )


def uninstall(site: Site, config: Path, say: Say, *, purge: bool = False) -> None:
    """Undo :func:`install`; ``purge`` also removes images, site secret and site config."""
    for network in libvirt_networks(site):
        if remove(site, network):
            say(f"removed network {network.source}")
        netfilter.remove_guard(network.source)
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
            f"the given site secret has {len(secret)} bytes, and the minimum is {_LEAST_SECRET}"
        )
    if site.paths.secret.exists():
        require_idle(site)
    replace_file(str(site.paths.secret), secret, mode=0o600)
