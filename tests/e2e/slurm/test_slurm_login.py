"""Commands about a running job from a submit host, on a real Slurm of three nodes.

The machine "login" has Slurm's commands and vTorque's; no node, no libvirt, no ssh to other hosts,
and no file of a node.
"""

import contextlib
import json
import re

import pytest

import slurm_cluster as slurm
from terminal import PROMPT, CommandTerminal

pytestmark = pytest.mark.e2e

HELD = "#!/bin/sh\necho running\nwhile [ ! -e ~/go ]; do sleep 0.2; done\n"


@contextlib.contextmanager
def held(cluster):
    """Yield a function that starts a job whose script waits until the block ends."""
    (cluster.home / "go").unlink(missing_ok=True)

    def start(*args):
        job_id = cluster.submit(HELD, *args)
        cluster.wait(lambda: b"running" in cluster.read("out"), what="the script")
        return job_id

    try:
        yield start
    finally:
        (cluster.home / "go").write_text("")
        cluster.wait(lambda: not cluster.root("head", "squeue", "-h"), what="the end of the job")


@pytest.fixture
def start_running(clean):
    """Return a function that starts a job which ends with the test."""
    with held(clean) as start:
        yield start


def vmgr(cluster, *argv, check=True, stdin=b""):
    return cluster.user("vmgr", *argv, machine="login", check=check, stdin=stdin)


def test_submit_host_has_no_daemons_and_no_ssh_to_nodes(clean):
    """No program on it could answer in place of a node."""
    assert "vtorque" not in clean.root("login", "ls", "/var/lib").split()
    assert clean.processes("login", "libvirtd|slurmd|sshd|munged") == []
    assert clean.user("ssh", "-oBatchMode=yes", "n1", machine="login", check=False).returncode


def terminal_in(cluster, job_id, rank):
    ssh = ("vmgr", "ssh", job_id, rank)
    env = (("TERM", "xterm"),)
    return CommandTerminal(
        cluster.user_command(*ssh, machine="login", env=env), rows=31, columns=97
    )


SSH = """#!/bin/sh
[ "$#" = 4 ] || { shift 4; exec "$@"; }
trap 'stty size' WINCH; stty size
while :; do read -r line && [ "$line" = over ] && exit 7; done
"""


@pytest.fixture(scope="class")
def job_id(cluster):
    """Return the id of a job that runs on two nodes; its owner cancels it from the submit host."""
    with slurm.nothing_left(cluster), held(cluster) as start:
        job_id = start("-N2", "-wn1,n2")
        yield job_id
        vmgr(cluster, "cancel", job_id)
        cluster.wait_state(job_id, "CANCELLED")


class TestAJobOnTwoNodes:
    """All tests here use the same running job."""

    def test_vmgr_commands_for_a_job_on_two_nodes_work_on_the_submit_host(self, job_id, cluster):
        (job,) = json.loads(vmgr(cluster, "ps", "--json", "--phase").stdout)
        assert (job["id"], job["state"], job["nodes"]) == (job_id, "R", ["n1", "n2"])
        seen = [(each["node"], each["phase"], each["guests"]) for each in job["on_nodes"]]
        assert seen == [("n1", "run", ["vn1"]), ("n2", "run", ["vn2"])]
        shown = vmgr(cluster, "ps", job_id, "--phase").stdout.decode()
        rows = (
            r"ELAPSED +PHASE +IMAGE +GUESTS\n.* n1 .* run +micro +vn1\n.* n2 .* run +micro +vn2\n"
        )
        assert re.search(rows, shown)
        assert b": vn1: image micro" in vmgr(cluster, "logs", job_id).stdout
        entries = vmgr(cluster, "logs", "--json", "--node", "n2", job_id).stdout.splitlines()
        assert {json.loads(line)["node"] for line in entries} == {"n2"}
        log = vmgr(cluster, "logs", job_id).stdout
        assert log.count(b"the guests are ready after") == 2, (
            "the log has not the entries of both nodes"
        )
        said = vmgr(cluster, "report", job_id).stdout.decode()
        assert f"Job {job_id}: running\nof {slurm.USER} on n1, n2 (slurm)" in said
        assert re.search(r"\nn1 .* running\nn2 .* running\n", said)
        report = json.loads(vmgr(cluster, "report", "--json", job_id).stdout)
        assert [(g["rank"], g["node"]) for g in report["guests"]] == [(0, "n1"), (1, "n2")]
        vmgr(cluster, "report", "--html", "page.html", job_id)
        assert b"<html" in cluster.read("page.html") and b"vn2" in cluster.read("page.html")
        page = cluster.root("login", "vmgr", "report", "--html", "-", job_id)
        assert "<html" in page and "vn2" in page, "root cannot write the report of a user's job"
        said = cluster.root("n2", "vmgr", "report", job_id)
        assert re.search(r"\nn2 .* running\nn1 .* running\n", said), (
            "the report on a node lacks another node"
        )
        said = f"echo seen >> /var/lib/vtorque/jobs/{job_id}.0/g0/console.log"
        cluster.root("n1", "sh", "-c", said)
        assert vmgr(cluster, "logs", "--console", job_id).stdout.endswith(b"seen\n")
        refused = vmgr(cluster, "ssh", job_id, "1", check=False)
        assert b"does not support ssh" in refused.stderr
        other = vmgr(cluster, "logs", "--node", "n3", job_id, check=False)
        assert b"runs on n1, n2" in other.stderr

    def test_log_is_followed_while_the_job_runs(self, job_id, cluster):
        terminal = CommandTerminal(
            cluster.user_command("vmgr", "logs", "-f", job_id, machine="login")
        )
        terminal.read(rb"run +core: ")
        terminal.write(b"\x03\x03")
        assert terminal.code() != 0
        assert cluster.state(job_id) == "RUNNING", "the end of vmgr logs -f has ended the job"

    def test_root_reads_logs_of_every_job_and_other_users_do_not(self, job_id, cluster):
        entries = cluster.root("login", "vmgr", "logs", "--json", job_id).splitlines()
        assert {json.loads(line)["job"] for line in entries} == {job_id}
        other = cluster.user("vmgr", "logs", job_id, machine="login", user="vtslurm2", check=False)
        assert other.returncode
        assert b'"job"' not in other.stdout

    def test_vmgr_ssh_opens_a_terminal_by_a_slurm_step(self, job_id, cluster):
        """Uses a double of ssh, because the micro image has no sshd."""
        cluster.root("n1", "touch", f"/run/vtorque/jobs/{job_id}.0/g0/ssh_config")
        cluster.root("n1", "cp", "/usr/bin/ssh", "/usr/bin/ssh.real")
        try:
            cluster.root("n1", "sh", "-c", "cat > /usr/bin/ssh", stdin=SSH.encode())
            terminal = terminal_in(cluster, job_id, "0")
            terminal.read(rb"31 97\r\n")
            terminal.resize(20, 50)
            terminal.read(rb"20 50\r\n")
            terminal.write(b"over\r")
            assert terminal.code() == 7
            words = ("ssh", job_id, "0", "--", "sh", "-c", "cat; exit 5")
            done = vmgr(cluster, *words, check=False, stdin=b"\0in")
            assert (done.returncode, done.stdout) == (5, b"\0in")
        finally:
            cluster.root("n1", "mv", "/usr/bin/ssh.real", "/usr/bin/ssh")


@pytest.mark.full
def test_vmgr_ssh_opens_a_session_in_guests_with_sshd(start_running, clean):
    """The job runs on two nodes, which the submit host can reach only through Slurm."""
    image = clean.image("debian")
    job_id = start_running("-N2", "-wn1,n2", "-vm", f"img={image},ram=768M,vcpus=1")
    for rank in ("0", "1"):
        terminal = terminal_in(clean, job_id, rank)
        terminal.read(PROMPT)
        terminal.write(b"echo at $(hostname) $(id -un) $TERM $(stty size)\r")
        terminal.read(rf"at vn{int(rank) + 1} {slurm.USER} xterm 31 97\r".encode())
        terminal.resize(20, 80)
        terminal.write(b"until stty size | grep '20 80'; do sleep 0.1; done\r")
        terminal.read(rb"\n20 80\r|\r20 80\r")
        assert terminal.leave(7) == 7
    done = vmgr(
        clean, "ssh", job_id, "1", "--", "cat; hostname; exit 5", check=False, stdin=b"\0in\n"
    )
    assert (done.returncode, done.stdout) == (5, b"\0in\nvn2\n")


@pytest.mark.full
def test_reason_of_a_pending_job_is_shown(start_running, clean):
    first = start_running("-N3", "--exclusive")
    job_id = clean.user("vsub", "--parsable", "-o", "out2", "-N3", "job.sh").stdout.decode().strip()
    clean.wait(lambda: "Resources" in vmgr(clean, "ps").stdout.decode(), what="the reason")
    said = vmgr(clean, "logs", job_id, check=False).stderr
    assert b"is not running on a node: its state is PD, reason: " in said
    assert first != job_id
    clean.user("scancel", job_id)


def test_cluster_name_is_configured_on_the_submit_host(cluster):
    assert slurm.NAME in cluster.root("login", "cat", "/etc/slurm/slurm.conf")
