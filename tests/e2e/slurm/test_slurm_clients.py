"""Libraries that submit jobs, unchanged from PyPI, with ``--vm=``: their jobs run in guests.

They run on the submit host ``login``, and poll Slurm as they always do. Tools that run whole
workflows are in ``test_slurm_workflows.py``.
"""

import pytest

import slurm_cluster as slurm
from client_tools import HOME, SUBMIT_HOST, TIMEOUTS, in_guest, rows_of

pytestmark = pytest.mark.e2e


PSIJ = """
import datetime, sys
from psij import Job, JobAttributes, JobExecutor, JobSpec, JobState
def job(name, command, minutes=10):
    more = {"slurm.vm": "ram=300M", "slurm.mem": "600M", "slurm.constraint": "vtorque"}
    limit = datetime.timedelta(minutes=minutes)
    return Job(JobSpec(
        executable="/bin/sh", arguments=["-c", command], stdout_path=f"HOME/psij.{name}",
        launcher="single", attributes=JobAttributes(duration=limit, custom_attributes=more),
    ))
executor = JobExecutor.get_instance("slurm")
jobs = [job(number, f"hostname; exit {3 * (number == 1)}") for number in range(int(sys.argv[1]))]
for each in jobs:
    executor.submit(each)
last = job("last", "sleep 1000")
late = job("late", "sleep 1000", minutes=1)
for each in (last, late):
    executor.submit(each)
last.wait(target_states=[JobState.ACTIVE])
last.cancel()
for each in (*jobs, last, late):
    status = each.wait(datetime.timedelta(minutes=15))
    print(each.native_id, status.state.name, status.exit_code)
"""


@pytest.mark.full
@pytest.mark.parametrize("number", [2, 50])
def test_psij_submits_polls_and_cancels(clean, clients, number):
    """One job fails, one is canceled, one exceeds its time limit."""
    done = clients("python3", clean.script(PSIJ.replace("HOME", HOME), "tool.py"), str(number))
    *rows, last, late = rows_of(done)
    wanted = [["FAILED", "3"] if each == 1 else ["COMPLETED", "0"] for each in range(number)]
    assert [row[1:] for row in rows] == wanted
    assert len({row[0] for row in rows}) == number
    for each in range(number):
        assert in_guest(clean.read(f"psij.{each}").decode().strip())
    assert last[1] == "CANCELED"
    clean.wait_state(last[0], "CANCELLED")
    assert late[1] == "FAILED"
    clean.wait_state(late[0], "TIMEOUT")


SUBMITIT = """
import socket, sys, time
import submitit
def square(number):
    if number == 3:
        raise ValueError("three")
    return socket.gethostname(), number * number
vm = {"vm": "ram=400M", "mem": "700M", "constraint": "vtorque"}
executor = submitit.AutoExecutor(folder="submitit", cluster="slurm")
number = int(sys.argv[1])
executor.update_parameters(
    timeout_min=10, slurm_array_parallelism=number, slurm_additional_parameters=vm
)
jobs = executor.map_array(square, range(2, 2 + number))
last = executor.submit(time.sleep, 1000)
executor.update_parameters(timeout_min=1, slurm_signal_delay_s=1)
late = executor.submit(time.sleep, 1000) if number > 2 else None
def state(job):  # at once, not only once a minute
    return job.watcher.get_state(job.job_id, mode="force")
for job in [job for job in jobs if job is not jobs[1]]:
    print(*job.result())
failure = jobs[1].exception()
while state(jobs[1]) != "FAILED":
    time.sleep(1)
print(type(failure).__name__, "three" in failure.args[0])
while state(last) != "RUNNING":
    time.sleep(1)
last.cancel()
while state(last) == "RUNNING":
    time.sleep(1)
print(state(last))
while late and state(late) in ("PENDING", "RUNNING"):
    time.sleep(1)
print(late and state(late))
"""


@pytest.mark.parametrize("number", [2, pytest.param(50, marks=pytest.mark.full)])
def test_submitit_runs_an_array_and_cancels(clean, clients, number):
    """An element fails. With 50 of them, another job exceeds its time limit."""
    done = clients("python3", clean.script(SUBMITIT, "tool.py"), str(number))
    *rows, failed, last, late = rows_of(done)
    assert all(in_guest(name) for name, _ in rows)
    assert [row[1] for row in rows] == [str(each**2) for each in range(2, 2 + number) if each != 3]
    assert late == (["TIMEOUT"] if number > 2 else ["None"])
    assert failed == ["FailedJobError", "True"]
    assert last == ["CANCELLED", "by", str(slurm.UID)]


CHECKPOINT = """
import sys, time
import submitit
class Rounds:
    made = 0
    def __call__(self, name, waits):
        with open(f"rounds.{name}", "a") as file:
            file.write("x")
        while waits and not self.made:
            time.sleep(1)
        return self.made
    def checkpoint(self, *args):
        self.made += 1
        return submitit.helpers.DelayedSubmission(self, *args)
vm = {"vm": "ram=400M", "mem": "700M", "constraint": "vtorque", "signal": "B:USR2@60"}
executor = submitit.AutoExecutor(folder="submitit", cluster="slurm")
executor.update_parameters(
    timeout_min=4, slurm_array_parallelism=2, slurm_setup=["trap '' USR2"],
    slurm_additional_parameters=vm,
)
jobs = executor.map_array(Rounds(), ["first", "last"], [False, True])
print(*[job.result() for job in jobs])
print(jobs[1].job_id)
"""


@pytest.mark.full
def test_submitit_continues_from_a_checkpoint_at_the_time_limit(clean, clients):
    """submitit requeues its element of the array from inside the guest, and no other."""
    done = clients("python3", clean.script(CHECKPOINT, "tool.py"))
    *_, results, (job_id,) = rows_of(done)
    assert results == ["0", "1"]
    assert (clean.read("rounds.first"), clean.read("rounds.last")) == (b"x", b"xx")
    clean.wait_state(job_id, "COMPLETED")
    assert clean.show(job_id)["Restarts"] == "1"


DASK = """
import socket, subprocess, time
from dask.distributed import Client
from dask_jobqueue import SLURMCluster
def where(number):
    return socket.gethostname(), number * number
def bad():
    raise ValueError("bad")
with SLURMCluster(
    cores=1, memory="GIB GiB", walltime="00:20:00", death_timeout=600, nanny=False,
    job_extra_directives=["--vm=ram=512M", "--constraint=vtorque"],
    scheduler_options={"host": "SUBMIT_HOST"}, log_directory="dask",
) as cluster, Client(cluster) as client:
    cluster.scale(jobs=JOBS)
    ALL_QUEUED
    client.wait_for_workers(1)
    for row in client.gather(client.map(where, range(TASKS))):
        print(*row)
    try:
        client.submit(bad, retries=1).result()
    except ValueError as error:
        print(error)
"""
PARSL = """
import subprocess, time
import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.launchers import SrunLauncher
from parsl.providers import SlurmProvider
vm = "#SBATCH --vm=ram=512M\\n#SBATCH --constraint=vtorque"
provider = SlurmProvider(
    "main", init_blocks=JOBS, max_blocks=JOBS, cores_per_node=1, mem_per_node=GIB,
    walltime="00:20:00", exclusive=False, scheduler_options=vm, launcher=SrunLauncher(),
)
executor = HighThroughputExecutor(
    address="SUBMIT_HOST", max_workers_per_node=1, provider=provider, encrypted=False,
)
@parsl.python_app
def where(number):
    import socket
    if number == TASKS:
        raise ValueError("bad")
    return socket.gethostname(), number * number
with parsl.load(Config(executors=[executor], retries=1)):
    ALL_QUEUED
    for each in [where(number) for number in range(TASKS + 1)]:
        try:
            print(*each.result())
        except ValueError as error:
            print(error)
"""


ALL_QUEUED = """while subprocess.check_output(["squeue", "-h", "-o", "%i"]).count(b"\\n") < JOBS:
        time.sleep(1)"""


@pytest.mark.parametrize(
    ("program", "jobs"),
    [
        pytest.param(DASK, 1, id="dask"),
        pytest.param(DASK, 50, id="dask-50", marks=pytest.mark.full),
        pytest.param(PARSL, 1, id="parsl", marks=pytest.mark.full),
        pytest.param(PARSL, 50, id="parsl-50", marks=pytest.mark.full),
    ],
)
def test_workers_in_guests_call_back_to_the_submit_host(clean, clients, program, jobs):
    """The tool cancels its workers at the end, also those that still wait for a node."""
    tasks = max(jobs, 3)
    program = program.replace("ALL_QUEUED", ALL_QUEUED).replace("SUBMIT_HOST", SUBMIT_HOST)
    program = program.replace("JOBS", str(jobs)).replace("TASKS", str(tasks))
    program = program.replace("GIB", "1" if jobs == 1 else "3")  # few start, to save time
    *rows, failure = rows_of(clients("python3", clean.script(program, "tool.py")))
    assert [number for _, number in rows] == [str(each**2) for each in range(tasks)]
    assert all(in_guest(name) for name, _ in rows)
    assert failure == ["bad"]


LATE = """
def late():
    import pathlib, socket, time
    seen = pathlib.Path("HOME/seen")
    while not seen.exists():
        seen.touch()
        time.sleep(1000)
    return socket.gethostname()
"""
DASK_LATE = """
import time
from dask.distributed import Client
from dask_jobqueue import SLURMCluster
LATE
with SLURMCluster(
    cores=1, memory="1 GiB", walltime="00:05:00", death_timeout=600, nanny=False,
    job_extra_directives=["--vm=ram=512M", "--constraint=vtorque"],
    scheduler_options={"host": "SUBMIT_HOST"}, log_directory="dask",
) as cluster, Client(cluster) as client:
    cluster.scale(jobs=1)
    client.wait_for_workers(1)
    task = client.submit(late)
    while client.scheduler_info()["workers"]:
        time.sleep(1)
    cluster.scale(jobs=2)  # the ended one counts
    print(task.result())
"""
PARSL_LATE = """
import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import SlurmProvider
vm = "#SBATCH --vm=ram=512M\\n#SBATCH --constraint=vtorque"
provider = SlurmProvider(
    "main", init_blocks=1, max_blocks=1, cores_per_node=1, mem_per_node=1,
    walltime="00:05:00", exclusive=False, scheduler_options=vm,
)
executor = HighThroughputExecutor(
    address="SUBMIT_HOST", max_workers_per_node=1, provider=provider, encrypted=False,
    heartbeat_period=5, heartbeat_threshold=30,
)
LATE
with parsl.load(Config(executors=[executor], retries=2)):
    print(parsl.python_app(late)().result())
"""


@pytest.mark.full
@pytest.mark.parametrize("program", [DASK_LATE, PARSL_LATE], ids=["dask", "parsl"])
def test_task_of_a_worker_at_its_time_limit_runs_again(clean, clients, program):
    before = clean.user(*TIMEOUTS).stdout.split()
    program = program.replace("LATE", LATE).replace("HOME", HOME)
    done = clients("python3", clean.script(program.replace("SUBMIT_HOST", SUBMIT_HOST), "tool.py"))
    assert in_guest(rows_of(done)[-1][0])
    assert len(clean.user(*TIMEOUTS).stdout.split()) > len(before)
    (clean.home / "seen").unlink()
