"""Allocation of a job on a node as read by root, and its variables in guests."""

import pytest

from pbs_harness import ME, SYSTEMS, contract
from vtorque_core.api import Paths
from vtorque_core.api.batch_system import BatchJob, PeerGuest
from vtorque_core.api.guest_context import EnvVar, GuestFile
from vtorque_core.api.submission import to_token
from vtorque_pbs import plugin
from vtorque_pbs.resources import openpbs_given, torque_given, torque_memory

GUESTS = [PeerGuest("vn1-0", 3), PeerGuest("vn1-1", 3), PeerGuest("vn2-0", 1)]


def adapter(system, tmp_path):
    paths = Paths(tmp_path / "state", tmp_path / "run", tmp_path / "jobshell")
    settings = plugin.Settings(node="n1", home=str(tmp_path / "spool"))
    return SYSTEMS[system].node(contract.PluginSite(paths, (settings,)))


def inside(system, tmp_path, select=""):
    job = BatchJob("7.srv", ME, "n1", ("n1", "n2"), b"", resource_list={"select": select})
    items = list(adapter(system, tmp_path).context(job, GUESTS))
    return items, {item.name: item.value for item in items if isinstance(item, EnvVar)}


@pytest.mark.parametrize("system", ["torque", "openpbs"])
def test_node_file_and_its_variables_agree(system, tmp_path):
    items, environ = inside(system, tmp_path)
    (lines,) = (
        item.content.decode().splitlines()
        for item in items
        if isinstance(item, GuestFile) and item.path == environ["PBS_NODEFILE"]
    )
    assert [lines.count(guest.hostname) for guest in GUESTS] == [3, 3, 1]
    assert environ["PBS_NP"] == str(len(lines))
    assert environ["PBS_NUM_PPN"] == str(lines.count(lines[0]))
    assert environ["PBS_NUM_NODES"] == str(len(set(lines)))


@pytest.mark.parametrize(
    ("select", "threads"),
    [
        ("1:ncpus=8:mem=4gb", "3"),
        ("2:ncpus=8:mpiprocs=4:ompthreads=2", "2"),
        ("1:ompthreads=2:ncpus=8", "2"),
        ("1:ncpus=8:ompthreads=8", "3"),
        ("1:ncpus=8+1:ncpus=4:ompthreads=1", "3"),
        ("", "3"),
    ],
)
def test_openpbs_thread_variables_match_pbs_mom(select, threads, tmp_path):
    _, environ = inside("openpbs", tmp_path, select)
    assert (environ["OMP_NUM_THREADS"], environ["NCPUS"]) == (threads, threads)
    assert "OMP_NUM_THREADS" not in inside("torque", tmp_path, select)[1]


def test_cpus_and_memory_assigned_by_openpbs_are_read(tmp_path):
    words = {
        "id": "7.srv", "owner": ME, "request": to_token(b"{}"),
        "exec_host": "n1/0*2+n2/0*4+n1/1*3",
        "vnodes": "(n1:ncpus=2:mem=1048576kb)+(n2:ncpus=4:mem=1gb)+(n1:ncpus=3:mem=512mb)",
    }  # fmt: skip
    job = adapter("openpbs", tmp_path).job([f"{k}={v}" for k, v in words.items()], {})
    assert (job.nodes, job.cpu_counts, job.cpu_count, job.mem_mib) == (
        ("n1", "n2"), (5, 4), 5, 1536,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("resources", "mib"),
    [
        ({}, None),
        ({"mem": "16gb"}, 8192),
        ({"pmem": "1gb"}, 4096),
        ({"mem": "16gb", "pmem": "1gb"}, 8192),
        ({"vmem": "8gb"}, 4096),
        ({"pvmem": "2gb"}, 8192),
        ({"mem": "much"}, None),
    ],
)
def test_memory_of_torque_jobs_is_read(resources, mib):
    """vsub and root must parse the memory of a job on two nodes alike."""
    assert torque_memory(resources, 4, 2) == mib
    assert torque_given({"nodes": "2:ppn=4", **resources}).mib == mib


def test_cpus_and_memory_requested_from_openpbs_are_read():
    given = openpbs_given({"select": "2:ncpus=8:mem=4gb+1:ncpus=4:mem=2gb"})
    assert (given.cpus, given.mib) == (4, 2048)
