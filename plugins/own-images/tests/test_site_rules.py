"""Conditions of a site with an administrator: networks, confinement, file size, warm guests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vtorque_admin import doctor
from vtorque_core.api import HostFault, Image, JobRequest, Refused
from vtorque_core.api.boot_source import BootSource
from vtorque_core.api.guest_plan import Address, GuestPlan
from vtorque_core.api.libvirt_domain import find_forbidding
from vtorque_core.live import libvirt
from vtorque_core.live.site_config import Plugins
from vtorque_own_images import node as of_node
from vtorque_own_images import plugin, site_rules
from vtorque_own_images.job_filter import JobFilter
from vtorque_own_images.node import tools_check, vtorque_plan, vtorque_render_domain
from vtorque_testing import planned

FILE = f"/home/ada/.cache/vtorque/images/{'a' * 64}.squashfs"
IMAGE = Image(
    "own:aaa", "linux", "container", "x86_64", "", disk=Path("/p/own/root.qcow2"),
    kernel=Path("/p/own/vmlinux"), labels={"init": "micro"}, source=FILE,
)  # fmt: skip
REQUEST = JobRequest({"img": FILE, "root": "", "work": "home", "fs_type": "sharedfs"})
ALLOW = "[plugin.own-images]\nallow = true\n"
ACCEPT = f"{ALLOW}opt_in_unconfined_qemu = true\n"
NAT = "<network><forward mode='nat'/><bridge name='virbr1'/></network>"
EXTRA = '[networks.hpc]\nsubnet = "10.186.0.0/16"\nsource = "hpc"\nkind = '


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    """Return all installed plugins."""
    return Plugins.load(node=True)


@pytest.fixture
def libvirt_of_node(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what libvirt and the kernel of the node say; a test can change it."""
    says: dict[str, Any] = {"network": NAT, "models": {"apparmor": ""}, "conf": {}}
    monkeypatch.setattr(libvirt, "network_xml", lambda _uri, _name: says["network"])
    monkeypatch.setattr(doctor, "security_models", lambda _: says["models"])
    monkeypatch.setattr(doctor, "qemu_settings", lambda _: says["conf"])
    return says


@pytest.fixture
def refusals(plugins: Plugins, libvirt_of_node: dict[str, Any]) -> Callable[..., list[str]]:
    """Return a function that returns the node's refusals of a guest by a site config."""
    assert libvirt_of_node

    def answer(text: str, **changes: Any) -> list[str]:
        site = planned.PlannedNode.make(plugins, text).site
        return [str(each) for each in vtorque_plan(own_guest(**changes), site)]

    return answer


def own_guest(**changes: Any) -> GuestPlan:
    values = {"image": IMAGE, "request": REQUEST, "host": planned.host("smt")}
    return planned.guest_plan(**values | changes)


def test_confined_node_with_nat_runs_own_images(refusals: Callable[..., list[str]]) -> None:
    assert refusals(ALLOW) == []


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"models": {"dac": "+64055:+994"}}, "neither AppArmor nor SELinux"),
        ({"models": {}}, "neither AppArmor nor SELinux"),
        ({"conf": {"seccomp_sandbox": "0"}}, "seccomp_sandbox = 0"),
        ({"conf": {"security_default_confined": "0"}}, "security_default_confined = 0"),
        ({"conf": {"clear_emulator_capabilities": "0"}}, "clear_emulator_capabilities = 0"),
    ],
)
def test_missing_confinement_is_refused_unless_the_site_accepts_the_risk(
    refusals: Callable[..., list[str]], libvirt_of_node: dict[str, Any], says: Any, why: str
) -> None:
    libvirt_of_node.update(says)
    (refused,) = refusals(ALLOW)
    assert why in refused and "opt_in_unconfined_qemu" in refused
    assert refusals(ACCEPT) == []


def test_common_uid_of_guests_is_refused(refusals: Callable[..., list[str]]) -> None:
    found = refusals(f"{ALLOW}[node]\nguest_uids = 0\n")
    assert any("no uid per guest" in each for each in found)
    assert refusals(f"{ACCEPT}[node]\nguest_uids = 0\n") == []


def test_disk_on_an_architecture_without_uid_per_guest_is_refused(
    refusals: Callable[..., list[str]],
) -> None:
    (refused,) = refusals(ALLOW, image=replace(IMAGE, arch="aarch64", kernel=None, labels={}))[:1]
    assert "no separate uid on this architecture" in refused


def test_permissive_selinux_is_refused(
    refusals: Callable[..., list[str]], libvirt_of_node: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    libvirt_of_node["models"] = {"selinux": ""}
    monkeypatch.setattr(site_rules, "ENFORCE", tmp_path / "enforce")
    for content, count in (("1", 0), ("0", 1), ("0\n", 1)):
        (tmp_path / "enforce").write_text(content)
        assert len(refusals(ALLOW)) == count


def test_unknown_confinement_is_refused(
    refusals: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> dict[str, str]:
        raise HostFault("libvirtd does not answer")

    monkeypatch.setattr(doctor, "security_models", fail)
    (refused,) = refusals(ALLOW)
    assert "is unknown: libvirtd does not answer" in refused


@pytest.mark.parametrize(
    ("network", "why"),
    [
        ('[network]\nkind = "bridge"\nsource = "br0"\n', 'kind is "bridge"'),
        ('[network]\nkind = "direct"\nsource = "e0"\nopt_in_unfiltered = true\n', '"direct"'),
        ('[network]\naddressing = "dhcp"\n', 'addressing is "dhcp"'),
        ('[network]\naddressing = "command"\ncommand = "/bin/true"\n', '"command"'),
        ("[network]\nfilter = false\nopt_in_unfiltered = true\n", "filter is false"),
        (f'{EXTRA}"network"\naddressing = "none"\n', 'hpc] addressing is "none"'),
        (f'{EXTRA}"bridge"\n', 'hpc] kind is "bridge"'),
        (f'{EXTRA}"direct"\nopt_in_unfiltered = true\n', 'hpc] kind is "direct"'),
        (f'{EXTRA}"network"\nfilter = false\nopt_in_unfiltered = true\n', "hpc] filter is false"),
    ],
)
@pytest.mark.parametrize("allow", [ALLOW, ACCEPT])
def test_network_that_the_node_cannot_filter_is_refused(
    refusals: Callable[..., list[str]], network: str, why: str, allow: str
) -> None:
    (refused,) = refusals(allow + network)
    assert why in refused


@pytest.mark.parametrize(
    ("xml", "count"),
    [
        (NAT, 0), ("<network><forward/></network>", 0), ("<network><bridge/></network>", 0),
        (NAT.replace("nat", "route"), 1), (NAT.replace("nat", "open"), 1),
        (NAT.replace("nat", "bridge"), 1), (NAT.replace("nat", "hostdev"), 1), (None, 1),
    ],
)  # fmt: skip
def test_network_with_another_forward_mode_is_refused(
    refusals: Callable[..., list[str]], libvirt_of_node: dict[str, Any], xml: str | None, count: int
) -> None:
    libvirt_of_node["network"] = xml
    assert len(refusals(ACCEPT)) == count


def test_job_without_network_is_allowed(refusals: Callable[..., list[str]]) -> None:
    assert refusals(f'{ALLOW}[network]\nkind = "none"\n') == []


def test_image_of_the_pool_needs_nothing(
    refusals: Callable[..., list[str]], libvirt_of_node: dict[str, Any]
) -> None:
    libvirt_of_node["models"] = {}
    text = f'{ALLOW}[network]\nkind = "bridge"\nsource = "br0"\n'
    assert refusals(text, image=replace(IMAGE, source="")) == []


class Checkpoint(BootSource):
    """A boot source of a plugin."""

    name = "checkpoint"


def test_restored_guest_is_refused(refusals: Callable[..., list[str]]) -> None:
    with pytest.raises(Refused, match="cannot start from the boot source checkpoint"):
        refusals(ALLOW, source=Checkpoint())


def test_guest_of_own_image_cannot_be_saved_or_migrated(plugins: Plugins) -> None:
    site = planned.PlannedNode.make(plugins, ALLOW).site
    found = list(vtorque_render_domain(own_guest(), site))
    assert find_forbidding("save", found) == find_forbidding("migrate", found) == ["OwnImage"]
    assert list(vtorque_render_domain(own_guest(image=replace(IMAGE, source="")), site)) == []
    planned.check_schema(planned.domain(own_guest(), found))


ADDRESSES = (
    Address("52:54:00:aa:bb:01", "10.86.0.16", 16, "10.86.0.1", dhcp=False),
    Address("52:54:00:aa:bb:02", "10.186.0.16", 16, None, network="hpc", dhcp=False),
)


@pytest.fixture
def node(libvirt_of_node: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> planned.PlannedNode:
    """Return a node with two networks, whose size check of files succeeds."""
    assert libvirt_of_node
    monkeypatch.setattr(site_rules, "_require_size", lambda *_: None)
    alone = planned.load_with_core("own-images", plugin, of_node)
    return planned.PlannedNode.make(alone, f'{ACCEPT}{EXTRA}"network"\n')


def test_each_nic_of_a_job_gets_a_filter(node: planned.PlannedNode) -> None:
    other = Address("52:54:00:aa:bb:03", "10.86.0.17", 16, "10.86.0.1", dhcp=False)
    first = own_guest(addresses=ADDRESSES)
    second = own_guest(addresses=(other,), index=1)
    found = [each for each, _ in node.pre_boot_resources(first, second)]
    taps = ("vt525400aabb01", "vt525400aabb02", "vt525400aabb03")
    own = ("10.86.0.16", "10.186.0.16", "10.86.0.17")
    subnets = ("10.86.0.0/16", "10.186.0.0/16")
    assert found == [
        JobFilter(taps[0], "10.86.0.1", own, taps, subnets),
        JobFilter(taps[1], "", own, taps, subnets),
        JobFilter(taps[2], "10.86.0.1", own, taps, subnets),
    ]
    assert node.pre_boot_resources(own_guest(image=replace(IMAGE, source=""))) == []


@pytest.mark.parametrize("change", [{"ip": None}, {"filtered": False}])
def test_nic_without_filter_or_address_is_refused_before_the_boot(
    node: planned.PlannedNode, change: dict[str, Any]
) -> None:
    with pytest.raises(Refused, match="no packet filter or no static addresses"):
        node.pre_boot_resources(own_guest(addresses=(replace(ADDRESSES[0], **change),)))


def test_warm_guest_is_refused_before_the_boot(node: planned.PlannedNode) -> None:
    with pytest.raises(Refused, match="boot source checkpoint"):
        node.pre_boot_resources(own_guest(source=Checkpoint()))


@pytest.mark.parametrize(
    ("size", "why"),
    [(4 << 20, ""), ((4 << 20) + 512, "the limit is 4M"), (0, "has 0 bytes"), (None, "image")],
)
def test_larger_file_than_the_limit_is_refused(
    tmp_path: Path, size: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node reads the size of the file that the user's process has open, not of the name."""

    def served(lock: Path, status: Callable[[Path], Any]) -> Any:
        assert lock == tmp_path / "disk-image.lock"
        if size is None:
            raise HostFault("no process serves the image")
        (tmp_path / "file").write_bytes(b"")
        with (tmp_path / "file").open("r+b") as file:
            file.truncate(size)
        return status(tmp_path / "file")

    monkeypatch.setattr("vtorque_core.live.suspend.served_file", served)
    guest = own_guest(run_dir=tmp_path)
    if not why:
        site_rules._require_size(guest, 4)
        return
    with pytest.raises(Refused, match=why):
        site_rules._require_size(guest, 4)


@pytest.mark.parametrize("text", ["'; flush ruleset; '", "10.86.0.300", "10.86.0.0/16, 0.0.0.0/0"])
def test_filter_rejects_anything_but_addresses(text: str) -> None:
    for made in (
        JobFilter("vt525400aabb01", text, ("10.86.0.16",), ("vt525400aabb01",), ("10.86.0.0/16",)),
        JobFilter("vt525400aabb01", "", (text,), ("vt525400aabb01",), ("10.86.0.0/16",)),
        JobFilter("vt525400aabb01", "", ("10.86.0.16",), ("vt525400aabb01",), (text,)),
    ):
        with pytest.raises(ValueError, match=r"10\.86|ruleset"):
            assert made.script


def test_doctor_says_what_is_missing(
    plugins: Plugins,
    libvirt_of_node: dict[str, Any],
    tmp_path: Path,
) -> None:
    def results(text: str) -> list[tuple[str, str]]:
        site = planned.PlannedNode.make(plugins, text).site
        return [(each.status, each.message) for each in tools_check(site)]

    assert results("") == [
        ("ok", "users' own images are refused ([plugin.own-images] allow = false)")
    ]
    pool = f'[images]\npool = "{tmp_path}"\n'
    libvirt_of_node.update(models={}, conf={"seccomp_sandbox": "0"}, network=None)
    found = results(ALLOW + pool)
    failed = [message for status, message in found if status == "failed"]
    assert len(failed) == 4, found
    for word in ("inactive", "AppArmor", "seccomp_sandbox = 0", "base image own"):
        assert any(word in message for message in failed)
    accepted = [message for status, message in results(ACCEPT + pool) if status == "warning"]
    assert sum("own images run although" in message for message in accepted) == 2
    libvirt_of_node.update(models={"apparmor": ""}, conf={}, network=NAT)
    (tmp_path / "own").mkdir()
    assert all(status != "failed" for status, _ in results(ALLOW + pool))
