"""Tools that submit jobs, unchanged from PyPI, with ``--vm=``: their jobs run in guests."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import slurm_cluster as slurm

pytestmark = [pytest.mark.e2e, pytest.mark.full]

REPO = Path(__file__).resolve().parents[3]
PINS = REPO / "tests/data/clients.txt"

PSIJ = """
import datetime, sys
from psij import Job, JobAttributes, JobExecutor, JobSpec, JobState
def job(code):
    vm = "img=debian-python,ram=700M"
    more = {"slurm.vm": vm, "slurm.mem": "1000M", "slurm.constraint": "vtorque"}
    limit = datetime.timedelta(minutes=10)
    return Job(JobSpec(
        executable="/bin/sh", arguments=["-c", f"hostname; exit {code}"],
        stdout_path=f"/home/vtslurm1/psij.{code}", launcher="single",
        attributes=JobAttributes(duration=limit, custom_attributes=more),
    ))
executor = JobExecutor.get_instance("slurm")
jobs = [job(code) for code in (0, 3)]
for each in jobs:
    executor.submit(each)
for each in jobs:
    status = each.wait(datetime.timedelta(minutes=9))
    print(each.native_id, status.state.name, status.exit_code)
last = job(9)
last.spec.arguments = ["-c", "sleep 1000"]
executor.submit(last)
last.wait(datetime.timedelta(minutes=9), target_states=[JobState.ACTIVE])
last.cancel()
print(last.native_id, last.wait(datetime.timedelta(minutes=9)).state.name)
"""
REFRAME_SITE = """
site_configuration = {"systems": [{"name": "site", "hostnames": ["head"], "partitions": [{
    "name": "vm", "scheduler": "squeue", "launcher": "local", "environs": ["builtin"],
    "access": ["--vm=ram=300M", "--mem=600M", "--constraint=vtorque"],
}]}]}
"""
REFRAME_TEST = """
import reframe as rfm
import reframe.utility.sanity as sn
@rfm.simple_test
class Guest(rfm.RunOnlyRegressionTest):
    valid_systems = valid_prog_environs = ["*"]
    executable = "hostname"
    @sanity_function
    def runs_in_a_guest(self):
        return sn.assert_found(r"^vn\\d$", self.stdout)
"""


SUBMITIT = """
import socket, time
import submitit
def square(number):
    if number == 3:
        raise ValueError("three")
    return socket.gethostname(), number * number
vm = {"vm": "img=debian-python,ram=700M", "constraint": "vtorque"}
executor = submitit.AutoExecutor(folder="submitit", cluster="slurm")
executor.update_parameters(
    timeout_min=10, mem_gb=1, slurm_array_parallelism=2, slurm_additional_parameters=vm
)
jobs = executor.map_array(square, [1, 2, 3])
for job in jobs[:2]:
    print(*job.result())
print(type(jobs[2].exception()).__name__)
last = executor.submit(time.sleep, 1000)
last.cancel()
print(last.job_id)
"""


@pytest.fixture(scope="module")
def clients(cluster):
    """Return the environment of the tools, which are in the user's home, as users install them."""
    kept = REPO / ".venv/clients"
    if not (kept / "pins").exists() or (kept / "pins").read_text() != PINS.read_text():
        shutil.rmtree(kept, ignore_errors=True)
        pip = ["pip", "install", "-q", "--target", kept, "-r", PINS]
        subprocess.run(["/usr/bin/python3", "-m", *pip], check=True, timeout=900)
        shutil.copy(PINS, kept / "pins")
    subprocess.run(["cp", "-a", kept, cluster.home / "clients"], check=True)
    home = f"/home/{slurm.USER}"
    path = f"{home}/clients/bin:{slurm.PREFIX}:/usr/local/bin:/usr/bin:/bin"
    yield {"PYTHONPATH": f"{home}/clients", "PATH": path}.items()
    for name in (".psij", ".cache", ".parsl", ".dask", ".config", "clients"):
        shutil.rmtree(cluster.home / name, ignore_errors=True)


@pytest.fixture
def image(cluster):
    """Add an image with bash and Python."""
    return cluster.image("debian-python", "-o", "packages=python3")


def test_psij_submits_polls_and_cancels(clean, clients, image):
    script = clean.script(PSIJ, "tool.py")
    done = clean.user("python3", script, env=clients)
    rows = [line.split() for line in done.stdout.decode().splitlines()]
    assert [row[1:] for row in rows] == [["COMPLETED", "0"], ["FAILED", "3"], ["CANCELED"]]
    for code in (0, 3):
        assert re.fullmatch(rb"vn\d\n", clean.read(f"psij.{code}"))
    assert clean.state(rows[2][0]) == "CANCELLED"


def test_reframe_runs_its_tests_in_guests(clean, clients):
    clean.script(REFRAME_SITE, "site.py")
    clean.script(REFRAME_TEST, "guest.py")
    argv = ("clients/bin/reframe", "-C", "site.py", "-c", "guest.py", "-r", "--system=site")
    done = clean.user("python3", *argv, env=clients)
    assert b"PASSED" in done.stdout
    assert b"Ran 1/1 test case(s)" in done.stdout


def rows_of(done):
    return [line.split() for line in done.stdout.decode().splitlines()]


def test_submitit_runs_an_array_and_cancels(clean, clients, image):
    done = clean.user("/usr/bin/python3", clean.script(SUBMITIT, "tool.py"), env=clients)
    *rows, (failure,), (last,) = rows_of(done)
    assert [number for _, number in rows] == ["1", "4"]
    assert all(re.fullmatch(r"vn\d", name) for name, _ in rows)
    assert failure == "FailedJobError"
    clean.wait_state(last, "CANCELLED")
