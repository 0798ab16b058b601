"""ReFrame, Snakemake and JupyterHub, unchanged from PyPI, with ``--vm=``: their jobs run in guests.

They run on the submit host ``login``, and poll Slurm as they always do.
"""

import ipaddress
import json
from urllib.parse import urlsplit

import pytest

from client_tools import HOME, SUBMIT_HOST, TIMEOUTS, in_guest, rows_of

pytestmark = pytest.mark.e2e

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
rule each:
    output: "each/{number}"
    resources: runtime=60
    shell: "hostname > {output}"
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
    before = clean.user(*TIMEOUTS).stdout.split()
    done = clients("snakemake", *options, *SNAKEMAKE, check=False)
    assert done.returncode != 0, done
    assert len(clean.user(*TIMEOUTS).stdout.split()) == len(before) + 2 * ("later" in options)
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


@pytest.mark.full
def test_snakemake_runs_50_jobs_to_their_end(clean, clients):
    clean.script(SNAKEFILE, "Snakefile")
    targets = [f"each/{number}" for number in range(50)]
    clients("snakemake", *targets, *SLURM_EXECUTOR, *SNAKEMAKE, timeout=3600)
    assert all(in_guest(clean.read(target).decode().strip()) for target in targets)


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
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}  # a request does not wait for its server
c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.Spawner.start_timeout = c.Spawner.http_timeout = 900
c.SlurmSpawner.exec_prefix = ""
c.SlurmSpawner.startup_poll_interval = 3
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
names = {f"server{number}" for number in range(ALL)}
for name in names:
    session.post(f"{user}/servers/{name}").raise_for_status()
def ready():
    servers = session.get(user).json()["servers"]  # without those whose job has ended
    assert servers.keys() == names
    submitted = all((server["state"] or {}).get("job_id") for server in servers.values())
    return submitted and sum(server["ready"] for server in servers.values()) >= READY and servers
for name, server in until(ready).items():
    target, kernels = "-", "-"
    if server["ready"]:
        target = Path(f"target.user.vtslurm1.{name}.").read_text()
        status = session.get(target + "api/status")
        status.raise_for_status()
        kernels = status.json()["kernels"]
    print(server["state"]["job_id"], target, kernels)
for name in names:
    session.delete(f"{user}/servers/{name}").raise_for_status()
until(lambda: not session.get(user).json()["servers"])
"""


@pytest.mark.full
@pytest.mark.parametrize(("count", "least"), [(4, 4), (50, 3)])
def test_batchspawner_starts_notebook_servers_in_guests(clean, clients, count, least):
    """The hub reaches each server at its guest's address, which the job reports.

    Not all of 50 servers run at once; all are stopped.
    """

    def fill_in(text):
        text = text.replace("SUBMIT_HOST", SUBMIT_HOST).replace("HOME", HOME)
        text = text.replace("ALL", str(count)).replace("READY", str(least))
        return text.replace("SECRET", "0" * 32)

    clean.script(fill_in(HUB), "hub.py")
    clean.script(fill_in(NOTEBOOK), "tool.py")
    rows = rows_of(clients("python3", "tool.py"))
    assert len({job_id for job_id, _, _ in rows}) == count
    ready = [row for row in rows if row[1] != "-"]
    hosts = {str(ipaddress.ip_address(urlsplit(target).hostname)) for _, target, _ in ready}
    assert len(hosts) == len(ready) >= least
    assert not hosts & {f"10.89.0.{number}" for number in (1, 2, 11, 12, 13)}
    assert {kernels for _, _, kernels in ready} == {"0"}
    for job_id, _, _ in rows:
        clean.wait_state(job_id, "CANCELLED")
