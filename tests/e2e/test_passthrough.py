"""PCI functions with the real libvirtd, and with a real kernel and an emulated IOMMU."""

import gzip
import json
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rdma_image import ensure
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.base.names import JobAttempt
from vtorque_core.plan.domain.merge import Contributed, merge
from vtorque_core.plan.domain.render import DomainSpec, render
from vtorque_linux_guest.image.initramfs import InitramfsTree
from vtorque_passthrough.vfio import PciDevice

pytestmark = pytest.mark.e2e

NAME = "vt-hostdev-test"
CARDS = (
    PciDevice("gpu", "0000:3b:00.0"),
    PciDevice("vf", "0000:5e:00.1"),
    PciDevice("nic", "0000:81:00.2", mac="52:54:00:12:34:56"),
)


@pytest.fixture
def domain(node, tmp_path):
    guest = GuestPlan(
        job=JobAttempt("42.srv", 0, "ada", 1000, "n1"), index=0, rank=0, guests_per_node=1,
        name=NAME,
        uuid="0b1ad9ba-95f3-54cf-8d96-1d6ed3e4ac1e", hostname="vn1", vcpus=1, ram_mib=256,
        image=Image("m", "linux", "micro", "x86_64", "0" * 64), request=JobRequest({}),
        user=JobUser("ada", 1000, 1000, (("ada", 1000),), "/home/ada", "/bin/bash"),
        addresses=(), peers=(), state_dir=tmp_path, run_dir=tmp_path, secret=b"x" * 32,
    )  # fmt: skip
    merged = merge(Contributed("passthrough", "vtorque-passthrough 1.0", card) for card in CARDS)
    path = tmp_path / "domain.xml"
    path.write_text(render(DomainSpec(guest, "tcg"), merged))
    yield path
    subprocess.run(["virsh", "-q", "undefine", NAME], capture_output=True, check=False, timeout=180)


def virsh(*argv):
    return subprocess.run(
        ["virsh", "-q", "-c", "qemu:///system", *argv],
        capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip


def test_libvirt_accepts_and_keeps_the_functions(domain: Path):
    done = virsh("define", "--validate", str(domain))
    assert done.returncode == 0, done.stderr
    devices = ElementTree.fromstring(virsh("dumpxml", NAME).stdout).find("devices")  # noqa: S314
    found = [*devices.findall("hostdev"), *devices.findall("interface")]
    assert [d.find("source/address").get("bus") for d in found] == ["0x3b", "0x5e", "0x81"]
    assert {d.get("managed") for d in found} == {"yes"}
    assert devices.find("interface/mac").get("address") == "52:54:00:12:34:56"


def test_missing_card_fails_the_start(domain: Path):
    """libvirt has parsed the elements correctly: functions of this host."""
    assert virsh("define", "--validate", str(domain)).returncode == 0
    done = virsh("start", NAME)
    assert done.returncode != 0
    assert "PCI" in done.stderr or "vfio" in done.stderr, done.stderr


# -- In a virtual machine with an IOMMU and a card, like on a node ---------------------------------

# Runs there as root, without any service. libvirt's library is missing, and not needed.
INSIDE = """
import json, os, sys, types
from pathlib import Path
sys.modules["libvirt"] = types.ModuleType("libvirt")
sys.modules["libvirt"].libvirtError = OSError
sys.path.append("/mnt")
from vtorque_passthrough.pci_functions import function, functions, group_of, why_no_vfio
from vtorque_passthrough.vfio import PciDevice, Vfio

found = functions()
(card,) = (f for f in found.values() if f.ident == "8086:10d3")
at = Path("/sys/bus/pci/devices", card.address)
group = Path("/dev/vfio", card.group)

def of(uid):
    return Vfio.for_function(PciDevice("card", card.address), uid)

def state():
    owner = group.stat().st_uid if group.exists() else None
    return function(card.address).driver, owner, (at / "driver_override").read_text().strip()

said = {"lacks": why_no_vfio(), "together": len(group_of(found.values(), card.group))}
said["disk"] = [f.host_use for f in found.values() if f.host_use and not f.bridge]
said["before"] = state()
first = of(1234)
first.create()
said["bound"] = state()
os.close(os.open(group, os.O_RDWR))
of_site = of(77)
of_site.create()
said["of the site"] = state()
of_site.release()
said["of the site after"] = state()
first.release()
first.release()
said["after"] = state()
(at / "driver/unbind").write_text(card.address)
bare = of(1234)
bare.create()
bare.release()
said["no driver"] = state()
print("SAID", json.dumps(said), flush=True)
"""
BOOT = (
    "exec switch_root /root /bin/sh -c 'export PATH=/usr/sbin:/usr/bin:/sbin:/bin;"
    " modprobe -a 9pnet_virtio 9p e1000e; mount -t 9p -o trans=virtio code /mnt;"
    " python3 -B /tmp/inside.py; poweroff -f' >/dev/console 2>&1"
)


@pytest.mark.full
def test_function_is_bound_to_vfio_and_returned_to_its_driver(node, tmp_path):
    """Bound, open to QEMU's user, reset and returned, by a real kernel; the card is emulated."""
    image = ensure(node)
    (site,) = node.prefix.glob("lib/python3*/site-packages")
    initrd = gzip.decompress((image / "initrd").read_bytes())
    start = initrd.index(b"#!/bin/busybox sh")
    init = initrd[start : initrd.index(b"exec switch_root", start)].decode()
    tree = InitramfsTree()  # a later /init in an initramfs replaces an earlier one
    tree.file("init", f"{init}cp /inside.py /root/tmp/\n{BOOT}\n".encode(), 0o755)
    tree.file("inside.py", INSIDE.encode())
    tree.link("sbin/cp", "/bin/busybox")
    (tmp_path / "initrd").write_bytes((image / "initrd").read_bytes() + tree.compressed())
    overlay = tmp_path / "root.qcow2"
    base = ("-f", "qcow2", "-F", "qcow2", "-b", str(image / "root.qcow2"))
    subprocess.run(["qemu-img", "create", "-q", *base, overlay], check=True, timeout=180)
    done = subprocess.run(
        [
            "qemu-system-x86_64", "-machine", "q35", "-cpu", "max", "-m", "1024", "-no-reboot",
            "-nodefaults", "-nographic", "-serial", "stdio", "-kernel", image / "vmlinux",
            "-initrd", tmp_path / "initrd",
            "-append", "console=ttyS0 panic=-1 quiet intel_iommu=on",
            "-device", "intel-iommu", "-drive", f"file={overlay},if=none,id=d",
            "-device", "virtio-blk-pci,drive=d,serial=vtroot",
            "-device", "pcie-root-port,id=root1,chassis=1",
            "-netdev", "hubport,id=n,hubid=0", "-device", "e1000e,bus=root1,netdev=n",
            "-fsdev", f"local,id=code,path={site},security_model=none,readonly=on",
            "-device", "virtio-9p-pci,fsdev=code,mount_tag=code",
        ],
        capture_output=True, check=False, timeout=180,
    )  # fmt: skip
    line = re.search(rb"SAID (\{.*\})", done.stdout)  # after the firmware's output
    if line is None:
        pytest.fail(f"{done.stdout[-3000:].decode('utf-8', 'replace')}\n{done.stderr!r}")
    assert json.loads(line[1]) == {
        "lacks": "", "together": 1, "disk": ["it has the disk vda"],
        "before": ["e1000e", None, "(null)"],
        "bound": ["vfio-pci", 1234, "vfio-pci"],
        "of the site": ["vfio-pci", 77, "vfio-pci"],
        "of the site after": ["vfio-pci", 0, "vfio-pci"],
        "after": ["e1000e", None, "(null)"],
        "no driver": ["", None, "(null)"],
    }  # fmt: skip
