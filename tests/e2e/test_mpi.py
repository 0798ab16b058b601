"""Parallel programs in Debian guests: ``mpirun`` without a flag, ssh between the job's guests."""

import re

import pytest

from running_jobs import beside_another

pytestmark = [pytest.mark.e2e, pytest.mark.full]

IMAGE = "debian-mpi"
ARGS = ("-vm", f"img={IMAGE},ram=768M,vcpus=2,vms_per_node=2")
# MPI from Python, without a compiler: mpi.h of both has these handles (Open MPI: symbols).
RANKS = r"""
import ctypes, socket, sys
mpi = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
def handle(symbol, number):
    if "mpich" in sys.argv[1]:
        return ctypes.c_int(number)
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, symbol)))
world = handle("ompi_mpi_comm_world", 0x44000000)
integer, add = handle("ompi_mpi_int", 0x4C000405), handle("ompi_mpi_op_sum", 0x58000003)
mpi.MPI_Init(None, None)
rank, size, one, all_ = (ctypes.c_int() for _ in range(4))
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Comm_size(world, ctypes.byref(size))
one.value = rank.value + 1
mpi.MPI_Allreduce(ctypes.byref(one), ctypes.byref(all_), 1, integer, add, world)
print(f"rank {rank.value} of {size.value} on {socket.gethostname()}: {all_.value}", flush=True)
mpi.MPI_Finalize()
"""


@pytest.fixture(scope="module")
def mpi(node):
    """Return the node with Debian's Open MPI and MPICH in an image; built once, 40 s."""
    if node.root("vmgr", "images", "show", IMAGE, check=False).returncode:
        packages = "packages=openmpi-bin,mpich"
        node.root("vmgr", "images", "build", IMAGE, "debian", "-o", packages, timeout=600)
    return node


def ranks(out):
    """Return (rank, size, host, sum) of each line that :data:`RANKS` has printed, by rank."""
    found = re.findall(rb"rank (\d+) of (\d+) on (\S+): (\d+)", out)
    return sorted((int(r), int(s), h.decode(), int(t)) for r, s, h, t in found)


def hosts(mpi):
    return [f"v{mpi_node()}-{index}" for index in (0, 1)]


def mpi_node():
    import platform

    return platform.node().split(".")[0]


def test_mpirun_needs_no_flag(mpi, clean):
    (clean.home / "ranks.py").write_text(RANKS)
    result = clean.job(
        "#!/bin/bash\n"
        "cd $HOME\n"
        "sort $PBS_NODEFILE | uniq -c\n"
        "for name in $(sort -u $PBS_NODEFILE); do getent hosts $name || exit 2; done\n"
        "names=$(sort -u $PBS_NODEFILE)\n"
        "for name in $names; do ssh $name 'echo ssh $(hostname) $(id -un)'; done\n"
        "echo == hostname\n"
        "mpirun.openmpi hostname\n"
        "echo == openmpi\n"
        "mpirun.openmpi python3 ranks.py libmpi.so.40\n"
        "echo == misled\n"
        "SLURM_JOB_ID=7 SLURM_JOBID=7 SLURM_NODELIST=other SLURM_JOB_NODELIST=other SLURM_NNODES=1"
        " SLURM_TASKS_PER_NODE=1 PBS_ENVIRONMENT=PBS_BATCH mpirun.openmpi hostname\n"
        "echo == mpich\n"
        "SLURM_JOB_ID=7 SLURM_NODELIST=other mpirun.mpich -n 4 python3 ranks.py libmpich.so.12\n"
        "echo == own\n"
        "echo $HYDRA_HOST_FILE\n"
        "HYDRA_HOST_FILE=/dev/null; HYDRA_LAUNCHER=fork mpirun.mpich -n 1 hostname\n",
        *ARGS,
    )  # fmt: skip
    assert result.code == 0, (result.out, result.err)
    zero, one = hosts(mpi)
    parts = dict(
        part.split("\n", 1) for part in ("== start\n" + result.out.decode()).split("== ")[1:]
    )
    assert f"2 {zero}" in parts["start"]
    assert f"2 {one}" in parts["start"]
    assert f"ssh {zero} {clean.user}" in parts["start"]
    assert f"ssh {one} {clean.user}" in parts["start"]
    assert sorted(parts["hostname"].split()) == [zero, zero, one, one]
    assert sorted(parts["misled"].split()) == [zero, zero, one, one]
    expected = [(0, 4, zero, 10), (1, 4, zero, 10), (2, 4, one, 10), (3, 4, one, 10)]
    assert ranks(parts["openmpi"].encode()) == expected
    assert ranks(parts["mpich"].encode()) == expected


def test_variables_of_the_user_override_mpi_settings(mpi, clean):
    result = clean.job(
        "#!/bin/sh\necho $HYDRA_HOST_FILE $OMPI_MCA_plm $PRTE_MCA_plm. $I_MPI_HYDRA_BOOTSTRAP\n"
        "cat $I_MPI_HYDRA_HOST_FILE\n",
        "-v", "HYDRA_HOST_FILE=/mine,OMPI_MCA_plm=isolated",
    )  # fmt: skip
    assert result.out.decode().splitlines() == [
        "/mine isolated . ssh", f"v{mpi_node()}",
    ]  # fmt: skip


def test_ssh_to_a_guest_of_another_job_is_denied(mpi, two_slots, clean):
    """The other job belongs to the same user: even so its guests have other keys."""
    code, said, err = beside_another(
        clean,
        "",
        lambda ip: (
            "#!/bin/bash\n"
            f"(exec 3<>/dev/tcp/{ip}/22) && echo reached\n"
            "ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
            f" -i /etc/vtorque/ssh/$USER/id_ed25519 {ip} hostname && echo ENTERED\n"
            "exit 0\n"
        ),
        "-vm", f"img={IMAGE},ram=512M", timeout=300,
    )  # fmt: skip
    assert code == 0
    assert said == "reached\n", said
    assert "Permission denied" in err
