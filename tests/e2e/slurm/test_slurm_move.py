"""Migration of a running guest to a node outside the allocation of its job, on a real Slurm."""

import itertools
import re
import subprocess
import time

import pytest

import by_hand
import health_commands
import mpi_turns
import reaching
import slurm_cluster as slurm
from vtorque_core.resources import virtiofs_daemon

pytestmark = pytest.mark.e2e

moves = pytest.mark.skipif(
    not virtiofs_daemon.can_save(), reason="needs Debian 13: scripts/test --full debian13"
)
CONF = "/etc/vtorque/vtorque.toml"
SCRIPTS = "/etc/vtorque/in-guests"
# In the guest that migrates, a process keeps a file open, and a server echoes its input. The test
# removes the files of guest root, because no job owns them.
IN_GUESTS = """#!/bin/sh
case $(hostname) in vn2|vn2-1) ;; *) exit 0 ;; esac
[ ! -e /home/vtslurm1/large ] || head -c 60000000 /dev/urandom >/dev/shm/large
setsid sh -c 'i=0; while :; do i=$((i + 1)); echo $i; sleep 0.1; done' \
  >>/home/vtslurm1/sister 2>/dev/null </dev/null &
setsid nc -ll -p 7000 -e cat >/dev/null 2>&1 </dev/null &
"""
# Send lines over one connection to the echo server until the test creates the file "enough". The
# other guest adds its uptime (s) to each line, because a paused guest's clock stops.
JOB = """#!/bin/sh
i=0
until [ -e enough ]; do i=$((i + 1)); echo $i; sleep 0.05; done | nc vn2 7000 |
  while read -r line; do read -r at _ </proc/uptime; echo $line $at; done
exit 7
"""


@pytest.fixture
def site(clean):
    """Configure ``remote_command`` on all nodes, so that guests can migrate."""
    with reaching.serving(clean) as lost:
        clean.lost = lost
        table = f'\n[plugin.survive]\nremote_command = "{reaching.COMMAND}"\n'
        table += f'[plugin.linux-guest]\nprologue = "{SCRIPTS}"\n'
        for machine in slurm.MACHINES:
            clean.root(machine, "cp", CONF, f"{CONF}.before")
            clean.root(machine, "sh", "-c", f"cat >> {CONF}", stdin=table.encode())
            clean.root(machine, "mkdir", SCRIPTS)
            script = f"cat > {SCRIPTS}/a; chmod 755 {SCRIPTS}/a"
            clean.root(machine, "sh", "-c", script, stdin=IN_GUESTS.encode())
        for name in ("sister", "out", "err", "enough", "large"):
            (clean.home / name).unlink(missing_ok=True)
        yield clean
        for machine in slurm.MACHINES:
            clean.root(machine, "mv", f"{CONF}.before", CONF)
            clean.root(machine, "rm", "-rf", SCRIPTS)


@pytest.fixture
def job_id(site):
    """Return a job on n1 and n2, whose guests exchange data."""
    job_id = site.submit(JOB, "-e", "err", "-N2", "-wn1,n2")
    site.wait(lambda: output_numbers(site), what="an answer of the job's second guest")
    return job_id


def output_numbers(cluster, name="out"):
    return [line.split()[0] for line in cluster.read(name).decode().splitlines()]


def gaps(cluster):
    """Return the seconds between consecutive lines of the output, the longest first."""
    at = [float(line.split()[1]) for line in cluster.read("out").decode().splitlines()]
    return sorted((after - before for before, after in itertools.pairwise(at)), reverse=True)


def by_libvirt(cluster, guest, node):
    """Return how long (ms) libvirt's migration took, and how long the guest ran on neither node."""
    info = cluster.root(node, "virsh", "domjobinfo", "--completed", guest)
    return [
        int(re.search(rf"{name}:\s+(\d+)\s+ms", info)[1])
        for name in ("Time elapsed", "Total downtime")
    ]


def domain(job_id):
    return f"vt-{job_id}.0-n2-0"


def command(job_id, to):
    return "vmgr", "migrate", job_id, "--to", to


def moved(cluster, job_id, source, to, guests=1):
    """Migrate the job's guests; check that they run only on the destination."""
    cluster.root(source, *command(job_id, to), timeout=300)
    assert (cluster.guests(source), len(cluster.guests(to))) == ([], guests)


def assert_complete_output(cluster, job_id):
    """Check that all output was written once, in order, and the script's exit code."""
    before = len(output_numbers(cluster)), len(output_numbers(cluster, "sister"))
    cluster.wait(lambda: len(output_numbers(cluster)) > before[0] + 20, what="more output")
    cluster.script("", "enough")
    cluster.wait_state(job_id, "FAILED")
    assert cluster.show(job_id)["ExitCode"] == "7:0"
    for name, had in zip(("out", "sister"), before, strict=True):
        lines = output_numbers(cluster, name)
        assert lines == [str(number) for number in range(1, len(lines) + 1)]
        assert len(lines) > had, name


@moves
def test_sister_guest_is_migrated_to_a_node_outside_the_allocation(site, job_id):
    moved(site, job_id, "n2", "n3")
    assert site.show(job_id)["NodeList"] == "n1"
    held = site.root("head", "squeue", "-h", "-w", "n3", "-o", "%j %u").split()
    assert held == [f"vtorque-{job_id}-n3", "root"]
    site.wait(lambda: "n2 idle" in site.root("head", "sinfo", "-hN", "-o", "%N %T"), what="n2 idle")
    assert_complete_output(site, job_id)


# Guest root in the migrating guest writes to its disk, and reads the data without the page cache.
OWN_DISK = """#!/bin/bash
[ "$(hostname)" = vn2 ] || exit 0
head -c 50000000 /dev/urandom >/var/tmp/own
cp /var/tmp/own /dev/shm/own
setsid bash -c '
  i=0
  until [ -e /home/vtslurm1/ended ]; do
    i=$((i + 1)); printf "%4096d" $i | tee -a /dev/shm/own >>/var/tmp/own; sync /var/tmp/own
  done
  dd if=/var/tmp/own iflag=direct bs=1M status=none | cmp - /dev/shm/own 2>&1
  echo "$? after $i" >/home/vtslurm1/own
' >/home/vtslurm1/own.log 2>&1 </dev/null &
"""


@moves
@pytest.mark.full
@pytest.mark.releases
def test_guest_with_a_disk_is_migrated_while_mpi_runs_and_it_writes(site):
    mpi_turns.prepare(site)
    (site.home / "own").unlink(missing_ok=True)
    for machine in slurm.MACHINES:
        site.root(machine, "sh", "-c", f"cat > {SCRIPTS}/a", stdin=OWN_DISK.encode())
    script = mpi_turns.SCRIPT.replace("exit", "until [ -s own ]; do sleep 0.2; done\nexit")
    job_id = site.submit(script, "-wn1,n2", *mpi_turns.ASKED)
    site.wait(lambda: mpi_turns.turn(site) > 50, 400, what="50 turns of the MPI program")
    for source, to in (("n2", "n3"), ("n3", "n2")):
        moved(site, job_id, source, to)
    assert mpi_turns.turn(site) < mpi_turns.TURNS
    site.wait_state(job_id, "COMPLETED")
    mpi_turns.check(site)
    assert site.read("own").startswith(b"0 after "), site.read("own.log")


def pairs(site):
    """Submit a job with two guests on each of n1 and n2, of which the last one echoes."""
    script = JOB.replace("vn2", "vn2-1")
    job_id = site.submit(script, "-e", "err", "-N2", "-wn1,n2", "-vm", "vms_per_node=2")
    site.wait(lambda: output_numbers(site), what="an answer of the job's last guest")
    return job_id


@moves
def test_all_guests_of_a_node_are_migrated_together(site):
    job_id = pairs(site)
    moved(site, job_id, "n2", "n3", guests=2)
    assert_complete_output(site, job_id)


@moves
@pytest.mark.full
def test_failed_migration_of_a_guest_does_not_stop_any_guest(site):
    """The guest has a deleted file open; the other, smaller guest usually migrates first."""
    site.script("", "large")
    job_id = pairs(site)
    (site.home / "sister").unlink()
    argv = in_root(site, "n2", *command(job_id, "n3"))
    done = subprocess.run(argv, capture_output=True, timeout=300, check=False)
    assert done.returncode == 1
    assert re.search(b"guests are still on n2|only 1 of the guests have migrated", done.stderr)
    assert nodes_of_guest(site, job_id, 1)[0] == ["n2"]
    first, _ = nodes_of_guest(site, job_id)
    assert len(first) == 1
    held = site.root("head", "squeue", "-h", "-w", "n3", "-o", "%j").split()
    assert held == [f"vtorque-{job_id}-n3"] * (first == ["n3"])
    site.script("", "enough")
    site.wait_state(job_id, "FAILED")
    assert site.show(job_id)["ExitCode"] == "7:0"
    lines = output_numbers(site)
    assert lines == [str(number) for number in range(1, len(lines) + 1)]
    site.wait(
        lambda: nodes_of_guest(site, job_id) == ([], []), what="no guest and no journal of the job"
    )
    site.wait(lambda: not site.root("head", "squeue", "-h"), what="no job and no placeholder job")


@moves
def test_owner_sees_and_suspends_a_migrated_guest(site, job_id):
    def seen():
        rows = site.user("vmgr", "ps", "--phase").stdout.decode().splitlines()
        return [row.split()[-2:] for row in rows if row.split()[0] == job_id and " n3 " in row]

    def does():
        return site.root("n3", "virsh", "domstate", f"vt-{job_id}.0-n2-0").strip()

    moved(site, job_id, "n2", "n3")
    site.wait(lambda: seen() == [["run", "vn2"]], what="the guest on n3 in vmgr ps")
    site.user("vmgr", "suspend", job_id)
    assert does() == "paused"
    site.wait(lambda: seen() == [["paused", "vn2"]], what="the suspended guest in vmgr ps")
    site.user("vmgr", "resume", job_id)
    assert does() == "running"
    assert_complete_output(site, job_id)


@pytest.fixture
def health_watch(site):
    """Run health checks on all nodes, with n3 as the spare one; set before there is a job."""
    with health_commands.checked(site, spare_nodes='["n3"]'):
        yield site


@moves
@pytest.mark.full
@pytest.mark.releases
def test_guest_on_an_unhealthy_node_is_migrated_to_a_spare_node(health_watch, job_id):
    """No administrator runs a command."""
    with health_commands.unhealthy(health_watch, "n2"):
        health_watch.wait(
            lambda: health_watch.show(job_id)["NodeList"] == "n1", what="the job without n2"
        )
        health_watch.wait(
            lambda: len(health_watch.guests("n3")) == 1, what="a guest on the spare node"
        )
        drained = f"drained vTorque: {health_commands.WHY}"
        health_watch.wait(
            lambda: health_commands.state(health_watch, "n2") == drained,
            what="n2 drained, without a job",
        )
        assert not health_watch.guests("n2")
        doctor = ("vtorque", "doctor")
        last = health_watch.wait(
            lambda: [
                line
                for line in health_watch.root("n2", *doctor, check=False).splitlines()
                if "last drained" in line
            ],
            what="the last drain in vtorque doctor",
        )
        assert last[0].endswith(f": {health_commands.WHY}"), "a job was left running"
        assert_complete_output(health_watch, job_id)


@moves
@pytest.mark.full
@pytest.mark.releases
def test_only_max_drained_nodes_unhealthy_nodes_are_drained(site):
    """Check the states in Slurm; the test above also covers the automatic drain."""
    for node in slurm.NODES:
        site.root(node, "sed", "-i", r"s|^\[plugin.survive\]$|&\nmax_drained_nodes = 1|", CONF)
    drains = ("vtorque", "drain", "--in-turn", "--reason", health_commands.WHY)
    try:
        argvs = [in_root(site, node, *drains, node) for node in ("n2", "n3")]
        both = [subprocess.Popen(argv, stderr=subprocess.DEVNULL) for argv in argvs]
        assert sorted(each.wait(300) for each in both)[0] == 0
        states = [health_commands.state(site, node) for node in ("n2", "n3")]
        assert [state for state in states if state.startswith("idle")] and (
            f"drained vTorque: {health_commands.WHY}" in states
        )
        for node in ("n2", "n3"):
            site.root(node, *drains, node, check=False)
        assert [health_commands.state(site, node) for node in ("n2", "n3")] == states
    finally:
        for node in ("n2", "n3"):
            resumed = ("update", f"nodename={node}", "state=resume")
            site.root("head", "scontrol", *resumed, check=False)


@moves
@pytest.mark.full
def test_guest_is_migrated_twenty_times(site, job_id, record_property):
    """The figures are not checked: ``--junitxml=x -o junit_family=xunit1`` saves them."""
    source, to, took, libvirts = "n2", "n3", [], []
    for _ in range(20):
        before = time.monotonic()
        moved(site, job_id, source, to)
        took.append(round(time.monotonic() - before, 1))
        libvirts.append(by_libvirt(site, domain(job_id), to))
        source, to = to, source
    assert_complete_output(site, job_id)
    longest = [round(gap, 2) for gap in gaps(site)[:25]]
    record_property("moves_s", took)
    record_property("gaps_s", longest)
    record_property("libvirts_ms", libvirts)


@moves
@pytest.mark.full
def test_migrations_are_compared_with_plain_libvirt(site, job_id, record_property):
    """The figures are not checked, as above."""
    by_hand.begin(site, domain(job_id), f"/var/lib/vtorque/jobs/{job_id}.0/g0")
    source, to, ours, hands, libvirts = "n2", "n3", [], [], []
    for _ in range(8):
        before = time.monotonic()
        site.root(source, *command(job_id, to), timeout=300)
        ours.append(round(time.monotonic() - before, 2))
        before = time.monotonic()
        by_hand.move(site, source, to)
        hands.append(round(time.monotonic() - before, 2))
        libvirts.append([by_libvirt(site, each, to)[0] for each in (domain(job_id), by_hand.NAME)])
        source, to = to, source
    record_property("ours_s", ours)
    record_property("by_hand_s", hands)
    record_property("libvirts_ms", libvirts)
    by_hand.end(site, source)
    assert_complete_output(site, job_id)


@moves
@pytest.mark.full
def test_job_canceled_during_a_migration_leaves_nothing(site, job_id):
    with subprocess.Popen(
        in_root(site, "n2", *command(job_id, "n3")), stderr=subprocess.PIPE
    ) as sends:  # fmt: skip
        site.wait(lambda: site.guests("n3"), what="a guest on n3")
        site.root("head", "scancel", job_id)
        assert sends.wait(300) in (
            0,
            1,
        )  # the migration may finish before vmgr sees the cancellation
    site.wait(
        lambda: nodes_of_guest(site, job_id) == ([], []), what="no guest and no journal of the job"
    )
    site.wait(lambda: not site.root("head", "squeue", "-h"), what="no job and no placeholder job")


def in_root(cluster, node, *argv):
    """Return root's command on a node, as a separate process."""
    return [
        *cluster.enter(node),
        "env",
        f"PATH={slurm.PREFIX}:/usr/sbin:/usr/bin:/sbin:/bin",
        *argv,
    ]


def nodes_of_guest(cluster, job_id, index=0):
    """Return the nodes on which a guest runs, and the nodes that have a journal of the job."""
    journal = f"/var/lib/vtorque/journal/{job_id}.0.jsonl"
    name = f"vt-{job_id}.0-n2-{index}"
    run, known = [], []
    for node in ("n2", "n3"):
        if cluster.root(node, "virsh", "domstate", name, check=False).strip() == "running":
            run.append(node)
        if cluster.root(node, "sh", "-c", f"test -e {journal} && echo yes", check=False):
            known.append(node)
    return run, known


def is_on_one_node(cluster, job_id):
    """Return whether exactly one node has the guest and the journal."""
    run, known = nodes_of_guest(cluster, job_id)
    place = f"/var/lib/vtorque/moves/{job_id}.0.json"
    record = cluster.root("n2", "cat", place, check=False)
    return len(run) == 1 and run == known and ("away" in record or not record)


KILLS = {
    "vmgr": ("n2", "vmgr migrate"),
    "receiver on the destination": ("n3", "hook --config .* receive"),
    "libvirtd on the source": ("n2", "^libvirtd"),
    "libvirtd on the destination": ("n3", "^libvirtd"),
    "QEMU on the destination": ("n3", "guest=vt-"),
    "virtiofsd on the destination": ("n3", "virtiofsd"),
    "virt-ssh-helper": ("n3", "virt-ssh-helper"),
}


@moves
@pytest.mark.full
@pytest.mark.parametrize("what", KILLS)
def test_process_killed_during_a_migration_leaves_the_guest_on_one_node(site, job_id, what):
    node, pattern = KILLS[what]
    argv = in_root(site, "n2", *command(job_id, "n3"))
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as sends:
        site.wait(lambda: site.guests("n3"), what="a guest on n3")
        pids = site.wait(lambda: site.processes(node, pattern), what=f"a process {pattern}")
        site.root(node, "kill", "-9", *pids, check=False)
        if "libvirtd" in what:
            site.wait(lambda: not site.processes(node, "^libvirtd$"), what="libvirtd's end")
            site.start_libvirt(node)
        sends.wait(300)
    site.wait(lambda: is_on_one_node(site, job_id), what="the guest and its journal on one node")
    assert_complete_output(site, job_id)
