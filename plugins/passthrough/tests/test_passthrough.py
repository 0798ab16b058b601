"""Cards by class on recorded machines: requested, refused, leased by the real ledger, rendered."""

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api import ConfigError, HostFault, Refusal, Refused
from vtorque_core.api.claims import Notice, PoolClaim
from vtorque_core.api.guest_context import GuestDevice
from vtorque_passthrough import node, plugin
from vtorque_passthrough.plugin import card_list, cards
from vtorque_passthrough.vfio import PciDevice, Vfio
from vtorque_testing import planned
from vtorque_testing.planned import Leases, NoFit
from vtorque_testing.sysfs_tree import tree

CLASSES = """
[[plugin.passthrough.classes]]
name = "gpu"
ids = ["10de:20b0"]
max_per_guest = 2
device = "nvidia[0-9]*"
[[plugin.passthrough.classes]]
name = "render"
ids = ["10de:2204", "10de:1aef"]
[[plugin.passthrough.classes]]
name = "graphics"
ids = ["10de:2204"]
[[plugin.passthrough.classes]]
name = "nic"
ids = ["8086:1572"]
[[plugin.passthrough.classes]]
name = "fpga"
ids = ["10ee:5001"]
allow_no_reset = true
[[plugin.passthrough.classes]]
name = "disk"
ids = ["144d:a808"]
"""
PLUGINS = planned.load_with_core("passthrough", plugin, node)


def site_of(machine, top, classes=CLASSES, more=""):
    sysfs = tree(machine, top / "sys")
    text = f'[plugin.passthrough]\nsysfs = "{sysfs}"\n{more}\n{classes}'
    return planned.PlannedNode.make(PLUGINS, text, "gpu")


@pytest.fixture
def site(tmp_path):
    return site_of("gpu-node", tmp_path)


def guest(site, pci, **changes):
    return site.guests(site.request(*([f"pci={pci}"] if pci else [])), **changes)[0]


def answers(site, pci, **changes):
    return site.answers(guest(site, pci, **changes))


def placed(site, *wishes, taken=None):
    guests = [guest(site, pci) for pci in wishes]
    assert all(isinstance(c, PoolClaim) for each in guests for c in site.answers(each))
    return site.place(*guests, taken=taken)


# -- Options of users ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gpu", "gpu:1"),
        ("gpu:2", "gpu:2"),
        ("gpu:1+fpga:2", "fpga:2+gpu:1"),
        (" a + b:3 ", "a:1+b:3"),
    ],
)
def test_classes_and_numbers_are_parsed(text, shown):
    assert card_list(text) == shown
    assert card_list(shown) == shown


@pytest.mark.parametrize(
    "text",
    ["0000:3b:00.0", "3b:00.0", "3B:00.0", "gpu:1+0000:3b:00.0", "10de:20b0", "00000000:3b:00.0"],
)
def test_pci_address_in_a_request_is_refused(text):
    with pytest.raises(
        ValueError, match="a PCI address or device number, which users cannot request:"
    ):
        cards(text)


@pytest.mark.parametrize(
    "text",
    ["gpu:0", "gpu:", "gpu:100", "gpu:-1", ":1", "GPU:1", "gpu:1+", "gpu;1", "gpu:1 fpga", "g+g",
     "../x", "g\nx", "1gpu", "gpu:\u0661"],
)  # fmt: skip
def test_invalid_text_is_refused(text):
    with pytest.raises(ValueError, match="write CLASS:NUMBER"):
        cards(text)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text):
    try:
        found = cards(text)
    except ValueError:
        return
    assert all(1 <= number <= 99 for number in found.values())
    assert cards(card_list(text)) == found


def test_card_list_separator_is_kept_in_a_command_line():
    request = planned.PlannedNode.make(PLUGINS, CLASSES).request("pci=gpu:1+fpga:2,vcpus=2")
    assert request[plugin.PCI] == "fpga:2+gpu:1"


def test_site_limits_requested_classes(tmp_path):
    limits = '[options.pci]\nallow = ["gpu:[12]", "fpga:*"]\n'
    site = site_of("gpu-node", tmp_path, CLASSES + limits)
    assert guest(site, "gpu")[plugin.PCI] == "gpu:1"
    with pytest.raises(Refused, match=r"pci=gpu:3: is not allowed \(limit: gpu:\[12\], fpga:\*"):
        guest(site, "gpu:3")
    assert guest(site, "gpu:1+fpga")[plugin.PCI] == "fpga:1+gpu:1"
    with pytest.raises(Refused, match=r"pci=fpga:1\+gpu:8: is not allowed"):
        guest(site, "fpga:1+gpu:8")
    site = site_of("gpu-node", tmp_path / "b", CLASSES + '[options.pci]\ndeny = ["gpu:*"]\n')
    with pytest.raises(Refused, match=r"pci=fpga:1\+gpu:1: is not allowed"):
        guest(site, "fpga:1+gpu:1")


# -- Settings of the site --------------------------------------------------------------------------


def test_bad_class_is_a_config_error(tmp_path):
    bad = {
        'name = "GPU"\nids = []': "name='GPU'",
        'name = "gpu"\nids = ["10DE:20b0"]': "'10DE:20b0' must be vendor:device, like",
        'name = "gpu"\nids = ["0000:3b:00.0"]': "must be vendor:device, like",
        'name = "gpu"': "ids: must be set",
        'name = "gpu"\nids = []\ncount = 1': "count: there is no such key",
    }
    for number, (table, problem) in enumerate(bad.items()):
        with pytest.raises(ConfigError, match=problem):
            site_of("gpu-node", tmp_path / str(number), f"[[plugin.passthrough.classes]]\n{table}")


# -- On the node -----------------------------------------------------------------------------------


def test_nothing_is_claimed_without_the_option(site):
    assert answers(site, "") == []
    assert site.elements(guest(site, "")) == []
    assert site.context(guest(site, "")) == []


def test_cards_are_claimed_near_their_numa_node(site):
    (claim,) = answers(site, "gpu:2")
    items = ("0000:3b:00.0", "0000:5e:00.0")
    assert claim == PoolClaim("pci", items, 2, near=dict.fromkeys(items, 0), key="pci")
    (got,) = placed(site, "render:1")
    assert got.placement.nodes in ((1,), ())
    assert got.leased_items("pci") == ("0000:86:00.0",)


def test_guest_gets_all_functions_of_an_iommu_group(site):
    (got,) = placed(site, "render")
    found = site.elements(got)
    assert [f.address for f in found] == ["0000:86:00.0", "0000:86:00.1"]


@pytest.mark.parametrize("first", ["render", "sound"])
def test_card_belongs_to_the_first_class_that_matches_a_function(tmp_path, first):
    """Otherwise the class of a GPU's sound card would give the GPU, against the GPU's limits."""
    ids = {"render": "10de:2204", "sound": "10de:1aef"}
    tables = [
        f'[[plugin.passthrough.classes]]\nname = "{name}"\nids = ["{ids[name]}"]\n'
        f"max_per_guest = {most}\n"
        for name, most in ((first, 1), (({*ids} - {first}).pop(), 2))
    ]
    site = site_of("gpu-node", tmp_path, "".join(tables))
    assert placed(site, first)[0].leased_items("pci") == ("0000:86:00.0",)
    other = ({*ids} - {first}).pop()
    assert f"has no 1 PCI cards of class {other} for guests (usable: 0)" in str(
        answers(site, other)[0]
    )
    with pytest.raises(Refused, match="too many of"):
        guest(site, f"{first}:2")
    (about,) = [r.message for r in node.check(site.site)]
    assert about == f"0000:86:00.0 ({first}, IOMMU group 40): available to guests"


def test_group_with_an_unclassified_function_is_refused_by_name(tmp_path):
    classes = '[[plugin.passthrough.classes]]\nname = "gpu"\nids = ["10de:2204"]'
    (answer,) = answers(site_of("gpu-node", tmp_path, classes), "gpu")
    assert isinstance(answer, Refusal)
    assert "node n1 has no 1 PCI cards of class gpu for guests (usable: 0; IOMMU group 40" in (
        str(answer)
    )
    assert "also contains 0000:86:00.1, 10de:1aef, without a class" in str(answer)
    assert answer.where == "[plugin.passthrough] required = true"


def test_card_in_use_by_the_node_is_refused(site):
    assert "ens5f0 is up" in str(answers(site, "nic")[0])
    assert "nvme0n1" in str(answers(site, "disk")[0])


def test_site_excludes_cards_by_address(tmp_path):
    classes = CLASSES.replace("max_per_guest = 2", 'addresses = ["0000:5*"]', 1)
    (claim,) = answers(site_of("gpu-node", tmp_path, classes), "gpu")
    assert claim.items == ("0000:5e:00.0",)


def test_card_that_cannot_be_reset_needs_allow_no_reset(tmp_path, site):
    (got,) = placed(site, "fpga")
    (card,) = site.elements(got)
    assert card == PciDevice("0000-d8-00-0", "0000:d8:00.0", must_reset=False)
    assert site.pre_boot_resources(got) == [
        (Vfio.for_function(card, got.qemu_uid, site.site[node.Settings].sysfs), got)
    ]
    strict = CLASSES.replace("allow_no_reset = true", "")
    assert "cannot be reset" in str(answers(site_of("gpu-node", tmp_path / "b", strict), "fpga")[0])


def test_allow_no_reset_applies_only_to_functions_of_the_class(tmp_path):
    """A GPU is reset although the class of the sound card in its group does not require it."""
    classes = CLASSES + (
        '[[plugin.passthrough.classes]]\nname = "sound"\nids = ["10de:1aef"]\n'
        "allow_no_reset = true\n"
    )
    site = site_of("gpu-node", tmp_path, classes.replace(', "10de:1aef"]', "]", 1))
    (got,) = placed(site, "render")
    card, sound = site.elements(got)
    assert (card.must_reset, sound.must_reset) == (True, False)


def test_missing_iommu_is_reported_with_a_fix(tmp_path):
    site = site_of("no-iommu", tmp_path)
    (answer,) = answers(site, "gpu")
    assert "0000:3b:00.0 has no IOMMU group" in str(answer)
    assert "it lacks an active IOMMU" in str(answer)


def test_job_runs_without_cards_if_not_required(tmp_path):
    site = site_of("no-iommu", tmp_path, more="required = false")
    (answer,) = answers(site, "gpu:1+fpga:1")
    assert isinstance(answer, Notice)
    assert answer.text.startswith("runs without pci=fpga:1+gpu:1: node n1 has no 1 PCI cards")
    got = guest(site, "gpu")
    assert site.elements(got) == []
    assert site.context(got) == []


def test_request_above_the_class_limit_is_refused_with_the_key(site):
    with pytest.raises(
        Refused, match=r"limit: 2 for each guest, set by \[.*\] classes, max_per_guest"
    ):
        guest(site, "gpu:3")
    with pytest.raises(Refused, match=r"unknown class tpu .limit: gpu, render, graphics, nic"):
        guest(site, "tpu")
    assert answers(site, "gpu", host=dataclasses.replace(site.host, nodes=())) == []  # a front end


def test_every_function_of_a_guests_cards_is_bound_for_the_guest(site):
    one, two = placed(site, "gpu:1", "render:1")
    found = site.pre_boot_resources(one, two)
    assert [(vfio.address, vfio.driver, guest) for vfio, guest in found] == [
        ("0000:3b:00.0", "nvidia", one), ("0000:86:00.0", "nvidia", two),
        ("0000:86:00.1", "snd_hda_intel", two),
    ]  # fmt: skip


def test_card_is_leased_once(site):
    one, two = placed(site, "gpu", "gpu")
    assert set(one.leased_items("pci")).isdisjoint(two.leased_items("pci"))
    with pytest.raises(NoFit, match="3 of pci"):
        placed(site, "gpu", "gpu", "gpu")
    with pytest.raises(NoFit, match="2 of pci"):
        placed(site, "render", "render")
    with pytest.raises(NoFit, match="0 free"):
        placed(site, "render", taken=Leases({"pci": frozenset({"0000:86:00.0"})}))


def test_missing_card_is_a_host_fault(site):
    (got,) = placed(site, "gpu")
    Path(site.site[node.Settings].sysfs, "bus/pci/devices/0000:3b:00.0").unlink()
    with pytest.raises(HostFault, match=r"0000:3b:00\.0: is missing"):
        site.elements(got)


def test_device_nodes_belong_to_the_user_of_the_job(site):
    (got,) = placed(site, "gpu:2+fpga:1")
    assert site.context(got) == [
        GuestDevice("nvidia[0-9]*", "/dev/vtorque/gpu0", 0),
        GuestDevice("nvidia[0-9]*", "/dev/vtorque/gpu1", 1),
    ]


def test_domain_has_the_functions_and_matches_the_libvirt_schema(site):
    (got,) = placed(site, "gpu:2+render:1+fpga:1")
    xml = site.domain(got)
    found = ElementTree.fromstring(xml).findall("devices/hostdev")  # noqa: S314 - our own
    buses = sorted(f.find("source/address").get("bus") for f in found)
    assert buses == ["0x3b", "0x5e", "0x86", "0x86", "0xd8"]
    assert {f.get("managed") for f in found} == {"yes"}
    planned.check_schema(xml)


def test_doctor_reports_each_card(site, tmp_path):
    (known,) = node.vtorque_health_checks()
    said = {r.message: r.status for r in known.check(site.site)}
    assert said["0000:3b:00.0 (gpu, IOMMU group 17): available to guests"] == "ok"
    assert any("ens5f0 is up" in text for text, status in said.items() if status == "warning")
    off = list(node.check(site_of("no-iommu", tmp_path / "b").site))
    assert off[0].status == "failed"
    assert "lacks an active IOMMU" in off[0].fix
    (none,) = node.check(site_of("gpu-node", tmp_path / "c", "").site)
    assert none.status == "ok"
