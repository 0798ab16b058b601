"""Jobs that stand still with ``scontrol suspend``, or as their owner says, on one node and two."""

import pytest

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
def begun(clean):
    """Return a function that starts a job which counts."""

    def begin(to, *args):
        for name in ("counted", "ended"):
            (clean.home / name).unlink(missing_ok=True)
        job_id = clean.submit(COUNTS.format(to), *args)
        clean.wait(lambda: counted(clean) > 0, what="the job counts")
        return job_id

    return begin


def ends_right(cluster, job_id, to):
    cluster.wait_state(job_id, "FAILED")
    assert cluster.show(job_id)["ExitCode"] == "7:0"
    assert cluster.read("out").decode().split() == [str(number) for number in range(1, to + 1)]
    file = cluster.home / "ended"
    assert abs(file.stat().st_mtime - int(file.read_text())) <= 1


def test_all_its_guests_stand_still_while_slurm_suspends_it(begun, clean):
    job_id = begun(80, *BOTH)
    for _ in range(2):
        clean.root("head", "scontrol", "suspend", job_id)
        clean.wait(lambda: states(clean, "n1", "n2") == {"paused"}, what="all stand still")
        before = counted(clean)
        refused = clean.user("vmgr", "resume", job_id, machine="login", check=False)
        assert refused.returncode
        assert (clean.state(job_id), counted(clean)) == ("SUSPENDED", before)
        clean.root("head", "scontrol", "resume", job_id)
        clean.wait(lambda: states(clean, "n1", "n2") == {"running"}, what="all go on")
    ends_right(clean, job_id, 80)


def test_its_owner_has_it_stand_still_from_a_submit_host(begun, clean):
    job_id = begun(60, *BOTH)
    clean.user("vmgr", "suspend", job_id, machine="login")
    assert states(clean, "n1", "n2") == {"paused"}
    assert "paused" in clean.user("vmgr", "ps", "--phase", machine="login").stdout.decode()
    clean.user("vmgr", "resume", job_id, machine="login")
    assert states(clean, "n1", "n2") == {"running"}
    ends_right(clean, job_id, 60)


def test_a_suspended_job_that_is_cancelled_leaves_nothing(begun, clean):
    job_id = begun(1000)
    clean.root("head", "scontrol", "suspend", job_id)
    clean.wait(lambda: "paused" in states(clean, "n1", "n2", "n3"), what="it stands still")
    clean.root("head", "scancel", job_id)
    clean.wait_state(job_id, "CANCELLED")
