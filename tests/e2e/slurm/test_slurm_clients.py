"""Tools that submit jobs, unchanged from PyPI, with ``--vm=``: their jobs run in guests.

They run on the submit host ``login``, poll Slurm as they always do, and use a Python in the user's
home, as users install it. Guests find that Python there, so that the image needs none.
"""

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import slurm_cluster as slurm

pytestmark = pytest.mark.e2e

REPO = Path(__file__).resolve().parents[3]
PINS = REPO / "tests/data/clients.txt"
QUICK = """
submitit cloudpickle typing_extensions dask distributed dask-jobqueue click fsspec packaging partd
PyYAML toolz importlib_metadata zipp Jinja2 MarkupSafe locket msgpack psutil sortedcontainers tblib
tornado urllib3 zict lazy-importer
"""
HOME = f"/home/{slurm.USER}"
PYTHON = f"{HOME}/python/bin/python3"
SUBMIT_HOST = "10.89.0.2"
# Of wheels' own libraries, and of sys.executable, which the loader's name would replace.
LIBRARIES = (
    "libgcc_s.so.1", "libstdc++.so.6", "librt.so.1", "libpthread.so.0", "libdl.so.2",
    "libutil.so.1",
)  # fmt: skip
START = f"""#!/bin/sh
export PYTHONHOME={HOME}/python
exec $PYTHONHOME/lib/ld.so --argv0 "$0" --library-path $PYTHONHOME/lib $PYTHONHOME/lib/python "$@"
"""


def copy_python(top):
    """Copy Debian's Python with all its libraries: it runs in a guest without any of them."""
    name = f"python3.{sys.version_info.minor}"
    standard, lib = Path("/usr/lib", name), top / "lib"
    unwanted = shutil.ignore_patterns("test", "idlelib", "config-*", "sitecustomize.py")
    shutil.copytree(standard, lib / name, ignore=unwanted, ignore_dangling_symlinks=True)
    program = Path("/usr/bin", name)
    shutil.copy(program, lib / "python")
    argv = ["ldd", program, *standard.glob("lib-dynload/*.so")]
    found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    libraries = {Path(path) for path in re.findall(r"(/\S+) \(0x", found)}
    (where,) = {path.parent for path in libraries if path.name == "libc.so.6"}
    for path in libraries | {where / each for each in LIBRARIES}:
        shutil.copy(path, lib / path.name)
    next(lib.glob("ld-linux*")).rename(lib / "ld.so")
    (top / "bin").mkdir()
    (top / "bin/python3").write_text(START)
    (top / "bin/python3").chmod(0o755)


def install(names):
    """Install the pinned packages with these names, or all, once; return their directory."""
    pins = PINS.read_text()
    if names:
        rows, wanted = pins.splitlines(), names.split()
        pins = "\n".join(row for row in rows if row.partition("==")[0] in wanted)
    kept = REPO / (".venv/clients-quick" if names else ".venv/clients")
    if not (kept / "pins").exists() or (kept / "pins").read_text() != pins:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        (kept / "wanted").write_text(pins)
        pip = ["pip", "install", "-q", "--no-deps", "--target", kept, "-r", kept / "wanted"]
        # scripts/test may have set pip's constraints, which are those of vTorque.
        environ = {name: value for name, value in os.environ.items() if "CONSTRAINT" not in name}
        subprocess.run([sys.executable, "-m", *pip], check=True, timeout=900, env=environ)
        (kept / "wanted").rename(kept / "pins")
    return kept


@pytest.fixture(scope="module")
def clients(slurmdbd, request):
    """Install the tools; return a function that runs a command with them on the submit host."""
    cluster = slurmdbd
    in_full = any(item.get_closest_marker("full") for item in request.session.items)
    kept = install("" if in_full else QUICK)
    subprocess.run(["cp", "-a", kept, cluster.home / "clients"], check=True)
    programs = [each for each in (cluster.home / "clients/bin").iterdir() if each.is_file()]
    subprocess.run(["sed", "-i", f"1s|^#!.*/python.*|#!{PYTHON}|", *programs], check=True)
    copy_python(cluster.home / "python")
    path = f"{HOME}/python/bin:{HOME}/clients/bin:{slurm.PREFIX}:/usr/local/bin:/usr/bin:/bin"
    env = {"PYTHONPATH": f"{HOME}/clients", "PATH": path}

    def run(*argv, check=True):
        return cluster.user(*argv, env=env.items(), machine="login", check=check, timeout=1200)

    yield run
    cluster.user(
        "sh", "-c", "rm -rf .psij .cache .parsl .dask .config .reframe .snakemake .jupyter .local"
    )
    for name in ("clients", "python"):
        shutil.rmtree(cluster.home / name)


def rows_of(done):
    return [line.split() for line in done.stdout.decode().splitlines()]


def in_guest(name):
    return re.fullmatch(r"vn\d", name) is not None


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


REFRAME_SITE = """
site_configuration = {"systems": [{"name": "site", "hostnames": ["login"], "partitions": [{
    "name": "vm", "scheduler": "slurm", "launcher": "local", "environs": ["builtin"],
    "max_jobs": 50,
    "access": ["--vm=ram=300M", "--mem=600M", "--constraint=vtorque"],
}]}]}
"""
REFRAME_TEST = """
import reframe as rfm
import reframe.utility.sanity as sn
class Base(rfm.RunOnlyRegressionTest):
    valid_systems = valid_prog_environs = ["*"]
    @sanity_function
    def runs_in_a_guest(self):
        found = sn.assert_found(r"^vn\\d$", self.stdout)
        return sn.all([found, sn.assert_eq(self.job.exitcode, 0)])
@rfm.simple_test
class Good(Base):
    executable = "hostname"
@rfm.simple_test
class Bad(Base):
    executable = "sh -c 'hostname; exit 3'"
@rfm.simple_test
class Late(Base):
    executable = "sleep 1000"
    time_limit = "1m"
@rfm.simple_test
class Many(Base):
    number = parameter(range(50))
    executable = "hostname"
"""


CANCELED = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it in the background
tool = subprocess.Popen(sys.argv[2:])
def jobs(*options):
    return subprocess.check_output(["squeue", "-h", "-o", "%i", *options], text=True).split()
while len(jobs()) < int(sys.argv[1]) or not jobs("-t", "R"):
    assert tool.poll() is None
    time.sleep(1)
ids = jobs()
tool.send_signal(signal.SIGINT)
print(tool.wait())
print(*ids)
"""


@pytest.mark.full
def test_reframe_runs_its_tests_in_guests(clean, clients):
    """Failed tests are repeated. Ctrl-C cancels a test's job. 50 tests run at once."""
    clean.script(REFRAME_SITE, "site.py")
    clean.script(REFRAME_TEST, "guest.py")
    argv = ("reframe", "-C", "site.py", "-c", "guest.py", "-r", "--system=site:vm")
    done = clients(*argv, "-x", "Many", "--max-retries=1", "--report-file=report.json", check=False)
    assert done.returncode == 1, done
    runs = json.loads(clean.read("report.json"))["runs"]
    found = [[(case["name"], case["result"]) for case in run["testcases"]] for run in runs]
    again = [("Bad", "fail"), ("Late", "fail")]
    assert list(map(sorted, found)) == [sorted([*again, ("Good", "pass")]), again]
    states = {"Good": "COMPLETED", "Bad": "FAILED", "Late": "TIMEOUT"}
    for case in (case for run in runs for case in run["testcases"]):
        clean.wait_state(case["jobid"], states[case["name"]])
    done = clients("python3", clean.script(CANCELED, "tool.py"), "1", *argv, "-n", "Late")
    clean.wait_state(rows_of(done)[-1][0], "CANCELLED")
    clients(*argv, "-n", "Many", "--report-file=report.json")
    (run,) = json.loads(clean.read("report.json"))["runs"]
    assert [case["result"] for case in run["testcases"]] == ["pass"] * 50
    assert len({case["jobid"] for case in run["testcases"]}) == 50


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


SNAKEFILE = """
rule one:
    output: "made"
    shell: "hostname > {output}"
rule bad:
    output: "never"
    shell: "echo once >> tries; exit 3"
rule late:
    output: "later"
    resources: runtime=1
    shell: "sleep 1000"
rule many:
    output: "many/{number}"
    shell: "sleep 1000"
"""
# In the guest, the default scheduler would start a solver that needs glibc, which micro lacks.
SNAKEMAKE = (
    "--jobs=50", "--keep-going", "--latency-wait=30",
    "--retries=1", "--scheduler=greedy",
)  # fmt: skip
SLURM_EXECUTOR = (
    "--executor=slurm", "--slurm-init-seconds-before-status-checks=5",
    "--default-resources", "slurm_extra=--vm=ram=512M", "constraint=vtorque", "mem_mb=800",
    "runtime=10",
)  # fmt: skip
BY_SLURM = ("made", "never", "later", *SLURM_EXECUTOR)
BY_VSUB = (
    "made", "never", "--executor=cluster-generic", "--cluster-generic-submit-cmd",
    "vsub --parsable -vm ram=512M --mem=800M",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("options", [BY_SLURM, BY_VSUB], ids=["slurm", "vsub"])
def test_snakemake_runs_rules_and_retries(clean, clients, options):
    clean.script(SNAKEFILE, "Snakefile")
    late = ("sacct", "-Xns", "TIMEOUT", "-S", "now-1days", "-E", "now", "-o", "JobID")
    before = clean.user(*late).stdout.split()
    done = clients("snakemake", *options, *SNAKEMAKE, check=False)
    assert done.returncode != 0, done
    assert len(clean.user(*late).stdout.split()) == len(before) + 2 * ("later" in options)
    assert in_guest(clean.read("made").decode().strip()), done
    assert clean.read("tries") == b"once\n" * 2
    for name in ("made", "tries"):
        (clean.home / name).unlink()


@pytest.mark.full
def test_snakemake_cancels_50_jobs_by_ctrl_c(clean, clients):
    """All are submitted at once; some run."""
    clean.script(SNAKEFILE, "Snakefile")
    targets = [f"many/{number}" for number in range(50)]
    argv = ("snakemake", *targets, *SLURM_EXECUTOR, *SNAKEMAKE)
    done = clients("python3", clean.script(CANCELED, "tool.py"), "50", *argv)
    (code,), job_ids = rows_of(done)[-2:]
    assert code != "0"
    assert len(job_ids) == 50
    for job_id in job_ids:
        clean.wait_state(job_id, "CANCELLED")


HUB = """
import batchspawner
from pathlib import Path
from jupyterhub.proxy import Proxy
class NoProxy(Proxy):
    should_start = False
    routes = {}
    async def add_route(self, spec, target, data):
        self.routes[spec] = {"routespec": spec, "target": target, "data": data}
        if spec.startswith("/user/"):
            Path("target" + spec.replace("/", ".")).write_text(target + spec)
    async def delete_route(self, spec):
        self.routes.pop(spec, None)
    async def get_all_routes(self):
        return self.routes
c = get_config()
c.JupyterHub.proxy_class = NoProxy
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = c.JupyterHub.allow_named_servers = True
c.JupyterHub.services = [{"name": "tool", "api_token": "SECRET"}]
scopes = ["admin:users", "admin:servers", "access:servers"]
c.JupyterHub.load_roles = [{"name": "tool", "services": ["tool"], "scopes": scopes}]
c.JupyterHub.hub_ip = "SUBMIT_HOST"
c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.Spawner.start_timeout = c.Spawner.http_timeout = 900
c.SlurmSpawner.exec_prefix = ""
c.SlurmSpawner.req_memory = "1000"
c.SlurmSpawner.req_runtime = "60"
c.SlurmSpawner.req_options = "--vm=ram=700M --constraint=vtorque"
c.SlurmSpawner.req_prologue = '''
export PATH=HOME/python/bin:HOME/clients/bin:$PATH PYTHONPATH=HOME/clients
python3 -c 'import os, requests, socket
url, token = (os.environ[f"JUPYTERHUB_API_{name}"] for name in ("URL", "TOKEN"))
place = {"ip": socket.gethostbyname(socket.gethostname())}
headers = {"Authorization": f"token {token}"}
requests.post(f"{url}/batchspawner", headers=headers, json=place).raise_for_status()'
'''
"""
NOTEBOOK = """
import atexit, subprocess, time
from pathlib import Path
import requests
hub = subprocess.Popen(["jupyterhub", "-f", "hub.py"])
atexit.register(hub.terminate)
session = requests.Session()
session.headers["Authorization"] = "token SECRET"
user = "http://SUBMIT_HOST:8081/hub/api/users/vtslurm1"
def until(condition):
    while not (found := condition()):
        assert hub.poll() is None
        time.sleep(1)
    return found
def answers():
    try:
        return session.post(user).status_code in (201, 409)
    except requests.ConnectionError:
        return False
until(answers)
names = ("one", "two", "three", "four")
for name in names:
    session.post(f"{user}/servers/{name}").raise_for_status()
def ready():
    servers = session.get(user).json()["servers"]  # without those whose job has ended
    assert servers.keys() == set(names)
    return servers if all(server["ready"] for server in servers.values()) else None
for name, server in until(ready).items():
    target = Path(f"target.user.vtslurm1.{name}.").read_text()
    status = session.get(target + "api/status")
    status.raise_for_status()
    print(server["state"]["job_id"], target, status.json()["kernels"])
for name in names:
    session.delete(f"{user}/servers/{name}").raise_for_status()
until(lambda: not session.get(user).json()["servers"])
"""


@pytest.mark.full
def test_batchspawner_starts_notebook_servers_in_guests(clean, clients):
    """The hub reaches each server at its guest's address, which the job reports."""

    def fill_in(text):
        text = text.replace("SUBMIT_HOST", SUBMIT_HOST).replace("HOME", HOME)
        return text.replace("SECRET", "0" * 32)

    clean.script(fill_in(HUB), "hub.py")
    clean.script(fill_in(NOTEBOOK), "tool.py")
    rows = rows_of(clients("python3", "tool.py"))
    hosts = {str(ipaddress.ip_address(urlsplit(target).hostname)) for _, target, _ in rows}
    assert len(hosts) == len(rows) == 4
    assert not hosts & {f"10.89.0.{number}" for number in (1, 2, 11, 12, 13)}
    for job_id, _, kernels in rows:
        assert kernels == "0"
        clean.wait_state(job_id, "CANCELLED")
