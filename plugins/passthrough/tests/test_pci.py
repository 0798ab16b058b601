"""PCI functions of a node in sysfs, and binding to VFIO and back."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from as_root import without_chown
from vtorque_core.api import HostFault
from vtorque_core.api.libvirt_domain import Disk, find_forbidding
from vtorque_passthrough.pci_functions import (
    function,
    functions,
    group_of,
    virtual_functions,
    why_no_vfio,
)
from vtorque_passthrough.vfio import PciDevice, Vfio
from vtorque_testing.sysfs_tree import PCI, add_function, tree

GPU = "0000:3b:00.0"


@pytest.fixture
def gpus(tmp_path):
    return tree("gpu-node", tmp_path / "sys")


def test_function_is_read_from_sysfs(gpus):
    gpu = function(GPU, gpus)
    assert dataclasses.replace(gpu, path=Path()) == dataclasses.replace(
        gpu, address=GPU, ident="10de:20b0", bridge=False, numa=0, group="17", driver="nvidia",
        resets=True, path=Path(),
    )  # fmt: skip
    assert not function("0000:d8:00.0", gpus).resets
    with pytest.raises(FileNotFoundError):
        function("0000:ff:00.0", gpus)


def test_iommu_group_contains_all_functions_except_bridges(gpus):
    everything = functions(gpus)
    assert len(everything) == 10
    assert [f.address for f in group_of(everything.values(), "40")] == [
        "0000:86:00.0", "0000:86:00.1",
    ]  # fmt: skip
    assert everything["0000:85:00.0"].bridge


def test_functions_in_use_by_the_node_are_detected(gpus):
    used = {address: f.host_use for address, f in functions(gpus).items() if f.host_use}
    assert used == {
        "0000:01:00.0": "it has the disk nvme0n1",
        "0000:af:00.0": "its network interface ens5f0 is up",
    }


@pytest.mark.parametrize(
    ("words", "used"),
    [
        ("020000 driver=i40e net=eth0", ""),
        (
            "020000 driver=i40e",
            "its network interface may belong to a container (i40e)",
        ),
        ("028000 driver=igb_uio", "its network interface may belong to a con"),
        ("020000", ""),
        ("020000 driver=vfio-pci", ""),
        ("020000 driver=mlx5_vfio_pci", ""),
        ("020000 driver=pci-stub", ""),
        ("030000 driver=nvidia", ""),
        ("020700 driver=mlx5_core rdma=mlx5_0", ""),
        ("020700 driver=mlx5_core rdma=mlx5_0:up", "port 1 of its RDMA device mlx5_0 is active"),
        ("020000 driver=mlx5_core rdma=mlx5_0:up", "port 1 of its RDMA device mlx5_0 is active"),
        ("020700 driver=mlx5_core ib=ib0 rdma=mlx5_0:up", ""),
    ],
)
def test_nic_without_a_visible_interface_may_be_in_a_container(tmp_path, words, used):
    """sysfs shows no interface of another network namespace: such a card has no ``net``."""
    top = tmp_path / "sys"
    for name in ("bus/pci/devices", "bus/pci/drivers", "kernel/iommu_groups", "class/net"):
        (top / name).mkdir(parents=True)
    add_function(top, "0000:af:00.0", "8086:1572", *words.split())
    said = function("0000:af:00.0", str(top)).host_use
    assert said.startswith(used) if used else said == ""


def test_interface_in_a_container_leaves_an_empty_directory(gpus):
    at = Path(gpus, "devices/0000:af:00.1/net")
    shutil.rmtree(at)
    at.mkdir()
    assert "its network interface may belong" in function("0000:af:00.1", gpus).host_use


def test_functions_of_this_machine_can_be_read():
    for address, f in functions().items():
        assert f.address == address
        assert isinstance(f.host_use, str)


def test_virtual_functions_of_the_given_cards_are_found(tmp_path):
    sysfs = tree("rdma-node", tmp_path / "sys")
    found = virtual_functions(("ibp94s0", "ens1f0", "absent"), sysfs)
    assert [(a, v.card, v.number, v.infiniband, v.function.numa) for a, v in found.items()] == [
        ("0000:5e:00.1", "ibp94s0", 0, True, 0),
        ("0000:5e:00.2", "ibp94s0", 1, True, 0),
        ("0000:81:00.2", "ens1f0", 0, False, 1),
    ]
    assert virtual_functions((), sysfs) == {}


def test_missing_vfio_requirement_is_named(tmp_path, gpus):
    assert why_no_vfio(gpus) == ""
    assert "an active IOMMU (firmware setup; with" in why_no_vfio(
        tree("no-iommu", tmp_path / "off")
    )
    shutil.rmtree(Path(gpus, "bus/pci/drivers/vfio-pci"))
    assert why_no_vfio(gpus) in ("", "the kernel module vfio-pci")  # as on this machine


def test_pci_device_validates_its_address_and_forbids_save_and_migrate():
    card = PciDevice("gpu", GPU)
    assert find_forbidding("save", [card, card]) == ["PciDevice"]
    assert find_forbidding("migrate", [Disk("d", "/d", "raw"), card]) == ["PciDevice"]
    assert find_forbidding("suspend", [card]) == []
    for address in ("3b:00.0", "0000:3b:00.8", "0000:3B:00.0", "../../x", f"{GPU}\n", ""):
        with pytest.raises(ValueError, match="not a PCI address"):
            PciDevice("gpu", address)


# -- To VFIO and back ------------------------------------------------------------------------------


class KernelDouble:
    """Do what the kernel does when these files are written (drivers/base/bus.c, drivers/pci)."""

    def __init__(self, sysfs, dev, monkeypatch):
        self.sysfs, self.dev, self.said = Path(sysfs), dev, []
        self.native = {p.name: self.driver(p.name) for p in (self.sysfs / PCI).iterdir()}
        self.stubborn = False
        dev.mkdir()
        monkeypatch.setattr(Vfio, "_write", lambda vfio, name, text: self.write(name, text))

    def driver(self, address):
        return function(address, str(self.sysfs)).driver

    def write(self, name, text):
        self.said.append((name, text))
        parts = name.split("/")
        if name == "drivers_probe":
            self.bind(text)
        elif parts[-1] == "driver_override":
            (self.sysfs / "bus/pci" / name).write_text(text)
        elif parts[-1] == "unbind":
            if self.driver(text) == "vfio-pci":
                (self.dev / function(text, str(self.sysfs)).group).unlink()
            (self.sysfs / PCI / text / "driver").unlink()
        elif parts[-1] == "reset":
            if self.stubborn:
                raise HostFault(f"{parts[1]}: reset: Inappropriate ioctl for device")
        else:
            raise AssertionError(name)

    def bind(self, address):
        at = self.sysfs / PCI / address
        override = (at / "driver_override").read_text().strip()
        driver = override if override not in ("", "(null)") else self.native[address]
        if driver and not (at / "driver").exists():
            (at / "driver").symlink_to(self.sysfs / "bus/pci/drivers" / driver)
            if driver == "vfio-pci":
                (self.dev / function(address, str(self.sysfs)).group).touch()

    @property
    def resets(self):
        return [name for name, _ in self.said if name.endswith("reset")]


@pytest.fixture
def kernel(gpus, tmp_path, monkeypatch):
    return KernelDouble(gpus, tmp_path / "vfio", monkeypatch)


def vfio(kernel, address=GPU, driver="nvidia", **changes):
    where = {"sysfs": str(kernel.sysfs), "dev": str(kernel.dev)}
    return Vfio(address, driver, os.geteuid(), **{**where, **changes})


def test_function_is_bound_reset_and_returned_to_its_driver(kernel):
    vfio(kernel).create()
    assert kernel.driver(GPU) == "vfio-pci"
    assert (kernel.dev / "17").exists()
    assert kernel.resets == []
    vfio(kernel).release()
    assert kernel.driver(GPU) == "nvidia"
    assert kernel.resets == [f"devices/{GPU}/reset"]
    unbound = kernel.said.index((f"devices/{GPU}/driver/unbind", GPU), 3)
    assert kernel.said.index((f"devices/{GPU}/reset", "1")) < unbound  # the host gets a clean card
    said = len(kernel.said)
    vfio(kernel).release()
    assert kernel.driver(GPU) == "nvidia"
    assert kernel.said[said:] == [(f"devices/{GPU}/driver_override", "\n")]


@pytest.mark.parametrize("steps", range(4))
def test_partial_create_is_undone(kernel, monkeypatch, steps):
    real, count = kernel.write, iter(range(99))

    def killed(name, text):
        if next(count) >= steps:
            raise KeyboardInterrupt
        real(name, text)

    kernel.write = killed
    if steps < 3:
        with pytest.raises(KeyboardInterrupt):
            vfio(kernel).create()
    else:
        vfio(kernel).create()
    kernel.write = real
    vfio(kernel).release()
    assert kernel.driver(GPU) == "nvidia"
    assert (kernel.sysfs / PCI / GPU / "driver_override").read_text() == "\n"


def test_function_without_a_driver_gets_none(kernel):
    kernel.write(f"devices/{GPU}/driver/unbind", GPU)
    card = vfio(kernel, driver="")
    card.create()
    card.release()
    assert kernel.driver(GPU) == ""


def test_function_bound_to_vfio_by_the_site_stays_bound(kernel, monkeypatch):
    without_chown(monkeypatch)
    at = kernel.sysfs / PCI / GPU
    (at / "driver").unlink()
    (at / "driver_override").write_text("vfio-pci")
    kernel.bind(GPU)
    card = vfio(kernel, driver="vfio-pci")
    card.create()
    card.release()
    assert kernel.driver(GPU) == "vfio-pci"
    assert kernel.resets == [f"devices/{GPU}/reset"]
    assert (at / "driver_override").read_text() == "vfio-pci\n"


def test_function_that_fails_to_reset_is_not_returned(kernel):
    vfio(kernel).create()
    kernel.stubborn = True
    for _ in range(2):
        with pytest.raises(HostFault, match="reset"):
            vfio(kernel).release()
        assert kernel.driver(GPU) == "vfio-pci"
    kernel.stubborn = False
    vfio(kernel).release()
    assert kernel.driver(GPU) == "nvidia"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("0000:ff:00.0", "is missing"),
        ("0000:af:00.0", "ens5f0 is up"),
        ("0000:01:00.0", "nvme0n1"),
        ("0000:d8:00.0", "cannot be reset"),
    ],
)
def test_unusable_function_is_not_touched(kernel, address, why):
    card = vfio(kernel, address)
    with pytest.raises(HostFault, match=why):
        card.create()
    assert kernel.said == []


def test_site_can_allow_a_function_without_reset(kernel):
    card = vfio(kernel, "0000:d8:00.0", "", must_reset=False)
    card.create()
    card.release()
    assert kernel.resets == []
    assert kernel.driver("0000:d8:00.0") == ""


def test_missing_iommu_group_is_a_host_fault(tmp_path, monkeypatch):
    kernel = KernelDouble(tree("no-iommu", tmp_path / "sys"), tmp_path / "vfio", monkeypatch)
    with pytest.raises(HostFault, match="no IOMMU group"):
        vfio(kernel).create()


def test_release_of_a_missing_card_succeeds(kernel):
    vfio(kernel).create()
    (kernel.sysfs / PCI / GPU).unlink()
    vfio(kernel).release()
    with pytest.raises(HostFault, match=r"PCI function 0000:99:00.0 is missing on this node"):
        Vfio.for_function(PciDevice("gpu", "0000:99:00.0"), 0)
