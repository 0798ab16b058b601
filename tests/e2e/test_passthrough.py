"""Domains with functions of recorded machines, before the real libvirtd: no card is here."""

import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vtorque_core.api import JobRequest
from vtorque_core.api_domain import PciDevice
from vtorque_core.api_node import GuestPlan, Image, JobUser
from vtorque_core.domain.merge import Contributed, merge
from vtorque_core.domain.render import DomainSpec, render

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
        job_id="42.srv", attempt=0, node="n1", index=0, rank=0, guests_per_node=1, name=NAME,
        uuid="0b1ad9ba-95f3-54cf-8d96-1d6ed3e4ac1e", hostname="vn1", vcpus=1, ram_mib=256,
        image=Image("m", "linux", "micro", "x86_64", "0" * 64), request=JobRequest({}),
        user=JobUser("ada", 1000, 1000, (("ada", 1000),), "/home/ada", "/bin/bash"),
        addresses=(), peers=(), state_dir=tmp_path, run_dir=tmp_path, secret=b"x" * 32,
    )  # fmt: skip
    merged = merge(Contributed("passthrough", "vtorque-passthrough 1.0", card) for card in CARDS)
    path = tmp_path / "domain.xml"
    path.write_text(render(DomainSpec(guest, "tcg"), merged))
    yield path
    subprocess.run(["virsh", "-q", "undefine", NAME], capture_output=True, check=False, timeout=30)


def virsh(*argv):
    return subprocess.run(
        ["virsh", "-q", "-c", "qemu:///system", *argv],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_libvirt_validates_and_keeps_the_functions(domain: Path):
    done = virsh("define", "--validate", str(domain))
    assert done.returncode == 0, done.stderr
    devices = ElementTree.fromstring(virsh("dumpxml", NAME).stdout).find("devices")  # noqa: S314
    found = [*devices.findall("hostdev"), *devices.findall("interface")]
    assert [d.find("source/address").get("bus") for d in found] == ["0x3b", "0x5e", "0x81"]
    assert {d.get("managed") for d in found} == {"yes"}
    assert devices.find("interface/mac").get("address") == "52:54:00:12:34:56"


def test_a_card_that_is_not_there_starts_no_guest(domain: Path):
    """So that libvirt has looked for it in sysfs."""
    assert virsh("define", "--validate", str(domain)).returncode == 0
    done = virsh("start", NAME)
    assert done.returncode != 0
    assert "vfio" in done.stderr.lower() or "0000:3b:00.0" in done.stderr, done.stderr
