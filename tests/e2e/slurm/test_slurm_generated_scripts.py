"""Job scripts that workflow tools generate for Slurm run unmodified, in guests."""

import re
import subprocess

import pytest

import generated_scripts
import slurm_cluster as slurm

pytestmark = pytest.mark.e2e

HOME = f"/home/{slurm.USER}"  # in the cluster's machines
CASES = [
    pytest.param(each, id=each.name, marks=() if each.short else pytest.mark.full)
    for each in generated_scripts.SLURM
]


@pytest.mark.parametrize("generated", CASES)
def test_generated_script_runs_in_a_guest(clean, generated):
    content = generated.content(HOME)
    empty(clean)
    generated_scripts.prepare(clean.home, content.replace(HOME, str(clean.home)))
    operands = [generated.name]
    if generated.name.endswith(".json"):
        operands = generated.arguments(HOME)
    else:
        clean.script(content, generated.name)
    subprocess.run(["chown", "-R", f"{slurm.UID}:{slurm.UID}", clean.home], check=True)
    argv = ("vsub", "--parsable", "--hold", "-vm", "ram=192M", *operands)
    job_id = clean.user(*argv).stdout.decode().strip()
    try:
        for directory in generated.later_directories(job_id):  # submitit creates it at this point
            clean.user("mkdir", "-p", directory)
        clean.user("scontrol", "release", job_id)
        clean.wait(lambda: not clean.root("head", "squeue", "-h", "-j", job_id), what=job_id)
        shown = clean.root("head", "scontrol", "show", "job", job_id)
        assert set(re.findall(r"ExitCode=(\S+)", shown)) == {"0:0"}
        generated_scripts.check(clean.home, generated, job_id)
    finally:
        empty(clean)


def empty(cluster):
    """Remove files of a script and its test from the home."""
    for pattern in ("[!.]*", ".psij"):
        for path in cluster.home.glob(pattern):
            subprocess.run(["rm", "-rf", path], check=True)


LAUNCHERS = """#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=1
#SBATCH --output=launchers.out
#SBATCH --error=launchers.err
set -e
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
[ "$master" = "$(hostname)" ]
scontrol show hostnames 'gpu[01-03,7]' | tr '\\n' ' '; echo
scontrol show hostlist gpu01,gpu02,gpu04
srun --kill-on-bad-exit=1 --cpu-bind=cores -l sh -c 'echo rank $SLURM_PROCID' | sort
srun -u -K --mpi=none --exclusive --mem=64M -n 1 sh -c 'echo $SLURM_LOCALID of 1'
srun --unbuffered -o task-%j-%t.out --cpu_bind=none sh -c 'echo task $SLURM_PROCID'
cat task-$SLURM_JOB_ID-0.out task-$SLURM_JOB_ID-1.out
srun -n 2 -K sh -c 'exit $((SLURM_PROCID * 3))' || echo "status $?"
srun --pty true || echo refused
"""


def test_launchers_options_of_srun_and_scontrol_work_in_a_guest(clean):
    """submitit, torchrun's sbatch scripts and Lightning call them in this form."""
    job_id = clean.user("vsub", "--parsable", clean.script(LAUNCHERS)).stdout.decode().strip()
    clean.wait_state(job_id, "COMPLETED", "FAILED")
    errors = clean.read("launchers.err").decode()
    assert clean.read("launchers.out").decode().splitlines() == [
        "gpu01 gpu02 gpu03 gpu7 ", "gpu[01-02,04]",
        "0: rank 0", "1: rank 1", "0 of 1", "task 0", "task 1",
        "status 3", "refused",
    ], errors  # fmt: skip
    assert "option --pty does not work inside a virtual machine" in errors
    assert "task 1: Exited with exit code 3" in errors
