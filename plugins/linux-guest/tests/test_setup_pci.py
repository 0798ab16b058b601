"""setup.sh finds memory of PCI devices in a sysfs of files, run by real shells."""

from __future__ import annotations

import pytest

from sample_guests import PLAN, FakeRoot
from vtorque_core.api_context import Mount, PciMemory
from vtorque_core.api_node import HostFault
from vtorque_linux_guest import setup_script
from vtorque_linux_guest.settings import Settings

HOME = Mount("virtiofs", "home", "/home/alice")


def pci_device(root: FakeRoot, address: str, ids: str, regions: int = 3) -> None:
    vendor, device = ids.split(":")
    at = f"/sys/bus/pci/devices/{address}"
    for name, text in (("vendor", f"0x{vendor}\n"), ("device", f"0x{device}\n"), ("enable", "0")):
        root.write(f"{at}/{name}", text)
    for number in range(regions):
        root.write(f"{at}/resource{number}", "")


def test_memory_of_a_pci_device(fake_root: FakeRoot) -> None:
    pci_device(fake_root, "0000:00:02.0", "1af4:1005")
    pci_device(fake_root, "0000:02:01.0", "1af4:1110")
    pci_device(fake_root, "0000:02:02.0", "1af4:1110")
    items = [HOME, PciMemory("1af4:1110", 2, "/dev/vtorque/x", nth=1)]
    ran = fake_root.setup(PLAN, items)
    assert ran.code == 0, ran.output
    at = fake_root.path / "sys/bus/pci/devices/0000:02:02.0"
    assert (fake_root.path / "dev/vtorque/x").readlink() == at / "resource2"
    assert ran.called("chown") == [("1000:1000", str(at / "resource2"))]
    assert (at / "enable").read_text() == "1\n"
    assert (at.with_name("0000:02:01.0") / "enable").read_text() == "0"


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (PciMemory("1af4:1110", 2, "/dev/x", nth=1), "no PCI device 1af4:1110 number 1 (from 0)"),
        (PciMemory("1af4:1111", 2, "/dev/x"), "no PCI device 1af4:1111 number 0 (from 0)"),
        (PciMemory("1af4:1110", 4, "/dev/x"), "PCI device 0000:02:01.0 has no region 4"),
    ],
)
def test_missing_memory_of_a_pci_device_is_named(
    fake_root: FakeRoot, item: PciMemory, said: str
) -> None:
    pci_device(fake_root, "0000:02:01.0", "1af4:1110")
    ran = fake_root.setup(PLAN, [HOME, item])
    assert (ran.code, ran.output) == (1, f"{said}\n")


@pytest.mark.parametrize("device", ["", "1af4", "1AF4:1110", "1af4:*", "../x:1110", "1af4:11100"])
def test_what_is_no_pci_device_is_refused_before_the_guest_boots(device: str) -> None:
    with pytest.raises(HostFault, match="is not a PCI device"):
        setup_script.build(PLAN, [PciMemory(device, 2, "/dev/x")], Settings())
