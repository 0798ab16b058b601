"""Tables of the site config, and the texts that ``vtorque config example`` prints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vtorque_core.api import log_levels
from vtorque_core.base.names import Paths, absolute
from vtorque_core.base.safefs import name_errors
from vtorque_core.base.settings import setting
from vtorque_core.config.site_file import Node, at_least

SHARE_PLACEHOLDERS = ("user", "home", "uid", "job")


def _subnet(value: str) -> None:
    import ipaddress  # noqa: PLC0415 (6 ms, only where a site sets the subnet)

    with name_errors("is not a subnet", ValueError, fault=ValueError):
        ipaddress.IPv4Network(value)


def _address(value: str) -> None:
    import ipaddress  # noqa: PLC0415 - as above

    with name_errors("is not an address", ValueError, fault=ValueError):
        ipaddress.ip_address(value)


def _addresses(values: tuple[str, ...]) -> None:
    for value in values:
        _address(value)


def _domains(values: tuple[str, ...]) -> None:
    # RFC 1123, 2.1; resolv.conf(5): before glibc 2.26 six of them with 256 characters.
    label = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    for value in values:
        if not re.fullmatch(rf"{label}(\.{label})*", value, re.ASCII):
            raise ValueError(f"has {value!r}, which is not a domain such as hpc.example.org")
    if len(values) > 6 or len(" ".join(values)) > 256:
        raise ValueError(f"has {len(values)} domains: the limit is 6, with 256 characters in total")


def _mac_prefix(value: str) -> None:
    # IEEE 802c: of the first byte bit 1 is set (locally administered), bit 0 is not (unicast).
    if not re.fullmatch(r"[0-9a-f][26ae](:[0-9a-f]{2}){2}", value, re.ASCII):
        raise ValueError(
            f"is {value!r}: write three bytes in lower case, with 2, 6, a or e as second digit "
            "(locally administered, unicast), such as 52:54:00"
        )


def _ports(values: tuple[str, ...]) -> None:
    for value in values:
        match = re.fullmatch(r"(?:tcp|udp)/([0-9]{1,5})", value, re.ASCII)
        if match is None or not 0 < int(match[1]) < 1 << 16:
            raise ValueError(f"has {value!r}: write tcp/PORT or udp/PORT, a port is 1 to 65535")


def _node_number(value: str) -> None:
    with name_errors("is not a regular expression", re.error, fault=ValueError):
        groups = re.compile(value).groups
    if groups != 1:
        raise ValueError(f"has {groups} groups in parentheses: exactly one is required")


def _mtu(value: int) -> None:
    # RFC 791, 3.1 (the least that every network carries); ip-link(8): the kernel's greatest.
    if value and not 68 <= value <= 65535:
        raise ValueError(f"is {value}: write 68 to 65535, or 0 for the default of the network")


def _share_source(value: str) -> None:
    unknown = set(re.findall(r"\{([^{}]*)\}", value)) - set(SHARE_PLACEHOLDERS)
    if unknown or re.sub(r"\{[a-z]+\}", "", value).count("{") or not value.isprintable():
        known = " ".join(f"{{{name}}}" for name in SHARE_PLACEHOLDERS)
        raise ValueError(f"has an unknown placeholder: known are {known}")
    if ".." in value.split("/"):
        raise ValueError("contains '..': write the path without it")


def _share_target(value: str) -> None:
    _share_source(value)
    if not value.startswith("/"):
        raise ValueError(f"is {value!r}: write an absolute path in the guest")


@dataclass(frozen=True)
class Batch:
    """``[batch]``: the batch system."""

    system: str = setting("local", "batch system: local, or the name of a plugin's batch system")
    vm_by_default: bool = setting(True, "run jobs without -vm in a VM; false: on bare metal")
    boot_walltime: float = setting(
        0.0, "added to the requested walltime of VM jobs: guests start within it", "s"
    )
    kill_leftovers: bool = setting(
        False, "after a VM job that had the whole node, kill the user's remaining processes"
    )


@dataclass(frozen=True)
class Images:
    """``[images]``: pool and cache of images. The default image is ``[options.img] default``."""

    pool: Path = setting(
        Path("/var/lib/vtorque/images"), "image pool; only root can write it", None, absolute
    )
    cache: str = setting(
        "",
        "local copy of the pool on this node (vmgr images sync), used before the pool",
        check=absolute,
    )
    keep: float = setting(
        604800.0,
        "how long replaced image versions are kept for jobs of other nodes; set the "
        "longest walltime, or 0 if no other node uses this pool",
        "s",
    )
    signers: str = setting(
        "",
        "allowed signers file (ssh-keygen): accept only images that one of them has "
        "signed; empty: accept all",
        check=absolute,
    )
    max_disk: int = setting(2 << 20, "maximum disk size for vmgr images add", "MiB")
    ramdisk: Literal["overlay", "copy"] = setting(
        "overlay",
        "fs_type=ramdisk: overlay: keep the guest's writes in memory; copy: its whole disk",
    )


@dataclass(frozen=True)
class KeptTable:
    """``[kept]``: records of ended jobs on a node, for ``vmgr report`` and ``vmgr logs``."""

    days: float = setting(30.0, "records older than this are removed", "d")
    mib: int = setting(1024, "maximum size of all records", "MiB", at_least(0))


@dataclass(frozen=True)
class LogTable:
    """``[log]``: the logs of jobs (``vmgr logs``)."""

    level: str = setting(
        "INFO",
        "TRACE, DEBUG, INFO, WARN, ERROR or QUIET; by phase or plugin: ALL:WARN,boot:DEBUG",
        check=log_levels.parse,
    )


@dataclass(frozen=True)
class Network:
    """``[network]``: the guests' first network interface."""

    kind: Literal["network", "bridge", "direct", "user", "none"] = setting(
        "network",
        "libvirt network, host bridge, macvtap on a host interface, none, or user: "
        "QEMU's own network without root, in which guests cannot reach each other",
    )
    source: str = setting("vtorque", "name of that network, bridge or interface")
    addressing: Literal["static", "dhcp", "command"] = setting(
        "static",
        "static: from node and slot; dhcp: from the network; command: from the site's program",
    )
    subnet: str = setting("10.86.0.0/16", "addresses of all guests on all nodes", None, _subnet)
    gateway: str = setting("", "default route; empty: the subnet's first host", None, _address)
    dns: tuple[str, ...] = setting((), "name servers' addresses", None, _addresses)
    search: tuple[str, ...] = setting(
        (), "DNS search domains, for addressing static or command", check=_domains
    )
    ntp: tuple[str, ...] = setting((), "time servers")
    first: int = setting(16, "offset of the first guest's address in the subnet", None, at_least(1))
    per_node: int = setting(64, "number of addresses reserved for each node", None, at_least(1))
    node_number: str = setting(
        "([0-9]+)$",
        "regular expression; its group is the number in the node's name; no match: 0",
        check=_node_number,
    )
    command: str = setting(
        "", "addressing=command: program called with node, guests per node, index"
    )
    node_ports: tuple[str, ...] = setting(
        (), "ports of the node that guests can reach, such as tcp/2049", None, _ports
    )
    mac_prefix: str = setting(
        "52:54:00", "first three bytes of the guests' MAC addresses", None, _mac_prefix
    )
    max_connections: int = setting(
        8192,
        "the most connections that the node tracks for one guest's interface (nf_conntrack), in "
        "each direction; packets that would open more are dropped",
        check=at_least(64),
    )
    ipv6: bool = setting(
        False,
        "let guests send IPv6, but never as a router; with addressing dhcp or none only, where "
        "vTorque does not assign the address",
    )
    filter: bool = setting(True, "drop packets with a forged MAC or IP address")
    opt_in_unfiltered: bool = setting(False, "accept that guests can forge addresses")


@dataclass(frozen=True)
class ExtraNetwork:
    """``[networks.<name>]``: an additional network interface of every guest."""

    source: str = setting(doc="name of the libvirt network, bridge or host interface")
    kind: Literal["bridge", "direct", "network"] = setting(
        "bridge", "host bridge, macvtap on a host interface, or libvirt network"
    )
    addressing: Literal["static", "dhcp", "command", "none"] = setting(
        "static", "as in [network]; none: no address"
    )
    subnet: str = setting(
        "", "addresses of all guests on all nodes; required unless dhcp or none", None, _subnet
    )
    gateway: str = setting(
        "", "a second default route, used where [network] has none", None, _address
    )
    first: int = setting(16, "offset of the first guest's address in the subnet", None, at_least(1))
    per_node: int = setting(64, "number of addresses reserved for each node", None, at_least(1))
    node_number: str = setting("", "as in [network]; empty: as set there", None, _node_number)
    command: str = setting(
        "", "addressing=command: program called with node, guests per node, index"
    )
    node_ports: tuple[str, ...] = setting(
        (), "ports of the node that guests can reach by a libvirt network", None, _ports
    )
    mtu: int = setting(0, "MTU in bytes; 0: the default of the network", None, _mtu)
    ipv6: bool = setting(False, "as in [network]")
    filter: bool = setting(True, "drop packets with a forged MAC or IP address")
    opt_in_unfiltered: bool = setting(False, "accept that guests can forge addresses")


@dataclass(frozen=True)
class ShareTable:
    """``[shares.<name>]``: a host directory in every guest; by default, the user's home."""

    source: str = setting(
        doc="host directory, or server:/export; {user} {home} {uid} {job} are replaced",
        check=_share_source,
    )
    target: str = setting(doc="mount point in guests; same placeholders", check=_share_target)
    kind: Literal["virtiofs", "nfs"] = setting("virtiofs", "nfs: the guest mounts it itself")
    readonly: bool = setting(False, "guests cannot write")
    user_owned: bool = setting(False, "the user must own the source; root does not look into it")


@dataclass(frozen=True)
class PluginsTable:
    """``[plugins]``: which of the installed plugins new jobs use."""

    enable: tuple[str, ...] | None = setting(None, "use only these; absent: all installed plugins")
    disable: tuple[str, ...] = setting((), "do not use these; teardown of running jobs still does")


DEFAULT_SHARES = {"home": ShareTable("{home}", "/home/{user}", user_owned=True)}
TABLES: dict[str, type[Any]] = {
    "batch": Batch, "paths": Paths, "node": Node, "images": Images, "kept": KeptTable,
    "log": LogTable, "network": Network, "plugins": PluginsTable,
}  # fmt: skip
OTHER_TABLES = ("networks", "shares", "options", "limits", "plugin")
LIMIT_KEYS = {
    "default": "default without -vm KEY=",
    "min": "minimum",
    "max": "maximum",
    "allow": "allowed values or globs (* ? [abc])",
    "deny": "forbidden values or globs",
}
