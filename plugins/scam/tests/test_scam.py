"""Claims, partitions and messages on recorded machines, and libvirt's schema for the domain.

The machines with cache allocation are in testing/vtorque_testing/machines: in the format of
https://libvirt.org/formatcaps.html and of libvirt's tests (tests/vircaps2xmldata), with numbers of
real machines. This machine may have no cache allocation.
"""

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from vtorque_core.api import Refusal
from vtorque_core.api.claims import CacheClaim, CoreClaim, Notice
from vtorque_core.api.host_topology import Topology
from vtorque_core.api.libvirt_domain import MemoryBacking
from vtorque_core.api.values import Extra, JobRequest
from vtorque_scam import health, node, plugin
from vtorque_testing import planned
from vtorque_testing.planned import NoFit, with_default_group

XEON, EPYC, ARM = map(planned.host, ("smt", "four-nodes", "arm"))  # resctrl divides nothing on ARM
WHOLE = CoreClaim("vcpu", 3, whole_cores=True, key="scam")
PLUGINS = planned.load_with_core("scam", plugin, node)


def on(host=XEON, **settings):
    lines = [f"{name} = {str(value).lower()}" for name, value in settings.items()]
    return planned.PlannedNode.make(PLUGINS, "\n".join(["[plugin.scam]", *lines]), host)


def guests(host=XEON, *vm, **changes):
    one = on(host)
    return one.guests(one.request("scam=true", "vcpus=3", *vm), **changes)


def answers_of(host=XEON, **settings):
    return on(host, **settings).answers(guests(host)[0])


def placed(host, count=1, **settings):
    """Return guests of one job, placed on the empty machine."""
    return on(host, **settings).place(*guests(host, f"vms_per_node={count}"))


def elements(one, **settings):
    return on(one.host, **settings).elements(one)


def domain(one, **settings):
    return on(one.host, **settings).domain(one, accel="kvm")


# -- Requests to the node --------------------------------------------------------------------------


def test_whole_cores_and_cache_are_claimed():
    assert answers_of(cache=6) == [WHOLE, CacheClaim(6144, 3, key="scam")]
    assert on().answers(*on().guests(on().request())) == []


def test_guests_share_no_sibling_and_no_cache_step():
    one, two = (each.placement for each in placed(XEON, 2))
    mine = {*one.cores["vcpu"], *one.idle}
    assert {sibling for cpu in mine for sibling in XEON.siblings(cpu)} == mine
    assert not mine & {*two.cores["vcpu"], *two.idle, *two.cores["emulator"]}
    assert not set(one.leased["cache"]) & set(two.leased["cache"])


def test_idle_siblings_are_requested_from_the_batch_system():
    assert list(plugin.vtorque_needs(guests(XEON, "vms_per_node=2")[0].request)) == [
        Extra(cpus=2, own=True)
    ]
    even = JobRequest({"scam": True, "vcpus": 4, "vms_per_node": 2})
    assert list(plugin.vtorque_needs(even)) == [Extra(cpus=0, own=True)]


def test_more_cache_than_the_node_has_is_refused():
    with pytest.raises(
        NoFit, match=r"scam=.*not enough cache is free .*limit: 11 steps of 4096 KiB"
    ):
        placed(XEON, cache=64)


@pytest.mark.parametrize("host", [ARM, dataclasses.replace(XEON, caches=())], ids=["arm", "none"])
def test_node_without_cache_allocation_is_refused_or_noted(host):
    (cores, refused) = answers_of(host)
    assert cores == WHOLE
    assert isinstance(refused, Refusal)
    assert str(refused) == (
        "scam=true: node n1 has no cache allocation (resctrl, L3) "
        "(set by [plugin.scam] required = true); request another node, or leave out scam"
    )
    (cores, notice) = answers_of(host, required=False)
    assert cores == WHOLE  # other available parts are still granted
    assert isinstance(notice, Notice)
    assert "node n1 has no cache allocation" in notice.text
    assert elements(placed(host, required=False)[0]) == [MemoryBacking(nosharepages=True)]


def test_node_whose_default_group_has_all_cache_is_refused():
    """The state at the start of resctrl: libvirt allocates only outside the default group."""
    full = with_default_group(XEON, "    L3:0=fff;1=fff\n    MB:0=100;1=100\n")
    (_, refused) = answers_of(full)
    assert "no free cache (resctrl's default group has all of L3)" in refused.message
    part = with_default_group(XEON, "L3:0=00f;1=00f\n")
    assert [bank.steps for bank in part.caches] == [8, 8]
    assert answers_of(part) == [WHOLE, CacheClaim(4096, 3, key="scam")]


def test_node_without_bandwidth_allocation_gets_a_notice():
    (_, cache, notice) = answers_of(EPYC, memory_bandwidth=50, required=False)
    assert cache == CacheClaim(4096, 3, key="scam")
    assert "memory bandwidth allocation with cache allocation (resctrl, MB)" in notice.text
    (one,) = placed(EPYC, memory_bandwidth=50, required=False)
    assert elements(one, memory_bandwidth=50)[1].bandwidth == ()


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("host", [ARM, dataclasses.replace(XEON, caches=())], ids=["arm", "none"])
def test_all_missing_features_are_reported(host, required):
    """The limit of the bandwidth is ignored where caches cannot be divided either."""
    (_, *lacking) = answers_of(host, memory_bandwidth=50, required=required)
    said = [str(each) if required else each.text for each in lacking]
    for text, what in zip(said, ("cache allocation (", "memory bandwidth alloc"), strict=True):
        assert f"node n1 has no {what}" in text


def test_bandwidth_limit_without_cache_allocation_is_reported():
    """libvirt sets a limit (memorytune) only beside a part (cachetune), as this plugin does."""
    full = with_default_group(XEON, "    L3:0=fff;1=fff\n    MB:0=100;1=100\n")
    (_, *lacking) = answers_of(full, memory_bandwidth=50, required=False)
    assert elements(placed(full, memory_bandwidth=50, required=False)[0]) == [
        MemoryBacking(nosharepages=True)
    ]
    assert [
        "free cache (resctrl's default group has" in lacking[0].text,
        "bandwidth" in lacking[1].text,
    ] == [True, True]


def test_submit_host_claims_whole_cores_only():
    assert answers_of(Topology()) == [WHOLE]


# -- Allocation of the guest -----------------------------------------------------------------------


def test_cache_partition_and_bandwidth_are_rendered():
    (one,) = placed(XEON, cache=6)
    root = ElementTree.fromstring(domain(one, memory_bandwidth=35))  # noqa: S314 - our own
    (tune,) = root.findall("cputune/cachetune")
    assert tune.get("vcpus") == "0-2"
    assert [cache.attrib for cache in tune] == [
        {"id": "0", "level": "3", "type": "both", "size": "8192", "unit": "KiB"}
    ]
    (limit,) = root.findall("cputune/memorytune")
    assert limit.get("vcpus") == "0-2"
    assert [n.attrib for n in limit] == [{"id": "0", "bandwidth": "40"}]
    assert root.find("memoryBacking/nosharepages") is not None
    assert ElementTree.fromstring(domain(one)).find("cputune/memorytune") is None  # noqa: S314


def test_guest_on_several_caches_has_a_part_of_each():
    (wide,) = on(EPYC).place(*guests(EPYC, vcpus=20))
    (_, tune) = elements(wide)
    below = {bank.id for bank in EPYC.caches if set(bank.cpus) & set(wide.placement.cores["vcpu"])}
    assert len(below) > 1
    assert {bank for _, bank, _ in tune.caches} == below


@pytest.mark.parametrize(
    ("percent", "wanted"), [(1, 10), (10, 10), (11, 20), (95, 100), (99, 100), (-5, 10)]
)
def test_bandwidth_is_rounded_to_steps_of_the_processor(percent, wanted):
    assert node.bandwidth_limit(XEON.caches[0], percent) == wanted


@pytest.mark.integration
@pytest.mark.parametrize("host", [XEON, EPYC, ARM], ids=["xeon", "epyc", "arm"])
def test_domain_matches_the_libvirt_schema(host):
    xml = domain(placed(host, required=False)[0], memory_bandwidth=50)
    planned.check_schema(xml)
    assert ("cachetune" in xml) is (host is not ARM)


# -- vtorque doctor --------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that writes one of the files that the checks read."""
    for name, path in (
        ("RESCTRL", "resctrl"), ("QEMU_CONF", "qemu.conf"), ("SMT", "smt"),
    ):  # fmt: skip
        monkeypatch.setattr(health, name, tmp_path / path)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


@pytest.mark.parametrize(
    ("schemata", "status", "said"),
    [
        (None, "warning", "info/L3 is missing"),
        ("    L3:0=fff;1=fff\n", "warning", "has a whole L3 cache"),
        ("    MB:0=100;1=100\n    L3:0=00f;1=fff\n", "warning", "has a whole L3 cache"),
        ("    L3:0=00f;1=003\n    MB:0=100;1=100\n", "ok", "8 of 12 ways"),
    ],
)
def test_doctor_checks_resctrl(machine, schemata, status, said):
    if schemata is not None:
        machine("resctrl/info/L3/cbm_mask", "fff\n")
        machine("resctrl/schemata", schemata)
    (result,) = health.caches(on().site)
    assert result.status == status
    assert re.search(said, result.message)
    assert (status == "ok") is (result.fix == "")


@pytest.mark.parametrize(
    ("smt", "conf", "status", "said"),
    [
        ("0", None, "ok", "SMT is off"),
        ("1", '#sched_core = "none"\n', "warning", "host's processes"),
        ("1", 'sched_core = "none"\n', "warning", "host's processes"),
        ("1", 'user = "x"\n  sched_core = "full"\n', "ok", "core scheduling: full"),
        ("1", None, "warning", "qemu.conf"),
    ],
)
def test_doctor_checks_core_scheduling(machine, smt, conf, status, said):
    machine("smt", f"{smt}\n")
    if conf is not None:
        machine("qemu.conf", conf)
    (result,) = health.core_scheduling(on().site)
    assert (result.status, said in result.message) == (status, True)
