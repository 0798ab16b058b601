"""Matching of spare guests: domains are compared without their pluggable devices."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from vtorque_core.api.claims import Placement
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.libvirt_domain import (
    Channel,
    Disk,
    Element,
    Filesystem,
    Interface,
    IoThreads,
    KernelBoot,
    MemoryBacking,
    MetadataEntry,
)
from vtorque_core.base.names import JobAttempt
from vtorque_core.plan.domain.merge import Contributed, MergedDomain, merge
from vtorque_core.plan.domain.render import (
    DomainSpec,
    drop_pluggable,
    render,
    render_base,
    render_devices,
)
from vtorque_testing import planned

JOBS = {"state_dir": Path("/s/jobs/42.srv.0/g0"), "run_dir": Path("/r/jobs/42.srv.0/g0")}
SPARES = {
    "state_dir": Path("/s/jobs/spare-1.0/g0"),
    "run_dir": Path("/r/jobs/spare-1.0/g0"),
    "name": "vt-spare-1.0-n1-0",
    "uuid": "11111111-95f3-54cf-8d96-1d6ed3e4ac1f",
    "job": JobAttempt("spare-1", 0, "root", 0, "n1"),
    "qemu_uid": 77,
}
SHARE = Filesystem("home", "/home/ada", "home", user_owned=True)
NIC = Interface("nic0", "network", "vtorque", "52:54:00:00:00:01", "10.86.0.11")
SEED = Disk("seed", "/s/jobs/42.srv.0/g0/seed.iso", format="raw", readonly=True, serial="vtseed")
DATA = Disk("data", "/home/ada/d.img", format="raw", serial="vtdata", user_owned=True)


def merged(*elements: Element) -> MergedDomain:
    return merge(Contributed("p", "vtorque-p 1.0", each) for each in elements)


def constant_hook(guest: GuestPlan) -> list[Element]:
    """Return a guest's elements with and without a job."""
    return [
        KernelBoot(kernel="/pool/v1/vmlinux", initrd="/pool/v1/initrd", cmdline="quiet"),
        Channel("status", "org.vtorque.status", str(guest.run_dir / "status.sock")),
        Disk("root", str(guest.state_dir / "root.qcow2"), "qcow2", serial="vtroot"),
    ]


def of(more: tuple[Element, ...] = (), **changes: Any) -> str:
    guest = planned.guest_plan(**changes)
    return render_base(DomainSpec(guest, "tcg"), merged(*constant_hook(guest), *more))


def test_job_with_pluggable_devices_matches_a_spare_guest():
    mine = of((SHARE, NIC, SEED, DATA, MetadataEntry("note", "x")), **JOBS)
    assert mine == of(**SPARES)
    assert "42.srv" not in mine and "ada" not in mine


def test_floating_cpus_make_no_difference():
    placed = Placement({"vcpu": (1, 2), "emulator": (1, 2)}, share=(1, 2))
    assert of(**JOBS, placement=placed) == of(**SPARES)


@pytest.mark.parametrize(
    "changes",
    [
        {"vcpus": 2},
        {"ram_mib": 513},
        {"placement": Placement(nodes=(1,), numa="strict")},
        {"image": replace(planned.MICRO, arch="aarch64")},
    ],
)
def test_property_fixed_at_boot_makes_a_difference(changes):
    assert of(**JOBS, **changes) != of(**SPARES)


@pytest.mark.parametrize(
    "element",
    [
        IoThreads(2),
        MemoryBacking(hugepages_kib=2048),
        MemoryBacking(shared=False),
        MemoryBacking(source="file"),
        Channel("more", "org.vtorque.more", "/r/jobs/42.srv.0/g0/more.sock"),
    ],
)
def test_element_of_a_plugin_makes_a_difference(element):
    assert of((element,), **JOBS) != of(**SPARES)


def test_other_image_version_makes_a_difference():
    guest = planned.guest_plan(**JOBS)
    newer = merged(KernelBoot(kernel="/pool/v2/vmlinux"), *constant_hook(guest)[1:])
    assert render_base(DomainSpec(guest, "tcg"), newer) != of(**SPARES)


def test_pluggable_devices_are_ordered_and_have_no_address():
    guest = planned.guest_plan(**JOBS)
    domain = merged(*constant_hook(guest), SEED, DATA, SHARE, NIC)
    sockets = {"ua-p-home": "/r/home.sock", "ua-p-data": "/r/data.sock"}
    found = render_devices(DomainSpec(guest, "tcg"), domain, sockets, {"ua-p-nic0": "vt0"})
    parsed = [ElementTree.fromstring(text) for text in found]  # noqa: S314 - our own
    assert [each.tag for each in parsed] == ["filesystem", "interface", "disk", "disk"]
    assert [each.findtext("serial") for each in parsed[2:]] == ["vtdata", "vtseed"]
    assert not any(each.findall("address") for each in parsed)


def test_spare_guest_has_free_ports_and_shared_memory():
    guest = planned.guest_plan(**SPARES)
    xml = render(DomainSpec(guest, "tcg", ports=3), drop_pluggable(merged(*constant_hook(guest))))
    root = ElementTree.fromstring(xml)  # noqa: S314 - our own
    ports = root.findall("./devices/controller[@model='pcie-root-port']")
    assert [each.get("index") for each in ports] == ["1", "2", "3"]
    (cell,) = root.findall("./cpu/numa/cell")
    assert (cell.get("memAccess"), cell.get("memory"), cell.get("cpus")) == ("shared", "512", "0-0")
    assert root.find("./memoryBacking/access").get("mode") == "shared"
