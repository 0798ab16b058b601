"""A script in a guest has sbatch's environment, except for differences in doc/batch-slurm.md."""

import pytest

from surroundings import SCRIPT, differences

pytestmark = [pytest.mark.e2e, pytest.mark.full]

LEFT_OUT = """
SLURM_CONF SLURMD_NODENAME SLURM_TASK_PID SLURM_PRIO_PROCESS SLURM_TOPOLOGY_ADDR
SLURM_TOPOLOGY_ADDR_PATTERN SLURM_NODE_ALIASES SLURM_WORKING_CLUSTER
"""
GUESTS = "SLURM_JOB_NODELIST SLURM_NODELIST SLURM_MEM_PER_NODE"
PER_JOB = {"SLURM_JOB_ID", "SLURM_JOBID", *LEFT_OUT.split(), *GUESTS.split()}
MEMORY = "soft max memory size"  # the guest's limit is its RAM


@pytest.mark.parametrize(("end", "codes"), [("", (7, 7)), ("TERM", (1, 143))])
def test_script_in_a_guest_gets_the_environment_of_a_plain_job(clean, end, codes):
    """With all CPUs of a node: Slurm binds no process here. For a signal sbatch -W exits with 1."""
    options = ("-W", "-c2", "--mem=900M", "-oout", "-eerr", f"--export=ALL,END={end},A=x y")
    script, told = clean.script(SCRIPT), []
    for command in ("sbatch", "vsub"):
        done = clean.user(command, *options, script, "one  word", "two", check=False)
        told.append((done.returncode, clean.read("out"), clean.read("err")))
        assert clean.read("out").startswith(b"signal USR1\n")
    plain, guest = told
    assert (plain[0], guest[0]) == codes
    assert differences(plain[1], guest[1], per_job=PER_JOB, other=[MEMORY]) == ([], [])
    assert plain[2] == guest[2]
