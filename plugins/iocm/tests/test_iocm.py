"""What users and sites ask for, what the node then claims and renders, and where it has none."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

import planned
from vtorque_core.api.claims import CoreClaim, MemoryClaim, Notice, PoolClaim
from vtorque_core.api.host_topology import Topology, flat
from vtorque_core.api.libvirt_domain import IoThreads, NetQueues, forbidden
from vtorque_core.base.errors import Refused
from vtorque_core.plan.placement import topology
from vtorque_core.plan.placement.divide_cores import plan as place
from vtorque_core.plan.placement.job_cores import NodeShare, NoFit, Taken
from vtorque_core.site.config import build, parse_toml
from vtorque_core.site.policy import decide, needs
from vtorque_core.site.request import Request
from vtorque_iocm import legacy, node, plugin

DATA = Path(__file__).parents[3] / "testing/vtorque_testing/machines"
XEON = topology.parse((DATA / "xeon-2x32-smt.xml").read_text())

PLUGINS = planned.with_core("iocm", plugin, node)


def site(text=""):
    return build(parse_toml(text.encode()), PLUGINS, node=True)


def guest(*pairs, machine=XEON, config=""):
    """Return the first guest of a job, as the node plans it."""
    wanted = decide(Request(tuple(p.split("=") for p in pairs)), site(config), PLUGINS)
    return planned.of_request(wanted, host=machine)


def asked(*pairs, machine=XEON, config=""):
    """Return what the plugin answers for the first guest. Raises Refused."""
    table = f"[plugin.iocm]\n{config}" if config else ""
    first = guest(*pairs, machine=machine, config=table)
    return list(node.vtorque_plan(first, site(table)))


def placed(first, *claims, machine=XEON):
    """Return the guest as the ledger places it."""
    share = NodeShare(machine, exclusive=False)
    every = [CoreClaim("vcpu", first.vcpus), MemoryClaim(first.ram_mib, use="guest"), *claims]
    return dataclasses.replace(first, placement=place([every], share, Taken())[0])


@pytest.mark.parametrize(
    ("pairs", "least", "most"),
    [
        ([], 1, 4),
        (["iocm_min_cores=2"], 2, 4),
        (["iocm_max_cores=3"], 1, 3),
        (["iocm_min_cores=2", "iocm_max_cores=2"], 2, 2),
    ],
)
def test_what_is_claimed(pairs, least, most):
    claim = CoreClaim("io", least, exclusive=True, at_most=most, key="iocm_min_cores")
    assert asked("iocm=true", *pairs) == [claim]


@pytest.mark.parametrize(
    ("pairs", "cpus"),
    [
        ([], 1),
        (["iocm=true"], 2),
        (["iocm=true", "iocm_max_cores=3"], 4),
        (["iocm=true", "iocm_min_cores=2", "vms_per_node=2", "vcpus=4"], 12),
    ],
)
def test_vsub_asks_the_batch_system_for_them(pairs, cpus):
    wanted = decide(Request(tuple(p.split("=") for p in pairs)), site(), PLUGINS)
    assert needs(wanted, site(), PLUGINS).cpus == cpus


def test_nothing_is_claimed_or_rendered_without_it():
    assert asked() == []
    assert list(node.vtorque_render_domain(placed(guest("vcpus=4")), site())) == []


def test_iothreads_for_all_cores_it_may_get_and_a_queue_for_each_vcpu():
    first = guest("iocm=true", "vcpus=4", "iocm_max_cores=3")
    at = placed(first, *asked("iocm=true", "iocm_max_cores=3"))
    assert list(node.vtorque_render_domain(at, site())) == [IoThreads(3), NetQueues(4)]
    assert at.placement.cores["io"] == at.placement.cores["emulator"] == (0,)
    fixed = placed(guest("iocm=true", "vcpus=1"), *asked("iocm=true", "iocm_max_cores=1"))
    assert list(node.vtorque_render_domain(fixed, site())) == [IoThreads(1)]
    many = placed(guest("iocm=true", "vcpus=20"), *asked("iocm=true"))
    assert NetQueues(8) in node.vtorque_render_domain(many, site())


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (
            ["iocm=true", "iocm_min_cores=3", "iocm_max_cores=2"],
            "iocm_min_cores=3: is more than iocm_max_cores (limit: iocm_max_cores=2)",
        ),
        (["iocm=true", "iocm_min_cores=0"], "iocm_min_cores=0: is too few (limit: 1 or more)"),
        (["iocm_max_cores=2"], "iocm_max_cores=2: needs iocm=true"),
        (["iocm_min_cores=1"], "iocm_min_cores=1: needs iocm=true"),
        (["iocm=1"], "iocm=1: is ambiguous"),
        (["iocm=true", "iocm_max_cores=-1"], "iocm_max_cores=-1: is not a whole number"),
    ],
)
def test_keys_that_make_no_sense_are_refused_at_submission(pairs, said):
    with pytest.raises(Refused) as refused:
        guest(*pairs)
    assert said in str(refused.value)


@pytest.mark.parametrize("key", ["iocm_min_cores", "iocm_max_cores"])
def test_more_than_the_site_allows_is_refused_with_the_key_that_says_so(key):
    said = [str(r) for r in asked("iocm=true", f"{key}=3", config="max_cores = 2\n")[:-1]]
    assert said == [f"{key}=3: is more than allowed (limit: 2, set by [plugin.iocm] max_cores)"]
    with pytest.raises(Refused, match="iocm_max_cores=9: is more than allowed"):
        guest("iocm=true", "iocm_max_cores=9", config="[options.iocm_max_cores]\nmax = 8\n")


def test_more_than_the_node_has_is_refused_by_the_ledger():
    machine = flat((0, 1, 2, 3), 8192)
    with pytest.raises(NoFit, match=r"iocm_min_cores=.*more than the job can have.*limit: 4 CPUs"):
        placed(guest("iocm=true"), *asked("iocm=true", "iocm_min_cores=4"), machine=machine)
    machine = flat((0, 1), 8192)
    said = r"iocm_min_cores=2: 2 CPUs of their own and 1 shared, 3 in all: .*limit: 2 CPUs"
    with pytest.raises(NoFit, match=said):
        placed(guest("iocm=true"), *asked("iocm=true", "iocm_min_cores=2"), machine=machine)


@pytest.mark.parametrize(
    ("config", "machine", "what"),
    [
        ("enabled = false\n", XEON, "has no I/O cores ([plugin.iocm] enabled = false)"),
        ('nodes = "io[0-9]+"\n', XEON, "has no I/O cores (its name is not one of"),
        ('nodes = "n"\n', XEON, "has no I/O cores (its name is not one of"),
        ('backend = "legacy"\n', XEON, "has no /sys/class/vhost/worker"),
        ("max_cores = 4\n", flat((0,), 1024), "has no second CPU"),
    ],
)
def test_a_node_without_io_cores(config, machine, what):
    (refusal,) = asked("iocm=true", machine=machine, config=config)
    assert what in str(refusal)
    assert str(refusal).startswith("iocm=true: node n1 ")
    assert "[plugin.iocm] required = true" in str(refusal)
    config += "required = false\n"
    (notice,) = asked("iocm=true", machine=machine, config=config)
    assert isinstance(notice, Notice)
    assert what.replace("has no", "has no") in notice.text
    assert list(node.vtorque_render_domain(placed(guest("iocm=true")), site())) == []


def test_the_name_of_a_node_that_has_them():
    assert len(asked("iocm=true", config='nodes = "n[0-9]+"\n')) == 1


def test_a_front_end_knows_nothing_of_the_node(monkeypatch):
    monkeypatch.setattr(legacy, "there", lambda: pytest.fail("a front end looks at itself"))
    (claim,) = asked("iocm=true", machine=Topology(), config='nodes = "io"\n')
    assert claim.at_most == 4


def test_the_legacy_manager_takes_its_cores_from_the_vcpus(monkeypatch):
    monkeypatch.setattr(legacy, "there", lambda: True)
    claim, pool = asked("iocm=true", "iocm_min_cores=2")
    assert (claim.count, claim.at_most) == (2, None)
    assert pool == PoolClaim("iocm-manager", ("dynamic-io-manager",), key="iocm")
    second = dataclasses.replace(guest("iocm=true"), index=1)
    assert len(list(node.vtorque_plan(second, site()))) == 1
    assert asked("iocm=true", config='backend = "native"\n')[0].at_most == 4


@pytest.mark.parametrize("there", [True, False])
def test_only_what_the_legacy_manager_has_cannot_be_saved(monkeypatch, there):
    at = placed(guest("iocm=true"), *asked("iocm=true"))
    monkeypatch.setattr(legacy, "there", lambda: there)
    found = list(node.vtorque_render_domain(at, site()))
    assert forbidden("save", found) == ["SharedWorkers"] * there


def test_nothing_is_started_for_a_job_without_io_cores():
    job = SimpleNamespace(
        guests=[placed(guest("iocm=true"))], site=site(), acquire=lambda *_, **__: pytest.fail()
    )
    node.vtorque_post_boot(job)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("busy", 0.0, "busy must be over 0"),
        ("busy", 80.0, "at most 1"),
        ("interval", 0.0, "interval over 0"),
        ("nodes", "*", "nodes is not a regular expression"),
    ],
)
def test_a_bad_setting_is_an_error_of_the_config(key, value, why):
    with pytest.raises(ValueError, match=why):
        node.Settings(**{key: value})
