"""Build a sysfs tree from a table of PCI functions in the directory ``machines``.

Each line of a table describes a PCI function: ``address vendor:device class`` and further words:

- ``numa=0``: NUMA node.
- ``group=17``: IOMMU group.
- ``driver=x``: bound driver.
- ``reset``: the function can be reset.
- ``net=eth0``: a network interface, down; ``net=eth0:up``: up.
- ``ib=ib0``: an InfiniBand interface, down; ``ib=ib0:up``: up.
- ``rdma=mlx5_0``: an RDMA device, its port down; ``rdma=mlx5_0:up``: its port up.
- ``disk=nvme0n1``: an NVMe disk.
- ``vf=0@0000:5e:00.0``: virtual function 0 of this physical function.

A line ``path = text`` adds another file. The tables were derived from ``lspci -nnk`` and from sysfs
of machines with this hardware.
"""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "machines"
PCI = "bus/pci/devices"


def write(path: Path, text: str) -> None:
    """Write a file with one line, and create its parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def tree(name: str, top: Path) -> str:
    """Build the tree of ``machines/<name>.txt`` below ``top``; return ``top`` as a string."""
    for directory in (PCI, "bus/pci/drivers/vfio-pci", "kernel/iommu_groups", "class/net"):
        (top / directory).mkdir(parents=True)
    (top / "bus/pci/drivers_probe").touch()
    for line in (DATA / f"{name}.txt").read_text().splitlines():
        if " = " in line:
            path, _, text = line.partition(" = ")
            write(top / path, text)
        elif line and not line.startswith("#"):
            add_function(top, *line.split())
    return str(top)


def add_function(top: Path, address: str, ident: str, kind: str, *words: str) -> None:
    """Add a PCI function to the sysfs tree below ``top``.

    Args:
        top: directory of the tree.
        address: PCI address: ``0000:5e:00.0``.
        ident: vendor and device: ``15b3:101b``.
        kind: class: ``020700``.
        words: properties, which this module's docstring lists: ``numa=0``, ``reset``.
    """
    at = top / "devices" / address
    vendor, device = ident.split(":")
    for name, text in (("vendor", vendor), ("device", device), ("class", kind)):
        write(at / name, f"0x{text}")
    write(at / "driver_override", "(null)")
    (top / PCI / address).symlink_to(at)
    for word in words:
        key, _, value = word.partition("=")
        if key == "numa":
            write(at / "numa_node", value)
        elif key == "group":
            (top / "kernel/iommu_groups" / value).mkdir(exist_ok=True)
            (at / "iommu_group").symlink_to(top / "kernel/iommu_groups" / value)
        elif key == "driver":
            (top / "bus/pci/drivers" / value).mkdir(exist_ok=True)
            (at / "driver").symlink_to(top / "bus/pci/drivers" / value)
        elif key == "reset":
            (at / "reset").touch()
        elif key in ("net", "ib"):
            net, _, up = value.partition(":")
            write(at / "net" / net / "flags", "0x1003" if up else "0x1002")
            write(at / "net" / net / "type", "32" if key == "ib" else "1")
            (at / "net" / net / "device").symlink_to(at)
            (top / "class/net" / net).symlink_to(at / "net" / net)
        elif key == "rdma":
            device, _, up = value.partition(":")
            write(at / "infiniband" / device / "ports/1/state", "4: ACTIVE" if up else "1: DOWN")
        elif key == "disk":
            (at / "nvme/nvme0" / value).mkdir(parents=True)
        elif key == "vf":
            number, _, card = value.partition("@")
            (top / "devices" / card / f"virtfn{number}").symlink_to(at)
        else:
            raise ValueError(word)
