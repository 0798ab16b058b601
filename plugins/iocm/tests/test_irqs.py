"""Interrupts of the site's interfaces: found, moved, and restored after a kill at any point."""

from pathlib import Path

import pytest

from vtorque_iocm import irqs


@pytest.fixture
def host(tmp_path):
    """Make a host with a PCI NIC (IRQs 30, 31) below a bridge (50), and a virtio NIC (PCI's 40)."""
    pci = tmp_path / "sys/devices/pci0/0000:3a:00.0/0000:3b:00.0"
    virtio = tmp_path / "sys/devices/pci0/0000:00:03.0/virtio3"
    for nic, device in (("eth0", pci), ("eth1", virtio)):
        device.mkdir(parents=True)
        (tmp_path / "sys/class/net" / nic).mkdir(parents=True)
        (tmp_path / "sys/class/net" / nic / "device").symlink_to(device)
    (tmp_path / "sys/class/net/br0").mkdir()
    for device, number in ((pci, 30), (pci, 31), (virtio.parent, 40), (pci.parent, 50)):
        (device / "msi_irqs").mkdir(exist_ok=True)
        (device / "msi_irqs" / str(number)).touch()
        irq = tmp_path / "proc/irq" / str(number)
        irq.mkdir(parents=True)
        (irq / "smp_affinity_list").write_text("0-3\n")
    (pci / "msi_irqs/99").touch()  # not requested by the driver: no /proc/irq/99
    return tmp_path


def at(host):
    return {p.parent.name: p.read_text().strip() for p in host.glob("proc/irq/*/smp_affinity_list")}


def test_interrupts_of_interfaces_are_found(host):
    def numbers(*nics):
        return [Path(f).parent.name for f in irqs.affinity_files(nics, host)]

    assert numbers("eth0") == ["30", "31"]
    assert numbers("eth1", "eth0", "eth0") == ["30", "31", "40"]
    assert numbers("br0", "none") == []


def test_interrupts_move_to_the_io_cores_and_back(host):
    memo = str(host / "irqs.json")
    resource = irqs.IrqAffinity(memo, irqs.affinity_files(["eth0", "eth1"], host))
    resource.create()
    irqs.direct(memo, (2, 3))
    assert at(host) == {**dict.fromkeys(("30", "31", "40"), "2,3"), "50": "0-3"}
    resource.create()  # as after a crash: it must not mistake this for the original state
    irqs.direct(memo, (1,))
    for _ in range(2):
        irqs.IrqAffinity(memo).release()
        assert at(host) == dict.fromkeys(("30", "31", "40", "50"), "0-3")
        assert not Path(memo).exists()


def test_release_without_create_or_with_missing_interrupts_succeeds(host):
    memo = str(host / "irqs.json")
    irqs.IrqAffinity(memo).release()
    irqs.IrqAffinity(memo, irqs.affinity_files(["eth0"], host)).create()
    irqs.direct(memo, (2,))
    (host / "proc/irq/30/smp_affinity_list").unlink()
    irqs.direct(memo, (1,))
    irqs.IrqAffinity(memo).release()
    assert at(host)["31"] == "0-3"


def test_no_interrupt_moves_without_configured_interfaces(host):
    irqs.direct(str(host / "irqs.json"), (1,))
    assert at(host)["30"] == "0-3"


def test_interrupt_that_cannot_be_moved_does_not_stop_others(host):
    memo = str(host / "irqs.json")
    files = irqs.affinity_files(["eth0"], host)
    irqs.IrqAffinity(memo, files).create()
    first = Path(files[0])
    first.unlink()
    first.symlink_to("/proc/version")  # not opened: it is a link
    irqs.direct(memo, (2,))
    assert at(host)["31"] == "2"
