"""Checkpoints on a shared file system, restored on other nodes of a real Slurm."""

import itertools
import subprocess

import pytest

import health_commands
import mpi_turns
import slurm_cluster as slurm
import writing
from vtorque_core.resources import virtiofs_daemon

pytestmark = pytest.mark.e2e

saves = pytest.mark.skipif(
    not virtiofs_daemon.can_save(), reason="needs Debian 13: scripts/test --full debian13"
)
PLACE, CONF = "/home/.checkpoints", "/etc/vtorque/vtorque.toml"
SITE = f"""
[plugin.survive]
checkpoints = "{PLACE}"
checkpoints_shared = true
cpu_model = "Nehalem"
"""
ASKED = ("--open-mode=append", "-vm", "checkpoint=every:1h")
COUNTS = """#!/bin/sh
exec 3>>counted
i=0
while [ $i -lt {} ]; do i=$((i + 1)); echo $i; echo $i >&3; sleep 0.1; done
grep -m1 "model name" /proc/cpuinfo >&2
exit 7
"""


@pytest.fixture
def place(clean):
    """Configure one directory for checkpoints on all nodes."""
    for machine in slurm.MACHINES:
        clean.root(machine, "cp", CONF, f"{CONF}.before")
        clean.root(machine, "sh", "-c", f"cat >> {CONF}", stdin=SITE.encode())
    clean.root("head", "install", "-d", "-m", "700", PLACE)
    clean.root("head", "touch", f"{PLACE}/.vtorque-checkpoints")
    for name in ("counted", "out", "err", "on", "enough"):
        (clean.home / name).unlink(missing_ok=True)
    yield clean
    clean.root("head", "rm", "-rf", PLACE)
    for machine in slurm.MACHINES:
        clean.root(machine, "mv", f"{CONF}.before", CONF)


def submit(cluster, *args, to=150, script=COUNTS):
    """Submit a counting job; output of an earlier job is kept."""
    words = ("vsub", "--parsable", "-o", "out", "-e", "err", "--open-mode=append", *args)
    return cluster.user(*words, cluster.script(script.format(to))).stdout.decode().strip()


def counted(cluster):
    return cluster.read("counted").decode().split()


def await_more(cluster, than):
    cluster.wait(lambda: len(counted(cluster)) > than, what=f"more than {than} lines")


def saved(cluster, job_id):
    """Save a job as its owner; return the checkpoint's id, and the job's count at that time.

    On the submit host: a request from the node would be a step of the job, which ends with it.
    """
    name = cluster.user("vmgr", "checkpoint", "--stop", job_id).stdout.decode().strip()
    assert name.startswith(f"{job_id}."), name
    cluster.wait_state(job_id, "CANCELLED")
    return name, len(counted(cluster))


def addresses(cluster, node):
    """Return the addresses that a node's guests may send from, by its packet filters."""
    rules = cluster.root(node, "nft", "list", "ruleset", check=False).split()
    return {word for word in rules if word.startswith("10.89.")}


def numbers(to=150):
    return [str(number) for number in range(1, to + 1)]


@saves
def test_job_is_restored_on_another_node_with_its_address(place):
    job_id = submit(place, "-wn1", *ASKED)
    await_more(place, 0)
    address = addresses(place, "n1")
    name, begun = saved(place, job_id)
    words = ("vsub", "--parsable", "-o", "other", "-wn1", place.script("#!/bin/sh\nsleep 600\n"))
    other = place.user(*words).stdout.decode().strip()
    theirs = place.wait(lambda: addresses(place, "n1"), what="a guest of another job on n1")
    assert address and theirs and not address & theirs
    job_id = submit(place, "-wn2", "-vm", f"resume={name}")
    await_more(place, begun)
    assert addresses(place, "n2") == address
    place.wait_state(job_id, "FAILED")
    assert place.show(job_id)["ExitCode"] == "7:0"
    assert counted(place) == numbers() == place.read("out").decode().split()
    assert b"Nehalem" in place.read("err"), "the guest has not the site's CPU model"
    place.root("head", "scancel", other)


@pytest.fixture
def echoes(place):
    """Let guests other than rank 0 echo their input; return the expected output of a job."""
    scripts = "/etc/vtorque/in-guests"
    table = f'\n[plugin.linux-guest]\nprologue = "{scripts}"\n'
    for machine in slurm.MACHINES:
        place.root(machine, "sh", "-c", f"cat >> {CONF}", stdin=table.encode())
        place.root(machine, "mkdir", scripts)
        script = f"cat > {scripts}/a; chmod 755 {scripts}/a"
        place.root(machine, "sh", "-c", script, stdin=writing.ECHOES.encode())
    for name in ("also", "ended"):
        (place.home / name).unlink(missing_ok=True)
    yield writing.give(place.home)
    for machine in slurm.MACHINES:
        place.root(machine, "rm", "-rf", scripts)


@pytest.fixture
def disk(place):
    """Return a disk file of the user's, empty."""
    disk = f"/home/{slurm.USER}/data.raw"
    place.user("truncate", "-s", "64M", disk)
    place.user("/usr/sbin/mke2fs", "-q", "-F", "-t", "ext4", disk)
    yield disk
    (place.home / "data.raw").unlink()


@saves
@pytest.mark.full
@pytest.mark.releases
def test_job_is_restored_twenty_times_on_alternating_nodes(place, echoes, disk):
    """Files, a pipe, a connection between guests, a disk, memory: no byte is lost."""
    asked, memory = f"ram=384M,vms_per_node=2,disk={disk}", echoes
    text = writing.script(writing.OTHER_GUEST, "/data/also")
    words = ("vsub", "--parsable", "-o", "out", "-e", "err", "--open-mode=append")
    script = place.script(text)

    def submitted(node, *more):
        done = place.user(*words, f"-w{node}", "-vm", asked, *more, script)
        return done.stdout.decode().strip()

    job_id = submitted("n1")
    for node in ("n2", "n1") * 10:
        await_more(place, len(counted(place)) + 5)
        name, begun = saved(place, job_id)
        job_id = submitted(node, "-vm", f"resume={name}")
        await_more(place, begun)
        place.root(node, "vmgr", "checkpoints", "remove", name)
    place.script("", "enough")
    place.wait_state(job_id, "FAILED")
    assert place.show(job_id)["ExitCode"] == "7:0"
    assert counted(place) == numbers(len(counted(place)))
    assert place.read("out").decode().split() == writing.expected_output(counted(place), memory)


def crash(cluster, node):
    """Kill all processes of a node that a crash would end, and report it to Slurm."""
    for pattern in ("^slurm", "guest=vt-", "virtiofsd"):
        for pid in cluster.processes(node, pattern):
            cluster.root(node, "kill", "-9", pid, check=False)
    cluster.root("head", "scontrol", "update", f"nodename={node}", "state=down", "reason=crash")


def mend(cluster, node):
    cluster.root(node, "slurmd")
    cluster.root(node, "vtorque", "reap")
    cluster.root("head", "scontrol", "update", f"nodename={node}", "state=resume")


@saves
def test_requeued_job_is_restored_also_after_a_node_crash(place):
    job_id = submit(place, *ASKED, to=300)
    await_more(place, 0)
    _, begun = saved(place, job_id)
    place.root("head", "scontrol", "requeue", job_id)
    await_more(place, begun + 20)
    assert counted(place) == numbers(len(counted(place))), "the job started from its beginning"
    crashed = place.show(job_id)["NodeList"]
    crash(place, crashed)
    try:
        place.wait(
            lambda: place.show(job_id).get("NodeList") not in ("", "(null)", None, crashed),
            what="the job on another node",
        )
        place.wait_state(job_id, "FAILED")
    finally:
        mend(place, crashed)
    assert place.show(job_id)["ExitCode"] == "7:0"
    said = place.read("out").decode().split()
    at = said.index(str(begun + 1), begun + 1)  # output after the checkpoint is repeated
    assert said[at:] == numbers(300)[begun:], (begun, said)
    assert said[:at] == numbers(at)


@pytest.fixture
def health_watch(place):
    """Run health checks on all nodes."""
    with health_commands.checked(place):
        yield place


def elsewhere(cluster, job_id, than):
    """Wait until a job runs on another node than these; return its name."""
    none = ("", "(null)", None, *than)
    cluster.wait(
        lambda: cluster.show(job_id).get("NodeList") not in none, what="the job on another node"
    )
    return cluster.show(job_id)["NodeList"]


@saves
@pytest.mark.full
@pytest.mark.releases
def test_jobs_of_an_unhealthy_or_drained_node_are_restored_on_another_node(health_watch):
    """A health check drains the first node, an administrator the second.

    A job without checkpoints is left running, and its log says why.
    """
    job_id = submit(health_watch, *ASKED, script=COUNTS.replace("$i -lt {}", "! -e enough"))
    await_more(health_watch, 0)
    first = health_watch.show(job_id)["NodeList"]
    words = ("vsub", "--parsable", "-o", "other", f"-w{first}")
    other = health_watch.user(
        *words, health_watch.script("#!/bin/sh\ntouch on; sleep 600\n", "other.sh")
    )
    other_id = other.stdout.decode().strip()
    health_watch.wait((health_watch.home / "on").exists, what="the other job")
    with health_commands.unhealthy(health_watch, first):
        second = elsewhere(health_watch, job_id, [first])
        said = health_watch.root(first, "vmgr", "logs", other_id)
        assert f"node drained ({health_commands.WHY}); the job is left running" in said
        assert health_watch.show(other_id)["JobState"] == "RUNNING"
        assert (
            health_commands.state(health_watch, first) == f"draining vTorque: {health_commands.WHY}"
        )
        doctor = health_watch.root(first, "vtorque", "doctor", check=False)
        assert f": {health_commands.WHY}; left running: {other_id}" in doctor
        await_more(health_watch, len(counted(health_watch)) + 5)
        said = health_watch.root(second, "vtorque", "drain", second)
        assert said.startswith(f"{job_id} ({slurm.USER}): requeued: saved as checkpoint")
        elsewhere(health_watch, job_id, [first, second])
        await_more(health_watch, len(counted(health_watch)))
        (health_watch.home / "enough").touch()
        health_watch.wait_state(job_id, "FAILED")
        health_watch.root("head", "scancel", other_id)
    health_watch.root("head", "scontrol", "update", f"nodename={second}", "state=resume")
    assert health_watch.show(job_id)["ExitCode"] == "7:0"
    said = health_watch.read("out").decode().split()
    assert (said[0], said[-1]) == ("1", counted(health_watch)[-1])
    steps = itertools.pairwise(map(int, said))  # output after a checkpoint is repeated
    assert all(1 < later <= one + 1 for one, later in steps), "the job started from its beginning"


# -- Jobs on two nodes -----------------------------------------------------------------------------

OTHER_NODE = "nc vn2 7000"  # the guest of n2, wherever it is


def submit_pair(cluster, *more, also="also", other=OTHER_NODE):
    """Submit a job on two nodes, with a connection between its guests; return its id."""
    words = ("vsub", "--parsable", "-o", "out", "-e", "err", "--open-mode=append", "-N2")
    script = cluster.script(writing.script(other, also))
    done = cluster.user(*words, "-vm", "ram=384M", *more, script)
    return done.stdout.decode().strip()


def assert_complete_output(cluster, job_id, memory):
    """Let a job end, and check that no byte between its guests was lost or duplicated."""
    (cluster.home / "enough").touch()
    cluster.wait_state(job_id, "FAILED")
    assert cluster.show(job_id)["ExitCode"] == "7:0"
    assert counted(cluster) == numbers(len(counted(cluster)))
    assert cluster.read("out").decode().split() == writing.expected_output(counted(cluster), memory)


def domains(cluster, *nodes):
    return {
        cluster.root(node, "virsh", "domstate", name).strip()
        for node in nodes
        for name in cluster.guests(node)
    }


@saves
@pytest.mark.full
@pytest.mark.releases
def test_job_on_two_nodes_is_restored_on_other_nodes(place, echoes, disk):
    """Two guests on each: the connection is between the first and the last."""
    asked = ("-vm", f"disk={disk},vms_per_node=2")
    last = OTHER_NODE.replace("vn2", "vn2-1")
    job_id = submit_pair(place, "-wn1,n2", *asked, also="/data/also", other=last)
    for nodes in (("n2", "n3"), ("n1", "n2")):
        await_more(place, len(counted(place)) + 5)
        name, before = saved(place, job_id)
        job_id = submit_pair(place, f"-w{','.join(nodes)}", *asked, "-vm", f"resume={name}")
        await_more(place, before)
        assert [len(place.guests(node)) for node in nodes] == [2, 2]
    assert_complete_output(place, job_id, echoes)


@saves
@pytest.mark.full
@pytest.mark.releases
def test_mpi_job_on_two_nodes_is_restored_on_other_nodes(place):
    """The guests have their own disks; each rank must have every turn once."""
    mpi_turns.prepare(place)
    asked = ("vsub", "--parsable", "-o", "out", "-e", "err", *mpi_turns.ASKED)
    script = place.script(mpi_turns.SCRIPT)
    job_id = place.user(*asked, "-wn1,n2", script).stdout.decode().strip()
    place.wait(lambda: mpi_turns.turn(place) > 50, 400, what="50 turns of the MPI program")
    name = place.user("vmgr", "checkpoint", "--stop", job_id).stdout.decode().strip()
    place.wait_state(job_id, "CANCELLED")
    before = mpi_turns.turn(place)
    assert before < mpi_turns.TURNS
    again = place.user(*asked, "-wn2,n3", "-vm", f"resume={name}", script)
    place.wait_state(again.stdout.decode().strip(), "COMPLETED")
    mpi_turns.check(place)


@saves
@pytest.mark.full
@pytest.mark.releases
def test_job_on_two_nodes_is_restored_from_a_checkpoint_taken_while_running(place, echoes):
    """The job is requeued, and later its first node is drained."""
    job_id = submit_pair(place, "-wn1,n2", "-vm", "checkpoint=every:1h")
    await_more(place, 5)
    name = place.user("vmgr", "checkpoint", job_id, machine="login").stdout.decode().strip()
    await_more(place, len(counted(place)) + 5)
    assert domains(place, "n1", "n2") == {"running"}
    before = len(counted(place))
    place.root("head", "scontrol", "requeue", job_id)
    place.root("head", "scontrol", "update", f"jobid={job_id}", "reqnodelist=")
    await_more(place, before + 20)
    assert f"restored from checkpoint {name}" in place.root("n1", "vmgr", "logs", job_id)
    said = place.root("n1", "vtorque", "drain", "n1")
    assert said.startswith(f"{job_id} ({slurm.USER}): requeued: saved as checkpoint"), said
    before = len(counted(place))
    place.wait(
        lambda: place.show(job_id).get("NodeList") == "n[2-3]", 200, what="the job on other nodes"
    )
    await_more(place, before + 20)
    (place.home / "enough").touch()
    place.wait_state(job_id, "FAILED")
    place.root("head", "scontrol", "update", "nodename=n1", "state=resume")
    assert place.show(job_id)["ExitCode"] == "7:0"
    steps = list(itertools.pairwise(map(int, counted(place))))
    back = [(one, later) for one, later in steps if later != one + 1]
    assert len(back) == 2 and all(5 < later <= one + 1 for one, later in back), (
        "the job was not restored twice from its last checkpoint"
    )


def kill_watcher(cluster, node):
    for pid in cluster.processes(node, "vtorque_survive.watcher"):
        cluster.root(node, "kill", "-9", pid, check=False)


@saves
@pytest.mark.full
@pytest.mark.releases
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_killed_watcher_during_a_checkpoint_loses_no_output(place, echoes, node):
    job_id = submit_pair(place, "-wn1,n2")
    await_more(place, 5)
    asks = place.user_command("vmgr", "checkpoint", "--stop", job_id)
    with subprocess.Popen(asks, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        place.wait(lambda: "paused" in domains(place, node), what="paused guests")
        kill_watcher(place, node)
        place.root(
            node, "vmgr", "resume", "--this-node", job_id, check=False
        )  # starts another watcher
        said, wrong = asked.communicate(timeout=300)
    name = f"{job_id}.0"
    if node == "n2":  # a killed watcher sends its requester no answer
        assert (asked.returncode, said.decode().strip()) == (0, name), wrong
    place.wait_state(job_id, "CANCELLED")
    before = len(counted(place))
    job_id = submit_pair(place, "-wn1,n2", "-vm", f"resume={name}")
    await_more(place, before)
    assert_complete_output(place, job_id, echoes)


@saves
@pytest.mark.full
@pytest.mark.releases
def test_restore_on_a_node_without_libvirt_is_requeued_without_the_node(place, echoes):
    """The job starts again on other nodes without losing output."""
    job_id = submit_pair(place, "-wn1,n2")
    await_more(place, 5)
    name, before = saved(place, job_id)
    place.stop_libvirt("n2")
    try:
        job_id = submit_pair(place, "-vm", f"resume={name}")
        excluded = place.wait(
            lambda: place.show(job_id).get("ExcNodeList", "(null)").replace("(null)", ""), 120
        )
    finally:
        place.start_libvirt("n2")
    assert (excluded, len(counted(place))) == ("n2", before)
    place.wait(
        lambda: place.show(job_id).get("NodeList") == "n[1,3]", 200, what="the job on other nodes"
    )
    await_more(place, before)
    assert_complete_output(place, job_id, echoes)
    place.root("head", "scontrol", "update", "nodename=n2", "comment=")


@saves
@pytest.mark.full
@pytest.mark.releases
def test_unresponsive_node_is_named_and_the_job_continues(place, echoes):
    job_id = submit_pair(place, "-wn1,n2")
    await_more(place, 5)
    kill_watcher(place, "n2")
    done = place.user("vmgr", "checkpoint", "--stop", job_id, check=False, timeout=300)
    assert done.returncode and b"n2: the guests are not paused" in done.stderr
    place.wait(lambda: domains(place, "n1", "n2") == {"running"}, what="running guests")
    assert place.root("head", "find", PLACE, "-mindepth", "2", "-name", "*.0*") == ""
    await_more(place, len(counted(place)) + 5)
    assert_complete_output(place, job_id, echoes)
