"""Rendering: golden files, escaping, placement, refusals.

``VTORQUE_UPDATE_GOLDEN=1 pytest tests/unit/plan/test_domain_render.py`` rewrites the golden files.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api.claims import Claim, CoreClaim, MemoryClaim, Placement, RamClaim
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.libvirt_domain import (
    Channel,
    Clock,
    CpuModel,
    Disk,
    Element,
    Filesystem,
    Interface,
    IoThreads,
    KernelBoot,
    MemoryBacking,
    MetadataEntry,
    NetQueues,
    QemuArgs,
)
from vtorque_core.base.errors import ConfigError, HostFault, Refused
from vtorque_core.base.names import JobAttempt, tap_name
from vtorque_core.plan.domain.merge import Contributed, MergedDomain, merge
from vtorque_core.plan.domain.render import DomainSpec, disk_target, render
from vtorque_core.plan.placement.divide_cores import divide
from vtorque_core.plan.placement.model import Leases, NodeShare
from vtorque_core.plan.placement.topology import parse
from vtorque_testing import planned

GOLDEN = Path(__file__).parents[2] / "golden"
CAPABILITIES = Path(__file__).parents[3] / "testing/vtorque_testing/machines"
STATE = Path("/var/lib/vtorque/jobs/42.srv.0/g0")
RUN = Path("/run/vtorque/jobs/42.srv.0/g0")
POOL = "/var/lib/vtorque/images"


def guest_plan(**changes: Any) -> GuestPlan:
    here: dict[str, Any] = {"vcpus": 2, "state_dir": STATE, "run_dir": RUN}
    return planned.guest_plan(**here | changes)


def merged(*elements: Element, plugin: str = "linux-guest") -> MergedDomain:
    return merge(Contributed(plugin, f"vtorque-{plugin} 1.0", e) for e in elements)


def read(xml: str) -> ElementTree.Element:
    return ElementTree.fromstring(xml)  # noqa: S314 - our own


def draw(*elements: Element, guest: GuestPlan | None = None, **keywords: Any) -> str:
    spec = DomainSpec(guest or guest_plan(), "tcg")
    return render(spec, merged(*elements), **keywords)


def parsed(*elements: Element, **keywords: Any) -> ElementTree.Element:
    return read(draw(*elements, **keywords))


# -- Golden files: tests/integration and tests/e2e give the same to libvirt ------------------------

HOME = Filesystem("home", "/home/ada", "home", user_owned=True)
STREAMS = (
    Channel("control", "org.vtorque.control", str(RUN / "control.sock")),
    Channel("stdout", "org.vtorque.stdout", str(RUN / "stdout.sock"), owner="job"),
)
SOCKETS = {"ua-linux-guest-home": str(RUN / "fs-home.sock")}


def nic(number: int) -> Interface:
    return Interface(
        f"nic{number}", "network", "vtorque", f"52:54:00:00:00:{number:02x}", f"10.86.0.1{number}"
    )


def taps(domain: MergedDomain) -> dict[str, str]:
    return {alias: tap_name(e.mac) for alias, e in domain.aliases(Interface).items()}


def micro() -> str:
    domain = merged(
        KernelBoot(f"{POOL}/micro/vmlinux", f"{POOL}/micro/initrd", "console=ttyS0 quiet"),
        HOME,
        *STREAMS,
        MetadataEntry("distro", "micro"),
    )
    return render(DomainSpec(guest_plan(), "tcg"), domain, sockets=SOCKETS)


def debian() -> str:
    root = Disk(
        "root", str(STATE / "root.qcow2"), "qcow2", serial="vtroot", boot=1,
        base=f"{POOL}/debian-12/disk.qcow2",
    )  # fmt: skip
    seed = Disk("seed", str(STATE / "seed.iso"), "raw", readonly=True, serial="vtseed")
    data = Disk("data", "/home/ada/data.img", "raw", serial="vtdata", user_owned=True)
    domain = merged(root, seed, data, nic(0), HOME, *STREAMS, Clock(hpet=False))
    place = Placement(cores={"vcpu": (2, 3), "emulator": (4,)}, share=(2, 3, 4))
    place = replace(place, own=frozenset({"vcpu"}))
    sockets = {**SOCKETS, "ua-linux-guest-data": str(RUN / "nbd-data.sock")}
    spec = DomainSpec(guest_plan(placement=place), "kvm")
    return render(spec, domain, sockets=sockets, taps=taps(domain))


def two_nics() -> str:
    domain = merged(KernelBoot(kernel=f"{POOL}/micro/vmlinux"), nic(0), nic(1), *STREAMS)
    place = Placement(share=(0, 1, 2, 3))
    spec = DomainSpec(guest_plan(rank=3, placement=place), "tcg")
    return render(spec, domain, taps=taps(domain))


def hpc() -> str:
    bridge = Interface("nic1", "bridge", "br-hpc", "52:54:00:00:00:02", "10.186.0.16")
    macvtap = Interface("nic2", "direct", "ib0", "52:54:00:00:00:03", filtered=False)
    kernel = KernelBoot(kernel=f"{POOL}/micro/vmlinux")
    domain = merged(kernel, nic(0), bridge, macvtap, *STREAMS)
    filtered = {alias: tap for alias, tap in taps(domain).items() if not alias.endswith("nic2")}
    return render(DomainSpec(guest_plan(), "tcg"), domain, taps=filtered)


def placed(*claims: Claim, machine: str, vcpus: int, ram: int, **share: Any) -> GuestPlan:
    """Return a guest as the planner places it on a recorded machine."""
    host = parse((CAPABILITIES / f"{machine}.xml").read_text())
    node = NodeShare(host, **share)
    asked = [CoreClaim("vcpu", vcpus), MemoryClaim(ram, use="guest"), *claims]
    return guest_plan(placement=divide([asked], node, Leases())[0], vcpus=vcpus, ram_mib=ram)


def pinned() -> str:
    """vCPUs on their own cores of one NUMA node, I/O threads and the emulator on others."""
    guest = placed(
        CoreClaim("vcpu", 4, exclusive=True, key="vcpu_pinning"),
        CoreClaim("io", 1, exclusive=True, at_most=2, key="iocm"),
        RamClaim(page_kib=2048, numa="strict"),
        machine="xeon-2x32-smt", vcpus=4, ram=2048, cpus=(*range(32, 40), *range(96, 104)),
    )  # fmt: skip
    root = Disk("root", str(STATE / "root.qcow2"), "qcow2", base=f"{POOL}/d/disk.qcow2")
    data = Disk("data", str(STATE / "data.raw"), "raw")
    backing = MemoryBacking(hugepages_kib=guest.placement.page_kib)
    domain = merged(root, data, nic(0), IoThreads(2), NetQueues(4), backing, HOME, *STREAMS)
    return render(DomainSpec(guest, "kvm"), domain, sockets=SOCKETS, taps=taps(domain))


def over_nodes() -> str:
    """A guest larger than any NUMA node sees cells as the host has them."""
    guest = placed(
        CoreClaim("vcpu", 64, exclusive=True), machine="epyc-4-numa", vcpus=64, ram=100000
    )
    kernel = KernelBoot(kernel=f"{POOL}/micro/vmlinux")
    return render(DomainSpec(guest, "kvm"), merged(kernel, *STREAMS))


CASES = {
    "micro": micro, "debian": debian, "two-nics": two_nics, "hpc": hpc, "pinned": pinned,
    "over-nodes": over_nodes,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_domain_matches_its_golden_file(name: str) -> None:
    path = GOLDEN / f"{name}.xml"
    xml = CASES[name]()
    if os.environ.get("VTORQUE_UPDATE_GOLDEN"):
        path.write_text(xml)
    assert xml == path.read_text()


# -- Elements that no guest has --------------------------------------------------------------------


def test_no_graphics_no_usb_no_balloon_no_probing() -> None:
    root = read(debian())
    devices = root.find("devices")
    assert devices is not None
    kinds = {child.tag for child in devices}
    assert kinds.isdisjoint({"graphics", "video", "sound", "input", "redirdev", "tpm", "hub"})
    usb = devices.find("controller[@type='usb']")
    balloon = devices.find("memballoon")
    assert usb is not None
    assert usb.get("model") == "none"
    assert balloon is not None
    assert balloon.get("model") == "none"
    for disk in devices.iter("disk"):
        driver = disk.find("driver")
        assert driver is not None
        assert driver.get("type") in ("raw", "qcow2")
        assert driver.get("cache") == "writeback"
        assert disk.find("backingStore") is not None


def test_libvirt_changes_the_owner_of_no_file() -> None:
    label = read(debian()).find("seclabel")
    assert label is not None
    assert label.attrib == {"type": "static", "model": "dac", "relabel": "no"}
    assert label.findtext("label") == "libvirt-qemu:libvirt-qemu"


def test_base_image_is_not_relabeled_when_libvirt_labels_the_domain() -> None:
    disk = Disk("root", "/overlay", "qcow2", base="/base")
    root = read(render(DomainSpec(guest_plan(), "tcg", qemu_user=""), merged(disk)))
    assert root.find("seclabel") is None
    base = root.find("devices/disk/backingStore/source/seclabel")
    assert base is not None
    assert base.attrib == {"model": "dac", "relabel": "no"}


def test_guest_is_destroyed_when_it_ends() -> None:
    root = parsed()
    events = ("on_poweroff", "on_reboot", "on_crash")
    assert [root.findtext(event) for event in events] == ["destroy"] * 3


# -- text -------------------------------------------------------------------------------------

xml_text = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="￾￿")
    | st.sampled_from("\t\n\r\"'<>&{}%"),
    max_size=40,
)


@given(xml_text, xml_text)
def test_any_text_is_escaped_and_read_back(path: str, value: str) -> None:
    root = parsed(
        Disk("d", "/" + path, "raw", readonly=True),
        MetadataEntry("note", value),
        KernelBoot(kernel="/k", cmdline=f"quiet {value} end"),
        Filesystem("f", "/src", "tag" + value),
        sockets={"ua-linux-guest-f": "/run/" + path},
    )
    assert root.find("devices/disk/source").get("file") == "/" + path  # type: ignore[union-attr]
    entry = root.find("metadata/{*}job/{*}entry")
    assert entry is not None
    assert (entry.text or "") == value
    assert root.findtext("os/cmdline") == f"quiet {value} end"
    assert root.find("devices/filesystem/target").get("dir") == "tag" + value  # type: ignore[union-attr]
    assert root.find("devices/filesystem/source").get("socket") == "/run/" + path  # type: ignore[union-attr]
    assert len(list(root.find("devices"))) == len(list(parsed_plain().find("devices"))) + 2  # type: ignore[arg-type]


def parsed_plain() -> ElementTree.Element:
    return parsed(KernelBoot(kernel="/k"))


@pytest.mark.parametrize("bad", ["\x00", "\x01", "\x1b", "\ud800", "\ufffe", "\uffff"])
def test_character_not_allowed_in_xml_is_refused(bad: str) -> None:
    with pytest.raises(Refused, match=rf"U\+{ord(bad):04X}"):
        draw(MetadataEntry("note", f"a{bad}b"))


def test_hostile_job_name_is_escaped() -> None:
    name = "x'/><devices>\"&\n<script"
    root = parsed(guest=guest_plan(job=JobAttempt(name, 0, "ada", 1000, "n1")))
    assert root.find("metadata/{*}job").get("id") == name  # type: ignore[union-attr]
    assert len(root.findall("devices")) == 1


# -- placement --------------------------------------------------------------------------------


def tune(place: Placement, vcpus: int = 2) -> ElementTree.Element:
    return parsed(guest=guest_plan(placement=place, vcpus=vcpus))


def test_guest_without_a_cpu_share_is_not_pinned() -> None:
    root = tune(Placement())
    assert root.find("cputune") is None
    assert root.find("vcpu").attrib == {"placement": "static"}  # type: ignore[union-attr]


def test_cpu_share_restricts_all_threads() -> None:
    root = tune(Placement(share=(7, 5, 6)))
    assert root.find("vcpu").get("cpuset") == "5,6,7"  # type: ignore[union-attr]
    pins = [(p.get("vcpu"), p.get("cpuset")) for p in root.findall("cputune/vcpupin")]
    assert pins == [("0", "5,6,7"), ("1", "5,6,7")]
    assert root.find("cputune/emulatorpin").get("cpuset") == "5,6,7"  # type: ignore[union-attr]


def test_dedicated_cores_are_pinned_one_to_one() -> None:
    cores = {"vcpu": (9, 8), "emulator": (1,)}
    root = tune(Placement(cores=cores, share=(1, 8, 9), own=frozenset({"vcpu"})))
    pins = [(p.get("vcpu"), p.get("cpuset")) for p in root.findall("cputune/vcpupin")]
    assert pins == [("0", "9"), ("1", "8")]
    assert root.find("cputune/emulatorpin").get("cpuset") == "1"  # type: ignore[union-attr]


def test_fewer_cores_than_vcpus_are_shared_by_all() -> None:
    root = tune(Placement(cores={"vcpu": (3,)}), vcpus=3)
    assert [p.get("cpuset") for p in root.findall("cputune/vcpupin")] == ["3", "3", "3"]
    assert root.find("vcpu").get("cpuset") == "3"  # type: ignore[union-attr]


# -- machine ----------------------------------------------------------------------------------


def test_aarch64_boots_a_disk_by_uefi_and_a_kernel_without() -> None:
    guest = guest_plan(image=replace(planned.MICRO, arch="aarch64"))
    disk = parsed(Disk("root", "/d", "qcow2", boot=1), guest=guest)
    assert disk.find("os").get("firmware") == "efi"  # type: ignore[union-attr]
    assert disk.find("os/type").get("machine") == "virt"  # type: ignore[union-attr]
    assert disk.find("features/acpi") is not None
    kernel = parsed(KernelBoot(kernel="/k"), guest=guest)
    assert kernel.find("os").attrib == {}  # type: ignore[union-attr]
    assert kernel.find("features/acpi") is None


@pytest.mark.parametrize(("firmware", "kernel"), [("efi", None), ("bios", None), ("efi", "/k")])
def test_x86_boots_by_uefi_if_the_image_requires_it(firmware: str, kernel: str | None) -> None:
    image = replace(planned.MICRO, kernel=None, labels={"firmware": firmware})
    guest = guest_plan(image=image)
    domain = merged(KernelBoot(kernel=kernel), Disk("root", "/d", "qcow2", boot=1))
    spec = DomainSpec(guest, "kvm", uefi="/f/OVMF.fd")
    loader = read(render(spec, domain)).find("os/loader")
    assert (loader is not None) == ((firmware, kernel) == ("efi", None))
    if loader is not None:
        assert (loader.text, loader.get("readonly")) == ("/f/OVMF.fd", "yes")
        assert loader.get("stateless") == "yes", "UEFI would leave a file of variables"


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(Refused, match="'mips'"):
        draw(guest=guest_plan(image=replace(planned.MICRO, arch="mips")))


def test_kvm_shows_the_host_processor() -> None:
    root = read(render(DomainSpec(guest_plan(), "kvm"), merged()))
    assert root.get("type") == "kvm"
    assert root.find("cpu").get("mode") == "host-passthrough"  # type: ignore[union-attr]
    assert root.find("cpu/feature") is None
    assert parsed().find("cpu").get("mode") == "maximum"  # type: ignore[union-attr]


def test_emulated_guest_does_not_copy_byte_by_byte() -> None:
    """With "rep movsb", which Linux uses if the processor declares that it is fast.

    Linux 6.1 does not boot if the processor has fsrm without erms, as QEMU 10's would.
    """
    features = [feature.attrib for feature in parsed().findall("cpu/feature")]
    assert features == [{"policy": "disable", "name": name} for name in ("erms", "fsrm")]
    arm = draw(guest=guest_plan(image=replace(planned.MICRO, arch="aarch64")))
    assert read(arm).find("cpu/feature") is None


def test_disk_names_continue_after_vdz() -> None:
    names = [disk_target(n) for n in (0, 25, 26, 51, 52, 701, 702)]
    assert names == ["vda", "vdz", "vdaa", "vdaz", "vdba", "vdzz", "vdaaa"]


def test_tap_name_fits_the_kernel() -> None:
    assert tap_name("52:54:00:AB:cd:ef") == "vt525400abcdef"


# -- refusals ---------------------------------------------------------------------------------


def test_unfiltered_nic_is_not_started() -> None:
    with pytest.raises(HostFault, match=r"the packet filter of the guest's NIC .* is missing"):
        draw(nic(0))
    with pytest.raises(ConfigError, match="macvtap"):
        draw(Interface("n", "direct", "eth0", "52:54:00:00:00:01"), taps={"ua-linux-guest-n": "t"})
    free = Interface("n", "direct", "eth0", "52:54:00:00:00:01", filtered=False)
    assert parsed(free).find("devices/interface/source").attrib == {  # type: ignore[union-attr]
        "dev": "eth0",
        "mode": "bridge",
    }


def test_share_without_its_daemon_is_not_started() -> None:
    with pytest.raises(HostFault, match="no daemon serves ua-linux-guest-home of the guest"):
        draw(HOME)


def test_raw_qemu_arguments_need_the_permission_of_the_site() -> None:
    raw = QemuArgs("hyv", ("-device", "x,y='\"<"))
    with pytest.raises(Refused, match="allow_qemu_args"):
        draw(raw)
    spec = DomainSpec(guest_plan(), "tcg", allow_qemu_args=True)
    root = read(render(spec, merged(raw)))
    arguments = root.findall("{*}commandline/{*}arg")
    assert [a.get("value") for a in arguments] == ["-device", "x,y='\"<"]


# -- memory, clock ----------------------------------------------------------------------------


@pytest.mark.parametrize(("accel", "check"), [("kvm", "full"), ("tcg", "none")])
def test_named_processor_replaces_that_of_the_node(
    accel: Literal["kvm", "tcg"], check: str
) -> None:
    root = read(render(DomainSpec(guest_plan(), accel), merged(CpuModel("Westmere"))))
    cpu = root.find("cpu")
    assert cpu is not None
    assert root.find("{*}capabilities") is None  # libvirt checks all features of a named processor
    assert cpu.attrib == {"mode": "custom", "match": "exact", "check": check}
    assert (cpu.findtext("model"), cpu.find("topology") is None) == ("Westmere", False)


def test_memory_backing_is_rendered() -> None:
    root = parsed(MemoryBacking("memfd", True, True, 2048, True))
    backing = root.find("memoryBacking")
    assert backing is not None
    assert [c.tag for c in backing] == ["hugepages", "nosharepages", "locked", "source", "access"]
