"""Addresses follow from node, slot and guest alone; a plan without room is named."""

from dataclasses import replace

import pytest

from vtorque_core import network
from vtorque_core.api_batch import BatchJob
from vtorque_core.config_schema import Network
from vtorque_core.errors import HostFault

PLAN = Network(subnet="10.0.0.0/24", first=10, per_node=4)


def on(*nodes: str, node: str = "", job_id: str = "42.srv") -> BatchJob:
    return BatchJob(id=job_id, owner="u", node=node or nodes[0], nodes=nodes, blob=b"")


@pytest.mark.parametrize(
    ("node", "number"), [("node7", 7), ("n012.cluster.org", 12), ("login", 0), ("a1b", 0)]
)
def test_a_nodes_number_is_in_its_name(node, number):
    assert network.node_number(node, PLAN.node_number) == number


def test_candidates_of_two_nodes_do_not_overlap():
    one = network.claim(PLAN, on("node1"), 1, 0).items
    two = network.claim(PLAN, on("node2"), 1, 0).items
    assert one == ("10.0.0.14", "10.0.0.15", "10.0.0.16", "10.0.0.17")
    assert not set(one) & set(two)


def test_a_node_outside_the_subnet_is_a_host_fault_naming_the_plan():
    with pytest.raises(HostFault, match=r"node99.*10\.0\.0\.0/24.*subnet"):
        network.claim(PLAN, on("node99"), 1, 0)


@pytest.mark.parametrize("change", [{"kind": "none"}, {"addressing": "dhcp"}])
def test_without_assignment_nothing_is_claimed(change):
    assert network.claim(replace(PLAN, **change), on("node1"), 1, 0) is None


def test_the_sites_program_assigns(tmp_path):
    program = tmp_path / "addresses"
    program.write_text('#!/bin/sh\necho "192.168.$2.1$3"\n')
    program.chmod(0o755)
    plan = replace(PLAN, addressing="command", command=str(program))
    assert network.claim(plan, on("node1"), 2, 1).items == ("192.168.2.11",)


@pytest.mark.parametrize("answer", ["", "localhost", "10.0.0.1 10.0.0.2", "::1"])
def test_a_wrong_answer_of_the_sites_program_is_named(tmp_path, answer):
    program = tmp_path / "addresses"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    with pytest.raises(HostFault, match="is not an IPv4 address"):
        network.claim(replace(PLAN, addressing="command", command=str(program)), on("n1"), 1, 0)


def test_an_assigned_nic_has_gateway_prefix_and_dns():
    plan = replace(PLAN, dns=("9.9.9.9",))
    nic = network.address(plan, "52:54:00:00:00:01", "10.0.0.14")
    assert (nic.prefix, nic.gateway, nic.dns) == (24, "10.0.0.1", ("9.9.9.9",))


def test_a_dhcp_nic_has_only_its_mac():
    assert network.address(PLAN, "52:54:00:00:00:01", None).ip is None


WIDE = replace(PLAN, subnet="10.0.0.0/16", per_node=16)


def test_all_nodes_of_a_job_compute_the_same_addresses():
    nodes = ("node1", "node2", "node3")
    seen = {
        at: [network.address_of(WIDE, on(*nodes, node=at), n, 2, i) for n in nodes for i in (0, 1)]
        for at in nodes
    }
    assert seen["node1"] == seen["node2"] == seen["node3"]
    assert len(set(seen["node1"])) == 6
    for at, index in ((at, index) for at in nodes for index in (0, 1)):
        claim = network.claim(WIDE, on(*nodes, node=at), 2, index)
        assert claim.items == (seen["node1"][2 * nodes.index(at) + index],)


def test_jobs_that_follow_each_other_get_other_addresses():
    ids = [*(f"{n}.srv" for n in range(40, 44)), *(f"44[{n}].srv" for n in range(4))]
    found = [network.address_of(WIDE, on("n1", "n2", job_id=i), "n1", 1, 0) for i in ids]
    assert len(set(found)) == 8
    alone = network.claim(WIDE, on("n1"), 1, 0).items
    assert set(found) == set(alone[8:])  # jobs on one node take the lower half first


def test_more_guests_than_half_of_a_nodes_addresses_do_not_span_nodes():
    with pytest.raises(HostFault, match="per_node is 16"):
        network.address_of(WIDE, on("n1", "n2"), "n1", 9, 0)
