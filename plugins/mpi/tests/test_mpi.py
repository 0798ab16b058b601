"""What launchers of parallel programs are told about a job's guests."""

from dataclasses import replace
from pathlib import Path

import pytest

from vtorque_core import launchers
from vtorque_core.api import Image, JobRequest
from vtorque_core.api_batch import PeerGuest
from vtorque_core.api_context import EnvVar, GuestFile
from vtorque_core.api_node import Address, GuestPlan, JobUser

GUESTS = [PeerGuest("vn1-0", 4), PeerGuest("vn1-1", 4), PeerGuest("vn2-0", 4)]
GUEST = GuestPlan(
    job_id="7.srv", attempt=0, node="n1", index=0, rank=0, guests_per_node=2, name="vt-7",
    uuid="u", hostname="vn1-0", vcpus=4, ram_mib=256,
    image=Image("i", "t", "d", "x86_64", "0" * 64),
    user=JobUser("u", 1, 1, (), "/home/u", "/bin/sh"), request=JobRequest({}),
    addresses=(Address("52:54:00:00:00:01", "10.86.1.16", 16),), peers=(),
    state_dir=Path("/s"), run_dir=Path("/r"), secret=b"",
)  # fmt: skip


def told(guest=GUEST, guests=GUESTS):
    items = list(launchers.items(guest, guests))
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
def test_each_host_file_names_the_guests_by_rank_with_their_slots(variable, text):
    files, variables = told()
    assert files[variables[variable]] == text


def test_ssh_starts_the_daemons_whatever_the_host_is():
    _, variables = told()
    wanted = {
        "OMPI_MCA_plm": "rsh", "OMPI_MCA_plm_rsh_agent": "ssh", "PRTE_MCA_plm": "ssh",
        "HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user", "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_PERHOST": "4",
    }  # fmt: skip
    assert variables.items() >= wanted.items()
    for name in ("OMPI_MCA_ras", "PRTE_MCA_ras"):
        assert variables[name].startswith("^slurm,")


def test_traffic_stays_in_the_guests_networks():
    _, variables = told()
    assert variables["OMPI_MCA_btl_tcp_if_include"] == "10.86.0.0/16"
    second = Address("52:54:00:00:00:02", "10.99.0.16", 24, network="hpc")
    _, variables = told(replace(GUEST, addresses=(*GUEST.addresses, second)))
    assert variables["OMPI_MCA_btl_tcp_if_include"] == "10.86.0.0/16,10.99.0.0/24"
    assert variables["PRTE_MCA_prte_if_include"] == "10.86.0.0/16"


def test_with_dhcp_no_subnet_is_known():
    _, variables = told(replace(GUEST, addresses=(Address("52:54:00:00:00:01"),)))
    assert not [name for name in variables if name.endswith("if_include")]


def test_what_the_user_has_set_stays():
    _, variables = told()
    preset = {**variables, "PBS_NODEFILE": "/guests"}
    given = {"HYDRA_HOST_FILE": "/mine", "OMPI_MCA_plm": "isolated", "PBS_NODEFILE": "/hosts"}
    left = launchers.unless_given(preset, given)
    assert set(preset) - set(left) == {"HYDRA_HOST_FILE", "OMPI_MCA_plm", "PRTE_MCA_plm"}
    assert left["PBS_NODEFILE"] == "/guests"
    assert launchers.unless_given(preset, {}) == preset
