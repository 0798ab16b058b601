"""Tables of the site config, with default, unit and meaning of every key.

Every ``vsub`` imports this module, so it imports little. ``vtorque config example`` prints the
texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vtorque_core.api import log_levels
from vtorque_core.base.names import Paths, absolute
from vtorque_core.base.settings import setting

SHARE_PLACEHOLDERS = ("user", "home", "uid", "job")


def _at_least(least: int) -> Callable[[int], None]:
    def check(value: int) -> None:
        if value < least:
            raise ValueError(f"is {value}: the least is {least}")

    return check


def _subnet(value: str) -> None:
    import ipaddress  # noqa: PLC0415 (6 ms, only where a site sets the subnet)

    try:
        ipaddress.IPv4Network(value)
    except ValueError as error:
        raise ValueError(f"is not a subnet: {error}") from None


def _address(value: str) -> None:
    import ipaddress  # noqa: PLC0415

    try:
        ipaddress.ip_address(value)
    except ValueError as error:
        raise ValueError(f"is not an address: {error}") from None


def _addresses(values: tuple[str, ...]) -> None:
    for value in values:
        _address(value)


def _domains(values: tuple[str, ...]) -> None:
    # RFC 1123, 2.1; resolv.conf(5): before glibc 2.26 six of them with 256 characters.
    label = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    for value in values:
        if not re.fullmatch(rf"{label}(\.{label})*", value, re.ASCII):
            raise ValueError(f"has {value!r}, which is no domain: write one like hpc.example.org")
    if len(values) > 6 or len(" ".join(values)) > 256:
        raise ValueError(f"has {len(values)} domains: at most 6, of 256 characters together")


def _mac_prefix(value: str) -> None:
    # IEEE 802c: of the first byte bit 1 is set (locally administered), bit 0 is not (unicast).
    if not re.fullmatch(r"[0-9a-f][26ae](:[0-9a-f]{2}){2}", value, re.ASCII):
        raise ValueError(
            f"is {value!r}: write three bytes in small letters, the second digit 2, 6, a or e "
            "(locally administered, unicast), like 52:54:00"
        )


def _ports(values: tuple[str, ...]) -> None:
    for value in values:
        match = re.fullmatch(r"(?:tcp|udp)/([0-9]{1,5})", value, re.ASCII)
        if match is None or not 0 < int(match[1]) < 1 << 16:
            raise ValueError(f"has {value!r}: write tcp/PORT or udp/PORT, a port is 1 to 65535")


def _node_number(value: str) -> None:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"has {groups} groups in parentheses: one, around the number, is needed")


def _mtu(value: int) -> None:
    # RFC 791, 3.1 (the least that every network carries); ip-link(8): the kernel's greatest.
    if value and not 68 <= value <= 65535:
        raise ValueError(f"is {value}: write 68 to 65535, or 0 for the network's own")


def _share_source(value: str) -> None:
    unknown = set(re.findall(r"\{([^{}]*)\}", value)) - set(SHARE_PLACEHOLDERS)
    if unknown or re.sub(r"\{[a-z]+\}", "", value).count("{") or not value.isprintable():
        known = " ".join(f"{{{name}}}" for name in SHARE_PLACEHOLDERS)
        raise ValueError(f"has an unknown place holder: there are {known}")
    if ".." in value.split("/"):
        raise ValueError("has '..' in it: write the path without")


def _share_target(value: str) -> None:
    _share_source(value)
    if not value.startswith("/"):
        raise ValueError(f"is {value!r}: write an absolute path in the guest")


@dataclass(frozen=True)
class Batch:
    """``[batch]``: what queues the jobs."""

    system: str = setting("local", "batch system: local, or the name that a plugin brings")
    vm_by_default: bool = setting(True, "a job without -vm runs in a VM; false: on bare metal")
    boot_walltime: float = setting(
        0.0, "added to the walltime that a VM job asks for, since guests start within it", "s"
    )
    kill_leftovers: bool = setting(
        False, "after a VM job that had the whole node, kill what its user has left running"
    )


@dataclass(frozen=True)
class Node:
    """``[node]``: how guests run on a node."""

    name: str = setting("", "this node's name in the batch system; empty: the host name")
    libvirt_uri: str = setting("qemu:///system", "libvirt connection")
    accel: Literal["auto", "kvm", "tcg"] = setting(
        "auto", "auto: KVM where a probe guest runs in it, else emulation; kvm: or fail; tcg"
    )
    start_timeout: float = setting(300.0, "from the prologue's start to all guests ready", "s")
    teardown_timeout: float = setting(60.0, "all of a job's teardown", "s")
    release_timeout: float = setting(30.0, "the release of one resource", "s")
    grace: float = setting(10.0, "from TERM to KILL for the job's script", "s")
    qemu_user: str = setting(
        "libvirt-qemu", "QEMU's group, and its user where guests have no uid of their own"
    )
    guest_uids: int = setting(
        2146900000,
        "each guest's QEMU has a uid of its own, one of 1000 from this one on; 0: qemu_user's",
        None,
        _at_least(0),
    )
    qemu_overhead: int = setting(
        256, "memory of QEMU itself, per guest, beside the guest's RAM", "MiB"
    )
    host_reserve_cores: int = setting(0, "host CPUs that guests never get", None, _at_least(0))
    host_reserve_ram: int = setting(0, "host memory that guests never get", "MiB")
    numa: Literal["preferred", "strict", "none"] = setting(
        "preferred", "memory on the NUMA node of a guest's CPUs; strict: or no guest"
    )
    exclusive: bool = setting(
        True,
        "a job whose CPU ids are not known waits for other users', unless the batch system keeps "
        "these from its nodes",
    )
    subordinate_ids: int = setting(
        2147000000,
        "root in a user's guests is this plus their uid to the shares; 0: as /etc/subuid says",
        None,
        _at_least(0),
    )
    uefi: Path = setting(
        Path("/usr/share/OVMF/OVMF_CODE_4M.fd"),
        "UEFI firmware of x86 guests whose image has the label firmware=efi",
        None,
        absolute,
    )
    allow_qemu_args: bool = setting(False, "let plugins add raw QEMU arguments")


@dataclass(frozen=True)
class Images:
    """``[images]``: where images come from. The default image is ``[options.img] default``."""

    pool: Path = setting(
        Path("/var/lib/vtorque/images"), "image pool, writable by root alone", None, absolute
    )
    cache: str = setting(
        "",
        "this node's copies (vmgr images sync), used before the pool",
        None,
        absolute,
    )
    keep: float = setting(
        604800.0,
        "what no name has any more stays as long, since jobs of other nodes that share the pool "
        "cannot be seen: the longest walltime; 0: no other node uses the pool",
        "s",
    )
    signers: str = setting(
        "",
        "allowed signers file (ssh-keygen): nodes start guests from images that one of them has "
        "signed only; empty: not asked",
        None,
        absolute,
    )
    max_disk: int = setting(2 << 20, "largest disk that vmgr images add takes", "MiB")
    ramdisk: Literal["overlay", "copy"] = setting(
        "overlay",
        "fs_type=ramdisk: overlay: in memory is what the guest writes; copy: all of its disk",
    )


@dataclass(frozen=True)
class KeptTable:
    """``[kept]``: what stays of ended jobs on a node, for ``vmgr report`` and ``vmgr logs``."""

    days: float = setting(30.0, "older ones are removed", "d")
    mib: int = setting(1024, "beyond that the oldest are removed", "MiB", _at_least(0))


@dataclass(frozen=True)
class LogTable:
    """``[log]``: what is written into every job's log (``vmgr logs``)."""

    level: str = setting(
        "INFO",
        "TRACE, DEBUG, INFO, WARN, ERROR or QUIET; by phase or plugin: ALL:WARN,boot:DEBUG",
        None,
        log_levels.parse,
    )


@dataclass(frozen=True)
class Network:
    """``[network]``: the guests' first network interface."""

    kind: Literal["network", "bridge", "direct", "user", "none"] = setting(
        "network",
        "libvirt network, host bridge, macvtap on a host interface, none, or user: QEMU's own, "
        "which needs no root; guests reach out by it, and not each other",
    )
    source: str = setting("vtorque", "name of that network, bridge or interface")
    addressing: Literal["static", "dhcp", "command"] = setting(
        "static",
        "static: from node and slot; dhcp: ask the network; command: ask the site's program",
    )
    subnet: str = setting("10.86.0.0/16", "addresses of all guests of all nodes", None, _subnet)
    gateway: str = setting("", "default route; empty: the subnet's first host", None, _address)
    dns: tuple[str, ...] = setting((), "name servers' addresses", None, _addresses)
    search: tuple[str, ...] = setting(
        (),
        "domains in which names are looked up, with addressing static or command",
        None,
        _domains,
    )
    ntp: tuple[str, ...] = setting((), "time servers")
    first: int = setting(
        16, "number of the first guest's address in the subnet", None, _at_least(1)
    )
    per_node: int = setting(64, "addresses set aside for each node", None, _at_least(1))
    node_number: str = setting(
        "([0-9]+)$",
        "regular expression whose group is the node's number in its name; no match: 0",
        None,
        _node_number,
    )
    command: str = setting(
        "", "addressing=command: program called with node, guests per node, index"
    )
    node_ports: tuple[str, ...] = setting(
        (), "ports of the node itself that guests reach, such as tcp/2049", None, _ports
    )
    mac_prefix: str = setting(
        "52:54:00", "first half of the MACs of all guests' interfaces", None, _mac_prefix
    )
    max_connections: int = setting(
        8192,
        "the most connections that the node tracks for one guest's interface (nf_conntrack), in "
        "each direction; packets that would open more are dropped",
        None,
        _at_least(64),
    )
    ipv6: bool = setting(
        False,
        "let guests send IPv6, but never as a router; with addressing dhcp or none only, where "
        "vTorque does not assign the address",
    )
    filter: bool = setting(True, "drop what a guest sends with another's MAC or IP address")
    opt_in_unfiltered: bool = setting(False, "accept guests that can forge addresses")


@dataclass(frozen=True)
class ExtraNetwork:
    """``[networks.<name>]``: one more network interface of every guest, after ``[network]``'s."""

    source: str = setting(doc="name of the libvirt network, bridge or host interface")
    kind: Literal["bridge", "direct", "network"] = setting(
        "bridge", "host bridge, macvtap on a host interface, or libvirt network"
    )
    addressing: Literal["static", "dhcp", "command", "none"] = setting(
        "static", "as in [network]; none: the interface is up and has no address"
    )
    subnet: str = setting(
        "", "addresses of all guests of all nodes; needed to assign any", None, _subnet
    )
    gateway: str = setting(
        "", "a second default route, used where [network] has none", None, _address
    )
    first: int = setting(
        16, "number of the first guest's address in the subnet", None, _at_least(1)
    )
    per_node: int = setting(64, "addresses set aside for each node", None, _at_least(1))
    node_number: str = setting("", "as in [network]; empty: what [network] has", None, _node_number)
    command: str = setting(
        "", "addressing=command: program called with node, guests per node, index"
    )
    node_ports: tuple[str, ...] = setting(
        (), "ports of the node itself that guests reach by a libvirt network", None, _ports
    )
    mtu: int = setting(0, "largest packet in bytes; 0: the network's own", None, _mtu)
    ipv6: bool = setting(False, "as in [network]")
    filter: bool = setting(True, "drop what a guest sends with another's MAC or IP address")
    opt_in_unfiltered: bool = setting(False, "accept guests that can forge addresses")


@dataclass(frozen=True)
class ShareTable:
    """``[shares.<name>]``: a host directory in every guest. Without any: the user's home."""

    source: str = setting(
        doc="host directory, or server:/export; {user} {home} {uid} {job} are replaced",
        check=_share_source,
    )
    target: str = setting(doc="where guests mount it; same place holders", check=_share_target)
    kind: Literal["virtiofs", "nfs"] = setting("virtiofs", "nfs: the guest mounts it by itself")
    readonly: bool = setting(False, "no guest can write it")
    user_owned: bool = setting(False, "it is the user's own: root does not look into it")


@dataclass(frozen=True)
class PluginsTable:
    """``[plugins]``: which of the installed plugins new jobs use."""

    enable: tuple[str, ...] | None = setting(None, "exactly these; absent: all that are installed")
    disable: tuple[str, ...] = setting((), "not these; running jobs are still torn down with them")


EXAMPLE_NETWORKS = {"hpc": ExtraNetwork("br-hpc", subnet="10.186.0.0/16")}
DEFAULT_SHARES = {"home": ShareTable("{home}", "/home/{user}", user_owned=True)}
TABLES: dict[str, type[Any]] = {
    "batch": Batch,
    "paths": Paths,
    "node": Node,
    "images": Images,
    "kept": KeptTable,
    "log": LogTable,
    "network": Network,
    "plugins": PluginsTable,
}
OTHER_TABLES = ("networks", "shares", "options", "limits", "plugin")
LIMIT_KEYS = {
    "default": "value without -vm KEY=",
    "min": "least value",
    "max": "greatest value",
    "allow": "only these values or globs (* ? [abc])",
    "deny": "none of these values or globs",
}
