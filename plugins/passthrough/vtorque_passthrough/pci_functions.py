"""Read this node's PCI functions from sysfs, and find those that a guest can have.

Plugins that lease cards import this module, which changes nothing. :mod:`vtorque_passthrough.vfio`
assigns a function to a guest. Sources: sysfs-bus-pci and sysfs-kernel-iommu_groups of the kernel's
Documentation/ABI/testing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault, run_tool

SYSFS = "/sys"
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)

_BRIDGES = 0x06  # base class of bridges (PCI Code and ID Assignment); VFIO leaves them alone
_NETWORK = 0x02  # base class of network controllers; with subclass 07: of InfiniBand
_INFINIBAND_CARD = 0x0207
_NOBODYS = re.compile("pci-stub|.*vfio.*")  # drivers that do not use a function
_IFF_UP = 0x1  # netdevice(7)
_INFINIBAND = "32"  # ARPHRD_INFINIBAND, linux/if_arp.h


@dataclass(frozen=True)
class PciFunction:
    """One function of a PCI device.

    Args:
        address: in sysfs form, ``0000:3b:00.0``.
        ident: vendor and device as ``lspci -n`` shows them, ``10de:20b0``.
        bridge: true for a bridge, which no guest gets.
        numa: NUMA node, -1 if unknown.
        group: IOMMU group; empty without an active IOMMU.
        driver: the driver to which the function is bound, or empty.
        resets: true if the kernel can reset this function alone.
        path: its directory in sysfs.
    """

    address: str
    ident: str
    bridge: bool = False
    numa: int = -1
    group: str = ""
    driver: str = ""
    resets: bool = False
    path: Path = Path()

    @property
    def host_driver(self) -> str:
        """The driver through which the host can use the PCI function, or an empty string."""
        return "" if _NOBODYS.fullmatch(self.driver) else self.driver

    @property
    def host_use(self) -> str:
        """How the host uses the PCI function now, for messages; empty if no use is visible.

        Uses are an active network interface, an active RDMA port and a disk, at any depth of the
        sysfs directory (virtio0/net, ata1/host0/.../block). sysfs shows only interfaces of the
        caller's network namespace. Therefore a network card with a driver but without interfaces
        counts as in use by a container. An InfiniBand card without interfaces is in use only if a
        port is active.
        """
        at = self.path.resolve()
        nets = sorted(at.rglob("net/*"))
        for net in nets:
            if _hex(net / "flags") & _IFF_UP:
                return f"its network interface {net.name} is up"
        if not nets:
            for port in sorted(at.glob("infiniband/*/ports/*")):
                if "ACTIVE" in _text(port / "state"):
                    return f"port {port.name} of its RDMA device {port.parts[-3]} is active"
            kind = _hex(at / "class") >> 8
            if self.host_driver and kind >> 8 == _NETWORK and kind != _INFINIBAND_CARD:
                return f"its network interface may belong to a container ({self.driver})"
        disks = sorted([*at.rglob("block/*"), *at.glob("nvme/nvme*/nvme*n*")])
        return f"it has the disk {disks[0].name}" if disks else ""


@dataclass(frozen=True)
class VirtualFunction:
    """A virtual function (SR-IOV): its number, and its card's network interface ``card``."""

    function: PciFunction
    card: str
    number: int
    infiniband: bool


def function(address: str, sysfs: str = SYSFS) -> PciFunction:
    """Return the PCI function at an address. Raises FileNotFoundError if it is missing."""
    at = Path(sysfs, "bus/pci/devices", address)
    return PciFunction(
        address=address,
        ident=f"{_hex(at / 'vendor'):04x}:{_hex(at / 'device'):04x}",
        bridge=_hex(at / "class") >> 16 == _BRIDGES,
        numa=int(_text(at / "numa_node") or -1),
        group=_name(at / "iommu_group"),
        driver=_name(at / "driver"),
        resets=(at / "reset").exists(),
        path=at,
    )


def functions(sysfs: str = SYSFS) -> dict[str, PciFunction]:
    """Return all PCI functions of this node by address, sorted."""
    top = Path(sysfs, "bus/pci/devices")
    names = sorted(p.name for p in top.iterdir()) if top.is_dir() else []
    return {name: function(name, sysfs) for name in names}


def group_of(all_: Iterable[PciFunction], group: str) -> tuple[PciFunction, ...]:
    """Return the PCI functions of an IOMMU group except bridges. A guest gets all or none."""
    return tuple(f for f in all_ if f.group == group and not f.bridge)


def virtual_functions(cards: Iterable[str], sysfs: str = SYSFS) -> dict[str, VirtualFunction]:
    """Return the virtual functions of the network interfaces ``cards``, by PCI address.

    Omits functions that the node uses, that share an IOMMU group, or that have no IOMMU group.
    """
    everything = functions(sysfs)
    found = {}
    for card in cards:
        net = Path(sysfs, "class/net", card)
        for link in sorted(net.glob("device/virtfn*"), key=lambda p: (len(p.name), p.name)):
            f = everything[link.resolve().name]
            if f.group and not f.host_use and len(group_of(everything.values(), f.group)) == 1:
                number = int(link.name.removeprefix("virtfn"))
                infiniband = _text(net / "type") == _INFINIBAND
                found[f.address] = VirtualFunction(f, card, number, infiniband)
    return found


def why_no_vfio(sysfs: str = SYSFS) -> str:
    """Return why this node cannot assign PCI functions to guests, or an empty string."""
    groups = Path(sysfs, "kernel/iommu_groups")
    if not groups.is_dir() or not any(groups.iterdir()):
        return "an active IOMMU (firmware setup; with Intel also intel_iommu=on for the kernel)"
    if Path(sysfs, "bus/pci/drivers/vfio-pci").exists():
        return ""
    try:
        run_tool("modprobe", "--dry-run", "--quiet", "vfio-pci")
    except HostFault:
        return "the kernel module vfio-pci"
    return ""


def _text(path: Path) -> str:
    return path.read_text("ascii").strip() if path.exists() else ""


def _hex(path: Path) -> int:
    return int(path.read_text("ascii"), 16)


def _name(link: Path) -> str:
    return link.readlink().name if link.exists() else ""
