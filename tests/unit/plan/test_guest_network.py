"""Addresses follow from node, slot and guest alone; a plan without room is named."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from vtorque_core.api.batch_system import BatchJob
from vtorque_core.api.claims import Placement
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.base import names
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.config.schema import ExtraNetwork, Network
from vtorque_core.config.site_config import Site
from vtorque_core.plan import guest_network

PLAN = Network(subnet="10.0.0.0/24", first=10, per_node=4)


def on(*nodes: str, node: str = "", job_id: str = "42.srv") -> BatchJob:
    return BatchJob(id=job_id, owner="u", node=node or nodes[0], nodes=nodes, blob=b"")


@pytest.mark.parametrize(
    ("node", "number"), [("node7", 7), ("n012.cluster.org", 12), ("login", 0), ("a1b", 0)]
)
def test_node_number_is_parsed_from_the_node_name(node, number):
    assert guest_network.node_number(node, PLAN.node_number) == number


def test_candidates_of_two_nodes_do_not_overlap():
    one = guest_network.claim(PLAN, on("node1"), 1, 0).items
    two = guest_network.claim(PLAN, on("node2"), 1, 0).items
    assert one == ("10.0.0.14", "10.0.0.15", "10.0.0.16", "10.0.0.17")
    assert not set(one) & set(two)


def test_node_outside_the_subnet_is_a_host_fault_naming_the_plan():
    with pytest.raises(HostFault, match=r"node99.*10\.0\.0\.0/24.*subnet"):
        guest_network.claim(PLAN, on("node99"), 1, 0)


@pytest.mark.parametrize("change", [{"kind": "none"}, {"addressing": "dhcp"}])
def test_network_without_static_addresses_claims_nothing(change):
    assert guest_network.claim(replace(PLAN, **change), on("node1"), 1, 0) is None


def test_address_program_of_the_site_assigns_addresses(tmp_path):
    program = tmp_path / "addresses"
    program.write_text('#!/bin/sh\necho "192.168.$2.1$3"\n')
    program.chmod(0o755)
    plan = replace(PLAN, addressing="command", command=str(program))
    assert guest_network.claim(plan, on("node1"), 2, 1).items == ("192.168.2.11",)


@pytest.mark.parametrize("answer", ["", "localhost", "10.0.0.1 10.0.0.2", "::1"])
def test_wrong_answer_of_the_address_program_is_named(tmp_path, answer):
    program = tmp_path / "addresses"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    with pytest.raises(HostFault, match="is not an IPv4 address"):
        guest_network.claim(
            replace(PLAN, addressing="command", command=str(program)), on("n1"), 1, 0
        )


def test_assigned_nic_has_gateway_prefix_and_dns():
    plan = replace(PLAN, dns=("9.9.9.9",), search=("a.example",))
    nic = guest_network.address(plan, "52:54:00:00:00:01", "10.0.0.14")
    assert (nic.prefix, nic.gateway) == (24, "10.0.0.1")
    assert (nic.dns, nic.search) == (("9.9.9.9",), ("a.example",))


def test_site_sets_the_prefix_of_macs():
    one, other = (names.guest_mac(b"secret", "vm-0", nic, "02:00:5e") for nic in (0, 1))
    assert re.fullmatch("02:00:5e(:[0-9a-f]{2}){3}", one) and one != other


def test_dhcp_nic_has_no_address():
    assert guest_network.address(PLAN, "52:54:00:00:00:01", None).ip is None


WIDE = replace(PLAN, subnet="10.0.0.0/16", per_node=16)


def test_all_nodes_of_a_job_compute_the_same_addresses():
    nodes = ("node1", "node2", "node3")
    seen = {
        at: [
            guest_network.address_of(WIDE, on(*nodes, node=at), n, 2, i)
            for n in nodes
            for i in (0, 1)
        ]
        for at in nodes
    }
    assert seen["node1"] == seen["node2"] == seen["node3"]
    assert len(set(seen["node1"])) == 6
    for at, index in ((at, index) for at in nodes for index in (0, 1)):
        claim = guest_network.claim(WIDE, on(*nodes, node=at), 2, index)
        assert claim.items == (seen["node1"][2 * nodes.index(at) + index],)


def test_consecutive_jobs_get_different_addresses():
    ids = [*(f"{n}.srv" for n in range(40, 44)), *(f"44[{n}].srv" for n in range(4))]
    found = [guest_network.address_of(WIDE, on("n1", "n2", job_id=i), "n1", 1, 0) for i in ids]
    assert len(set(found)) == 8
    alone = guest_network.claim(WIDE, on("n1"), 1, 0).items
    assert set(found) == set(alone[8:])  # jobs on one node take the lower half first


def test_more_guests_than_half_of_a_nodes_addresses_do_not_span_nodes():
    with pytest.raises(HostFault, match="per_node is 16"):
        guest_network.address_of(WIDE, on("n1", "n2"), "n1", 9, 0)


# -- several networks ---------------------------------------------------------------------------

HPC = ExtraNetwork(
    "br-hpc", subnet="10.9.0.0/16", first=1, per_node=8, node_number=PLAN.node_number
)


def site_with(**networks):
    return replace(Site(), network=WIDE, networks=networks)


def guests_of(job, site, count=1):
    """Return this node's guests as the ledger places them on an empty node."""
    found = []
    for index in range(count):
        claims = list(guest_network.claims(site, job, count, index))
        leased = {c.pool: (c.items[index if len(job.nodes) == 1 else 0],) for c in claims}
        found.append(planned(job, index, count, leased))
    return found


def planned(job, index, count, leased):
    return GuestPlan(
        job=names.JobAttempt(job.id, 0, "u", 1, job.node), index=index, rank=index,
        guests_per_node=count,
        name=f"vt-{job.node}-{index}", uuid="", vcpus=1, ram_mib=1,
        hostname=names.guest_hostname(job.node, index, count),
        image=Image("i", "t", "d", "x86_64", ""), user=JobUser("u", 1, 1, (), "/", "/bin/sh"),
        request=JobRequest({}), addresses=(), peers=(), state_dir=Path("/s"), run_dir=Path("/r"),
        secret=b"", placement=Placement(leased=leased),
    )  # fmt: skip


def test_each_network_gives_each_guest_a_nic_by_its_own_plan():
    site = site_with(hpc=replace(HPC, mtu=9000), raw=replace(HPC, addressing="none", source="b"))
    (guest,) = guests_of(on("node3"), site)
    one, two, three = guest_network.addresses(site, b"s" * 32, guest)
    assert len({one.mac, two.mac, three.mac}) == 3
    assert (one.ip, two.ip, three.ip) == ("10.0.0.58", "10.9.0.25", None)
    assert (one.network, two.network, three.network) == ("", "hpc", "raw")
    assert (one.gateway, two.gateway) == ("10.0.0.1", None)
    assert (one.mtu, two.mtu) == (None, 9000)
    assert (two.prefix, three.dhcp) == (16, False)


def test_second_gateway_has_a_lower_priority():
    site = site_with(hpc=replace(HPC, gateway="10.9.0.254"))
    one, two = guest_network.addresses(site, b"s" * 32, guests_of(on("node3"), site)[0])
    assert one.metric is None
    assert (two.gateway, two.metric) == ("10.9.0.254", 2000)


def test_leases_of_two_networks_are_of_two_pools():
    pools = [c.pool for c in guest_network.claims(site_with(hpc=HPC), on("node1"), 1, 0)]
    assert pools == ["address", "address-hpc"]


def test_guests_have_a_name_in_each_network_that_all_nodes_know():
    site, nodes = site_with(hpc=HPC, raw=replace(HPC, addressing="dhcp")), ("node1", "node2")
    seen = {}
    for at in nodes:
        job = on(*nodes, node=at)
        guests = guests_of(job, site, 2)
        seen[at] = guest_network.aliases(site, job, guests)
        for guest in guests:
            nic = list(guest_network.addresses(site, b"s" * 32, guest))[1]
            assert (f"{guest.hostname}-hpc", guest.hostname, nic.ip) in seen[at]
    assert seen["node1"] == seen["node2"]
    assert [name for name, _, _ in seen["node1"]] == [
        "vnode1-0-hpc", "vnode1-1-hpc", "vnode2-0-hpc", "vnode2-1-hpc",
    ]  # fmt: skip


@pytest.mark.parametrize("names_of_nodes", [("vm", "vmb"), ("rack1-7", "rack2-7")])
def test_job_on_nodes_with_equal_numbers_is_refused(names_of_nodes):
    """Both guests silently had one address, and each connected to itself."""
    job = on(*names_of_nodes)
    guests = guests_of(job, site_with(), 2)
    with pytest.raises(Refused) as refused:
        guest_network.peers(site_with(), job, guests)
    first, second = names_of_nodes
    assert f"the guests v{first}-0 and v{second}-0 would both have 10." in str(refused.value)
    assert "set [network] node_number" in str(refused.value)
    hpc = replace(HPC, node_number="^rack([0-9]+)")
    dhcp = replace(site_with(), network=replace(WIDE, addressing="dhcp"))
    assert guest_network.peers(dhcp, job, guests)[0] == (f"v{first}-0", "")
    if first.startswith("rack"):
        assert len(dict(guest_network.peers(site_with(hpc=hpc), job, guests, "hpc"))) == 4


def test_extra_network_without_room_is_named():
    with pytest.raises(HostFault, match=r"enlarge \[networks\.hpc\] subnet"):
        small = replace(HPC, subnet="10.9.0.0/24")
        list(guest_network.claims(site_with(hpc=small), on("node99"), 1, 0))


def test_ipv6_passes_only_on_networks_with_the_key():
    site = site_with(
        a=replace(HPC, addressing="none"), b=replace(HPC, addressing="dhcp", ipv6=True)
    )
    (guest,) = guests_of(on("node3"), site)
    guest = replace(guest, addresses=tuple(guest_network.addresses(site, b"s" * 32, guest)))
    assert [nic.ipv6 for nic in guest_network.interfaces(site, guest)] == [False, False, True]


def test_every_nic_except_macvtap_is_filtered():
    networks = {
        "b": HPC,
        "d": replace(HPC, kind="direct", source="eth9", opt_in_unfiltered=True),
        "u": replace(HPC, filter=False, opt_in_unfiltered=True),
    }
    site = site_with(**networks)
    (guest,) = guests_of(on("node3"), site)
    guest = replace(guest, addresses=tuple(guest_network.addresses(site, b"s" * 32, guest)))
    found = list(guest_network.interfaces(site, guest))
    assert [i.name for i in found] == ["nic0", "nic1", "nic2", "nic3"]
    assert [i.kind for i in found] == ["network", "bridge", "direct", "bridge"]
    assert [i.source for i in found] == ["vtorque", "br-hpc", "eth9", "br-hpc"]
    assert [i.filtered for i in found] == [True, True, False, False]
