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


class Nextflow:
    """Nextflow's executor ``slurm``: its files, commands and patterns (SlurmExecutor.groovy)."""

    options = "#SBATCH --vm=ram=192M --constraint=vtorque\n"  # clusterOptions

    def __init__(self, cluster):
        self.cluster = cluster
        (self.wrapper,) = (each for each in generated_scripts.SLURM if "nextflow" in each.name)

    def user(self, *argv):
        return self.cluster.user(*argv, machine="login").stdout.decode()

    def task(self, name, script, more="", changes=()):
        """Write the files of a task; return its directory."""
        directory = self.cluster.home / "work" / name
        directory.mkdir(parents=True)
        text = self.wrapper.content(HOME).replace("3f/9ac1d2", name)
        text = text.replace("NXF_CHDIR=", f"{more}{self.options}NXF_CHDIR=", 1)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (directory / ".command.run").write_text(text)
        (directory / ".command.sh").write_text(f"#!/bin/bash -ue\n{script}\n")
        return directory

    def submit(self, directory):
        command = f"cd work/{directory.name} && sbatch .command.run 2>&1"
        return re.search(r"Submitted batch job (\d+)", self.user("sh", "-c", command))[1]

    def states(self):
        argv = ("squeue", "--noheader", "-o", "%i %t", "-t", "all", "-u", slurm.USER)
        rows = [line.split() for line in self.user(*argv).splitlines()]
        assert {len(row) for row in rows} <= {2}
        return dict(rows)

    def wait_state(self, job_id, state):
        self.cluster.wait(lambda: self.states().get(job_id) == state, what=f"{job_id} {state}")


COUNT = "tr -d '\\n' < reads.txt | wc -c > counts.txt; hostname"
LATE = f"touch {HOME}/begun; sleep 1000 & wait; touch counts.txt"


@pytest.mark.full
def test_nextflow_submits_polls_and_cancels(clean):
    """One task fails and is repeated, one is canceled, one reaches its time limit."""
    nextflow = Nextflow(clean)
    try:
        (clean.home / "reads.txt").write_text("ACGT\n")
        bad, again = nextflow.task("bad", "exit 3"), nextflow.task("again", COUNT)
        canceled = nextflow.task("canceled", LATE)
        late = nextflow.task("late", "sleep 1000", changes=[("-t 00:05:00", "-t 00:02:00")])
        children = [nextflow.task(f"child{number}", COUNT) for number in range(2)]
        names = " ".join(f"{HOME}/work/{each.name}" for each in children)
        script = generated_scripts.NEXTFLOW_ARRAY.format(
            directories=names, index="SLURM_ARRAY_TASK_ID"
        )
        changes = [(f"-o {HOME}/work/array/.command.log", "-o /dev/null")]
        array = nextflow.task("array", script, "#SBATCH --array 0-1\n", changes)
        subprocess.run(["chown", "-R", f"{slurm.UID}:{slurm.UID}", clean.home], check=True)
        jobs = {each: nextflow.submit(each) for each in (canceled, bad, late, array)}

        # Before the task runs, the wrapper ignores TERM.
        clean.wait((clean.home / "begun").exists, what="the task")
        assert nextflow.states()[jobs[canceled]] == "R"
        nextflow.user("scancel", jobs[canceled])
        nextflow.wait_state(jobs[bad], "F")
        nextflow.wait_state(nextflow.submit(again), "CD")
        nextflow.wait_state(jobs[canceled], "CA")
        for number in range(2):
            nextflow.wait_state(f"{jobs[array]}_{number}", "CD")
        nextflow.wait_state(jobs[late], "F")
        tasks = (bad, again, canceled, late, array, *children)
        codes = [(each / ".exitcode").read_text() for each in tasks]
        assert codes == ["3", "0", "143", "140", "0", "0", "0"]  # TERM, and USR2 of --signal
        for each in (again, *children):
            assert (each / "counts.txt").read_text().strip() == "4"
            assert re.search(r"^vn\d$", (each / ".command.log").read_text(), re.MULTILINE)
    finally:
        empty(clean)


@pytest.mark.full
def test_nextflow_submits_50_tasks_at_once(clean):
    """The first tasks run to their end, and the others are canceled together, as after Ctrl-C."""
    nextflow = Nextflow(clean)
    try:
        (clean.home / "reads.txt").write_text("ACGT\n")
        tasks = [nextflow.task(f"task{number}", COUNT) for number in range(50)]
        subprocess.run(["chown", "-R", f"{slurm.UID}:{slurm.UID}", clean.home], check=True)
        jobs = {nextflow.submit(each): each for each in tasks}
        assert len(jobs) == len(tasks)

        def states():
            return {job: state for job, state in nextflow.states().items() if job in jobs}

        clean.wait(lambda: "CD" in states().values(), what="the first task")
        assert states().keys() == jobs.keys()
        nextflow.user("scancel", *jobs)
        clean.wait(lambda: {*states().values()} <= {"CD", "CA"}, what="the end of all tasks")
        ended = states()
        assert len(ended) == len(tasks)
        for task in (jobs[job] for job, state in ended.items() if state == "CD"):
            assert (task / ".exitcode").read_text() == "0"
            assert (task / "counts.txt").read_text().strip() == "4"
            assert re.search(r"^vn\d$", (task / ".command.log").read_text(), re.MULTILINE)
    finally:
        empty(clean)


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
