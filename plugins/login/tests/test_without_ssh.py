"""Torque without ssh: real processes, a real home, real connections, and a double of Torque.

The submit host and the node are one machine in a separate network and mount namespace, which root
makes; their own files are in different directories.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from acme_card import in_other_process
from login_homes import a_request
from pbs_harness import ME, FakePbs
from vtorque_core.api import JobAttempt, Paths, Refused, kept_records
from vtorque_login import requests

pytestmark = pytest.mark.e2e

JOB = "7.server"
_LOGGED = {
    "level": "INFO", "logger": "x", "plugin": "core", "phase": "run", "node": "n1", "job": JOB,
    "message": "the guests are ready", "t": 1.0, "guest": None,
}  # fmt: skip


# Runs it on both nodes, which are one machine here: n2 with its own config.
PBSDSH = """#!/bin/sh -e
[ "$1" = -u ] && shift
"$@"
python=$1 config=$5
shift 5
exec "$python" -I -m vtorque_login.answer "${config%/node/*}/node2/${config##*/}" "$@"
"""


@pytest.fixture
def cluster(tmp_path):
    """Return a function that runs command lines as on the submit host, while the job runs on n1."""
    pbs = FakePbs(tmp_path, "torque")
    state = pbs.state()
    state["jobs"][JOB] = {
        "name": "job.sh", "owner": ME, "state": "R", "exec_host": "n1/0", "hold": "n",
        "interactive": False, "resources": {}, "variables": {}, "start_count": 1,
    }  # fmt: skip
    pbs.write(state)
    configs = {}
    for place in ("submit", "node", "node2"):
        top = tmp_path / place
        top.mkdir(mode=0o755)
        configs[place] = top / "vtorque.toml"
        configs[place].write_text(
            f'[batch]\nsystem = "torque"\n[paths]\nstate = "{top}/state"\nrun = "{top}/run"\n'
            f'[plugin.pbs]\nbindir = "{pbs.bin}"\n[plugin.login]\n'
            "poll_interval = 0.1\nanswer_timeout = 10.0\n"
        )
    for rank, (node, place) in enumerate((("n1", "node"), ("n2", "node2"))):
        (tmp_path / place / "state").mkdir()
        paths = Paths(tmp_path / place / "state", tmp_path / place / "run")
        kept = kept_records.place(paths, JobAttempt(JOB, 0, ME, os.getuid(), node))
        guests = [{"rank": rank, "index": 0, "hostname": f"v{node}"}]
        kept.add_facts(job=JOB, node=node, nodes=[node], guests=guests, started=1.0, phases=[])
        kept.write(kept_records.LOG, json.dumps(_LOGGED | {"node": node}).encode() + b"\n")
    pbsdsh = tmp_path / "tasks/pbsdsh"
    pbsdsh.parent.mkdir()
    pbsdsh.write_text(PBSDSH)
    pbsdsh.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)

    def run(*commands, exec_host="n1/0", vmgr=("-m", "vtorque_core.cli.vmgr")):
        state["jobs"][JOB]["exec_host"] = exec_host
        pbs.write(state)
        vmgr = [sys.executable, "-I", *vmgr]
        lines = [[*vmgr, "--config", str(configs["submit"]), *words] for words in commands]
        plan = {"top": str(tmp_path), "home": str(home), "node": str(configs["node"]), "job": JOB}
        (tmp_path / "plan").write_text(json.dumps(plan | {"run": lines}))
        program = Path(__file__).parent / "support/login_machine.py"
        path = os.pathsep.join(p for p in sys.path if p)
        done = subprocess.run(
            ["unshare", "--mount", "--net", "--propagation=private", sys.executable, program,
             tmp_path / "plan"],
            capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["commands"], found["left"]) == (1, 0), (
            "the companion has not ended with the script"
        )
        assert list((home / ".vtorque/requests").iterdir()) == []
        return found["said"]

    return run


def test_commands_for_a_running_job_work(cluster, tmp_path):
    page = tmp_path / "page.html"
    log, short, report, html, ssh, phases, wrong = cluster(
        ["logs", JOB],
        ["logs", "--json", "7"],
        ["report", "--json", JOB],
        ["report", "--html", str(page), JOB],
        ["ssh", JOB, "0", "--", "-oProxyCommand=touch /tmp/x"],
        ["ps", "--phase"],
        ["logs", "--node", "n2", JOB],
    )
    assert log[0] == 0 and log[1].endswith("run           core: the guests are ready\n")
    assert json.loads(short[1])["message"] == "the guests are ready"
    assert json.loads(report[1])["job"] == JOB
    assert html[0] == 0 and page.read_text().startswith("<!")
    assert (ssh[0], "does not support ssh" in ssh[2]) == (2, True), "the node has not answered"
    assert phases[1].splitlines()[1].split()[-2:] == ["run", "vn1"]
    assert "job 7.server runs on n1" in wrong[2]


# This user is root, who reads no file that came from another host.
NO_ADMIN = "import os; os.geteuid = lambda: 1; from vtorque_core.cli import vmgr; vmgr.main()"


def test_running_job_on_two_nodes_has_one_report(cluster):
    report, log = cluster(
        ["report", "--json", JOB],
        ["logs", JOB],
        exec_host="n1/0+n2/0",
        vmgr=("-c", NO_ADMIN),
    )
    assert report[0] == 0, report[2]
    guests = json.loads(report[1])["guests"]
    assert [(guest["rank"], guest["node"]) for guest in guests] == [(0, "n1"), (1, "n2")]
    assert sorted(line.split()[0] for line in log[1].splitlines()) == ["n1", "n2"]


def as_another(directory, work):
    """Call ``work`` with a descriptor of the directory as another user; return its errno, or 0."""
    place = os.open(directory, os.O_RDONLY)

    def other():
        os.setgroups([])
        os.setgid(2002)
        os.setuid(2002)
        try:
            work(place)
        except OSError as error:
            os._exit(error.errno)

    status = os.waitpid(in_other_process(other), 0)[1]
    os.close(place)
    return os.waitstatus_to_exitcode(status)


def written(path):
    def work(place):
        flags = os.O_WRONLY | os.O_CREAT
        os.write(os.open(path, flags, 0o666, dir_fd=place), json.dumps(a_request()).encode())

    return work


def test_other_user_neither_reads_nor_writes_a_request(home):
    """Any other user of the host, even if the home is accessible to all."""
    home.chmod(0o777)
    with requests.directory("42.srv") as place:
        request = requests.parse_request(json.dumps(a_request()).encode(), "42.srv")
        name = requests.write_request(place, request)
    below = ".vtorque/requests/42.srv.0"
    read = as_another(home, lambda at: os.open(f"{below}/{name}", os.O_RDONLY, dir_fd=at))
    assert read == errno.EACCES
    planted = "f" * 32 + ".json"
    assert as_another(home, written(f"{below}/{planted}")) == errno.EACCES
    mine = home / below
    mine.chmod(0o777)
    assert as_another(mine, written(planted)) == 0, (
        "another user cannot write to a world-writable directory: this test shows nothing"
    )
    with (
        requests.directory("42.srv") as place,
        pytest.raises(Refused, match="is not a file of yours"),
    ):
        requests.read(place, planted)
    assert mine.stat().st_mode & 0o777 == 0o700, "the directory is still accessible to others"


def test_directory_of_another_user_is_not_used(home):
    home.chmod(0o777)
    assert as_another(home, lambda at: os.mkdir(".vtorque", dir_fd=at)) == 0
    with (
        pytest.raises(Refused, match="vtorque belongs to another user: remove it"),
        requests.directory("42.srv"),
    ):
        pass
