"""Jobs suspended by ``scontrol suspend`` or by their owner, on one node and on two."""

import random
import time

import pytest

import mpi_turns
import slurm_cluster as slurm

pytestmark = pytest.mark.e2e

BOTH = ("-N2", "-wn1,n2")
COUNTS = """#!/bin/sh
i=0
while [ $i -lt {} ]; do i=$((i + 1)); echo $i; echo $i >> counted; sleep 0.1; done
date +%s > ended
exit 7
"""


def counted(cluster):
    return len(cluster.read("counted").splitlines())


def states(cluster, *nodes):
    """Return the states of all guests of these nodes."""
    return {
        cluster.root(node, "virsh", "domstate", name).strip()
        for node in nodes
        for name in cluster.guests(node)
    }


@pytest.fixture
def start_counting(clean):
    """Return a function that starts a counting job."""

    def begin(to, *args):
        for name in ("counted", "ended"):
            (clean.home / name).unlink(missing_ok=True)
        job_id = clean.submit(COUNTS.format(to), *args)
        clean.wait(lambda: counted(clean) > 0, what="output of the job")
        return job_id

    return begin


def assert_complete_output(cluster, job_id, to):
    cluster.wait_state(job_id, "FAILED")
    assert cluster.show(job_id)["ExitCode"] == "7:0"
    assert cluster.read("out").decode().split() == [str(number) for number in range(1, to + 1)]
    file = cluster.home / "ended"
    assert -1 <= file.stat().st_mtime - int(file.read_text()) <= 2  # date prints whole seconds


@pytest.mark.full
def test_all_guests_are_paused_when_slurm_or_the_owner_suspends_the_job(start_counting, clean):
    """The owner suspends the job from a submit host."""
    job_id = start_counting(140, *BOTH)
    for _ in range(2):
        clean.root("head", "scontrol", "suspend", job_id)
        clean.wait(lambda: states(clean, "n1", "n2") == {"paused"}, what="all guests paused")
        before = counted(clean)
        refused = clean.user("vmgr", "resume", job_id, machine="login", check=False)
        assert refused.returncode
        assert (clean.state(job_id), counted(clean)) == ("SUSPENDED", before)
        clean.root("head", "scontrol", "resume", job_id)
        clean.wait(lambda: states(clean, "n1", "n2") == {"running"}, what="all guests running")
    clean.user("vmgr", "suspend", job_id, machine="login")
    assert states(clean, "n1", "n2") == {"paused"}
    assert "paused" in clean.user("vmgr", "ps", "--phase", machine="login").stdout.decode()
    clean.user("vmgr", "resume", job_id, machine="login")
    assert states(clean, "n1", "n2") == {"running"}
    assert_complete_output(clean, job_id, 140)


@pytest.mark.full
def test_suspended_job_that_is_canceled_leaves_nothing(start_counting, clean):
    job_id = start_counting(1000)
    clean.root("head", "scontrol", "suspend", job_id)
    clean.wait(lambda: "paused" in states(clean, "n1", "n2", "n3"), what="a paused guest")
    clean.root("head", "scancel", job_id)
    clean.wait_state(job_id, "CANCELLED")


# -- Only with --full ------------------------------------------------------------------------------

CONF = "/etc/slurm/slurm.conf"
PREEMPTS = b"""
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 OverSubscribe=FORCE:1
"""


@pytest.fixture
def urgent(cluster):
    """Let jobs of a partition suspend those of the other."""
    for machine in slurm.MACHINES:
        cluster.root(machine, "cp", CONF, f"{CONF}.before")
        cluster.root(machine, "sed", "-i", "/^PartitionName=main/s/$/ OverSubscribe=FORCE:1/", CONF)
        cluster.root(machine, "sh", "-c", f"cat >> {CONF}", stdin=PREEMPTS)
    cluster.restart_slurm()
    yield
    for machine in slurm.MACHINES:
        cluster.root(machine, "mv", f"{CONF}.before", CONF)
    cluster.restart_slurm()


@pytest.mark.full
def test_preempted_job_releases_its_cpus_and_resumes_later(urgent, start_counting, clean):
    """According to Slurm, both have all CPUs of the node: the ledger must agree."""
    one = ("-wn1", "-c2", "--mem=1000")
    job_id = start_counting(150, *one)
    (clean.home / "urgent.sh").write_text("#!/bin/sh\nnproc; exit 3\n")
    argv = ("vsub", "--parsable", "-p", "urgent", "-o", "urgent.out", *one, "urgent.sh")
    other = clean.user(*argv).stdout.decode().strip()
    clean.wait_state(job_id, "SUSPENDED")
    clean.wait(lambda: "paused" in states(clean, "n1"), what="a paused guest")
    before = counted(clean)
    clean.wait_state(other, "FAILED")
    assert (clean.show(other)["ExitCode"], clean.read("urgent.out")) == ("3:0", b"2\n")
    clean.wait(lambda: counted(clean) > before, what="more output of the job")
    assert_complete_output(clean, job_id, 150)


@pytest.mark.full
def test_mpi_over_two_nodes_is_suspended_five_times(cluster, clean):
    mpi_turns.prepare(cluster)
    job_id = clean.submit(mpi_turns.SCRIPT, "-wn1,n2", *mpi_turns.ASKED)
    clean.wait(lambda: mpi_turns.turn(clean), 400, what="messages of the ranks")
    for _ in range(5):
        time.sleep(random.uniform(0.5, 2.0))  # noqa: S311
        clean.root("head", "scontrol", "suspend", job_id)
        clean.wait(lambda: states(clean, "n1", "n2") == {"paused"}, what="all guests paused")
        time.sleep(random.uniform(0.5, 2.0))  # noqa: S311
        clean.root("head", "scontrol", "resume", job_id)
        clean.wait(lambda: states(clean, "n1", "n2") == {"running"}, what="all guests running")
    clean.wait_state(job_id, "COMPLETED")
    mpi_turns.check(clean)
