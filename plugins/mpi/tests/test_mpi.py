"""Host files and variables of parallel program launchers for a job's guests."""

from dataclasses import replace

import pytest

from vtorque_core.api import hooks
from vtorque_core.api.batch_system import BareNode
from vtorque_core.api.guest_context import EnvVar, GuestFile
from vtorque_core.api.guest_plan import Address
from vtorque_core.config.plugins import Plugins
from vtorque_mpi import node
from vtorque_testing.planned import guest_plan

GUEST = guest_plan(
    guests_per_node=2, hostname="vn1-0", vcpus=4,
    addresses=(Address("52:54:00:00:00:01", "10.86.1.16", 16),),
    supports=frozenset({"EnvVar", "GuestFile"}), hostnames=("vn1-0", "vn1-1", "vn2-0"),
    slots=(4, 4, 4),
)  # fmt: skip


def context(guest=GUEST):
    items = list(node.vtorque_guest_context(guest))
    files = {i.path: i.content.decode() for i in items if isinstance(i, GuestFile)}
    return files, {i.name: i.value for i in items if isinstance(i, EnvVar)}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("OMPI_MCA_orte_default_hostfile", "vn1-0 slots=4\nvn1-1 slots=4\nvn2-0 slots=4\n"),
        ("PRTE_MCA_prte_default_hostfile", "vn1-0 slots=4\nvn1-1 slots=4\nvn2-0 slots=4\n"),
        ("HYDRA_HOST_FILE", "vn1-0:4\nvn1-1:4\nvn2-0:4\n"),
        ("I_MPI_HYDRA_HOST_FILE", "vn1-0\nvn1-1\nvn2-0\n"),
    ],
)
def test_each_host_file_lists_guests_by_rank_with_slots(variable, text):
    files, variables = context()
    assert files[variables[variable]] == text


def test_guests_of_different_sizes_have_different_slots():
    """vcpus=job on nodes whose shares differ: before, all guests had this guest's number."""
    files, variables = context(replace(GUEST, slots=(4, 4, 2)))
    assert files["/etc/vtorque/mpi/openmpi"] == "vn1-0 slots=4\nvn1-1 slots=4\nvn2-0 slots=2\n"
    assert files["/etc/vtorque/mpi/hydra"] == "vn1-0:4\nvn1-1:4\nvn2-0:2\n"
    assert variables["I_MPI_PERHOST"] == "2", (
        "Intel MPI, whose host file has no counts, would use other slots"
    )


def test_nodes_without_guests_follow_with_their_slots():
    files, variables = context(replace(GUEST, bare=(BareNode("n3", 16), BareNode("n4", 8))))
    texts = {name: files[variables[name]].split("\n")[3:] for name in variables if "FILE" in name}
    assert texts["HYDRA_HOST_FILE"] == ["n3:16", "n4:8", ""]
    assert texts["I_MPI_HYDRA_HOST_FILE"] == ["n3", "n4", ""]
    assert not [name for name in variables if name.endswith("if_include")]
    assert files["/etc/vtorque/mpi/openmpi"].endswith("vn2-0 slots=4\nn3 slots=16\nn4 slots=8\n")


def test_ssh_starts_the_daemons_on_any_host():
    _, variables = context()
    wanted = {
        "OMPI_MCA_plm": "rsh", "OMPI_MCA_plm_rsh_agent": "ssh", "PRTE_MCA_plm": "ssh",
        "HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user", "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_PERHOST": "4",
    }  # fmt: skip
    assert variables.items() >= wanted.items()
    for name in ("OMPI_MCA_ras", "PRTE_MCA_ras"):
        assert variables[name].startswith("^slurm,")


def test_traffic_stays_in_the_guests_networks():
    _, variables = context()
    assert variables["OMPI_MCA_btl_tcp_if_include"] == "10.86.0.0/16"
    second = Address("52:54:00:00:00:02", "10.99.0.16", 24, network="hpc")
    _, variables = context(replace(GUEST, addresses=(*GUEST.addresses, second)))
    assert variables["OMPI_MCA_btl_tcp_if_include"] == "10.86.0.0/16,10.99.0.0/24"
    assert variables["PRTE_MCA_prte_if_include"] == "10.86.0.0/16"


def test_with_dhcp_no_subnet_is_known():
    _, variables = context(replace(GUEST, addresses=(Address("52:54:00:00:00:01"),)))
    assert not [name for name in variables if name.endswith("if_include")]


def test_each_variable_gives_way_to_user_variables():
    items = [i for i in node.vtorque_guest_context(GUEST) if isinstance(i, EnvVar)]
    assert all(item.name in item.unless for item in items)
    unless = {item.name: item.unless for item in items}
    assert unless["HYDRA_HOST_FILE"] == ("HYDRA_HOST_FILE",)
    assert unless["PRTE_MCA_plm"] == ("PRTE_MCA_plm", "OMPI_MCA_plm")


@pytest.mark.parametrize("supports", [set(), {"EnvVar"}, {"GuestFile"}])
def test_guest_type_without_support_gets_nothing(supports):
    guest = replace(GUEST, supports=frozenset(supports))
    assert list(node.vtorque_guest_context(guest)) == []


@pytest.mark.parametrize("disable", [(), ("mpi",)])
def test_mpi_loads_without_other_plugins_and_can_be_disabled(disable):
    plugins = Plugins.load(node=True, enable=("mpi",), disable=disable)
    assert plugins.broken == {}
    assert plugins.names == ("core",) if disable else ("core", "mpi")
    found = plugins.collect(hooks.vtorque_guest_context, guest=GUEST, site=None)
    assert bool(found) is not bool(disable)
