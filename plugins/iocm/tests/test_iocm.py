"""Options and settings of iocm, the resulting claims and domain, and nodes without I/O cores."""

import dataclasses
from types import SimpleNamespace

import pytest

from vtorque_core.api import Refused
from vtorque_core.api.claims import CoreClaim, Notice, Placement
from vtorque_core.api.host_topology import Topology, flat
from vtorque_core.api.libvirt_domain import IoThreads, NetQueues, find_forbidding
from vtorque_iocm import node, plugin
from vtorque_testing import planned
from vtorque_testing.planned import NoFit

XEON = planned.host("smt")

PLUGINS = planned.load_with_core("iocm", plugin, node)


def on(machine=XEON, config=""):
    return planned.PlannedNode.make(PLUGINS, config, machine)


def guest(*pairs, machine=XEON, config=""):
    """Return the first guest of a job, as planned by the node."""
    one = on(machine, config)
    return one.guests(one.request(*pairs))[0]


def answers_of(*pairs, machine=XEON, config=""):
    """Return the plugin's answers for the first guest. Raises Refused."""
    table = f"[plugin.iocm]\n{config}" if config else ""
    return on(machine, table).answers(guest(*pairs, machine=machine, config=table))


def placed(*pairs, machine=XEON, config=""):
    """Return the first guest as placed by the ledger."""
    table = f"[plugin.iocm]\n{config}" if config else ""
    return on(machine, table).place(guest(*pairs, machine=machine, config=table))[0]


def rendered(guest, config=""):
    return on(XEON, config and f"[plugin.iocm]\n{config}").elements(guest)


@pytest.mark.parametrize(
    ("pairs", "least", "most"),
    [
        ([], 1, 4),
        (["iocm_min_cores=2"], 2, 4),
        (["iocm_max_cores=3"], 1, 3),
        (["iocm_min_cores=2", "iocm_max_cores=2"], 2, 2),
    ],
)
def test_io_cores_are_claimed_within_the_requested_limits(pairs, least, most):
    claim = CoreClaim("io", least, exclusive=True, at_most=most, key="iocm_min_cores")
    assert answers_of("iocm=true", *pairs) == [claim]


@pytest.mark.parametrize(
    ("pairs", "cpus"),
    [
        ([], 1),
        (["iocm=true"], 2),
        (["iocm=true", "iocm_max_cores=3"], 4),
        (["iocm=true", "iocm_min_cores=2", "vms_per_node=2", "vcpus=4"], 12),
    ],
)
def test_vsub_requests_io_cores_from_the_batch_system(pairs, cpus):
    assert on().needs(*pairs).cpus == cpus


def test_nothing_is_claimed_or_rendered_without_the_option():
    assert answers_of() == []
    assert rendered(placed("vcpus=4")) == []


def test_iothreads_match_the_largest_number_of_cores_and_queues_the_vcpus():
    at = placed("iocm=true", "vcpus=4", "iocm_max_cores=3")
    assert rendered(at) == [IoThreads(3), NetQueues(4)]
    assert at.placement.cores["io"] == at.placement.cores["emulator"] == (0,)
    assert rendered(placed("iocm=true", "vcpus=1", "iocm_max_cores=1")) == [IoThreads(1)]
    assert NetQueues(8) in rendered(placed("iocm=true", "vcpus=20"))


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (
            ["iocm=true", "iocm_min_cores=3", "iocm_max_cores=2"],
            "iocm_min_cores=3: is more than iocm_max_cores (limit: iocm_max_cores=2)",
        ),
        (["iocm=true", "iocm_min_cores=0"], "iocm_min_cores=0: is too small (limit: 1 or more)"),
        (["iocm_max_cores=2"], "iocm_max_cores=2: needs iocm=true"),
        (["iocm_min_cores=1"], "iocm_min_cores=1: needs iocm=true"),
        (["iocm=1"], "iocm=1: is ambiguous"),
        (["iocm=true", "iocm_max_cores=-1"], "iocm_max_cores=-1: is not a whole number"),
    ],
)
def test_contradicting_keys_are_refused_at_submission(pairs, said):
    with pytest.raises(Refused) as refused:
        guest(*pairs)
    assert said in str(refused.value)


@pytest.mark.parametrize("key", ["iocm_min_cores", "iocm_max_cores"])
def test_value_above_the_site_limit_is_refused_with_the_key(key):
    said = [str(r) for r in answers_of("iocm=true", f"{key}=3", config="max_cores = 2\n")[:-1]]
    assert said == [f"{key}=3: is more than allowed (limit: 2, set by [plugin.iocm] max_cores)"]
    with pytest.raises(Refused, match="iocm_max_cores=9: is more than allowed"):
        guest("iocm=true", "iocm_max_cores=9", config="[options.iocm_max_cores]\nmax = 8\n")


def test_more_cores_than_the_node_has_are_refused_by_the_ledger():
    machine = flat((0, 1, 2, 3), 8192)
    with pytest.raises(NoFit, match=r"iocm_min_cores=.*more than the job can have.*limit: 4 CPUs"):
        placed("iocm=true", "iocm_min_cores=4", machine=machine)
    machine = flat((0, 1), 8192)
    said = r"iocm_min_cores=2: 2 exclusive and 1 shared CPUs \(3 in total\).*limit: 2 CPUs"
    with pytest.raises(NoFit, match=said):
        placed("iocm=true", "iocm_min_cores=2", machine=machine)


@pytest.mark.parametrize(
    ("config", "machine", "what"),
    [
        ("enabled = false\n", XEON, "has no I/O cores ([plugin.iocm] enabled = false)"),
        ('nodes = "io[0-9]+"\n', XEON, "has no I/O cores (its name does not match"),
        ('nodes = "n"\n', XEON, "has no I/O cores (its name does not match"),
        ("max_cores = 4\n", flat((0,), 1024), "has no second CPU"),
    ],
)
def test_node_without_io_cores_refuses_the_option(config, machine, what):
    (refusal,) = answers_of("iocm=true", machine=machine, config=config)
    assert what in str(refusal)
    assert str(refusal).startswith("iocm=true: node n1 ")
    assert "[plugin.iocm] required = true" in str(refusal)
    config += "required = false\n"
    (notice,) = answers_of("iocm=true", machine=machine, config=config)
    assert isinstance(notice, Notice)
    assert what.replace("has no", "has no") in notice.text
    without = placed("iocm=true", machine=machine, config=config)
    assert on(machine, f"[plugin.iocm]\n{config}").elements(without) == []


def test_node_whose_name_matches_nodes_has_io_cores():
    assert len(answers_of("iocm=true", config='nodes = "n[0-9]+"\n')) == 1


def test_submit_host_claims_the_largest_number():
    (claim,) = answers_of("iocm=true", machine=Topology(), config='nodes = "io"\n')
    assert claim.at_most == 4


def test_iocm_forbids_neither_save_nor_migrate():
    found = rendered(placed("iocm=true"))
    assert find_forbidding("save", found) == find_forbidding("migrate", found) == []


def test_job_without_io_cores_starts_no_manager():
    one = dataclasses.replace(placed("iocm=true"), placement=Placement())
    job = SimpleNamespace(guests=[one], site=on().site, acquire=lambda *_, **__: pytest.fail())
    node.vtorque_post_boot(job)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("busy_threshold", 0.0, "busy_threshold must be more than 0 and at"),
        ("busy_threshold", 80.0, "at most 1"),
        ("interval", 0.0, "busy_threshold must be more than 0 and"),
        ("nodes", "*", "nodes is not a regular expression"),
    ],
)
def test_bad_setting_is_a_config_error(key, value, why):
    with pytest.raises(ValueError, match=why):
        node.Settings(**{key: value})
