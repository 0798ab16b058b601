"""Kill -9 of every process of a job, at many points: the node is always as before.

The points are steps of the journal, counted by its test seam in the real prologue and epilogue, and
moments in between. After each the epilogue or ``vtorque reap`` must leave the host as it was, and
the next job must run: that of the next test, and at the end one that the batch system runs.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

import hooks_by_hand
from hooks_by_hand import Hooks, as_before, observe, syslog_listener

pytestmark = pytest.mark.e2e

SEED = int(os.environ.get("VTORQUE_FAULT_SEED", "20171"))
MANY = pytest.param(12, marks=pytest.mark.full, id="many")
# Steps of a start, and of an end, at which a kill could cause the greatest damage.
START = ["after create virtiofsd", "before create domain+0.15"]
END = ["after release virtiofsd"]
MORE_STARTS = ["after record lease", "after create tree", "after create domain"]
MORE_ENDS = ["before release domain", "before delete journal"]


@pytest.fixture
def node_again(node):
    """Return the node with the state that must be the same after the test."""
    yield node, observe(node)
    hooks_by_hand.start_libvirtd(node)


def next_job_runs(node):
    assert node.job("#!/bin/sh\nexit 5\n").code == 5


@pytest.fixture(scope="module", autouse=True)
def last_job(node):
    """Run a job after all tests, or after the only test."""
    yield
    next_job_runs(node)


def points_of(job, which, count):
    """Return ``count`` step numbers of a hook, spread over all of them; runs the hook once."""
    code, names, err = job.run(which, "count")
    assert code == 0, err
    assert len(names) > 20, names
    return [1 + number * len(names) // count for number in range(count)]


def release_and_compare(job, before, number, where):
    job.release(("epilogue", "reap")[number % 2])
    as_before(job.node, before, where)


def killed_at(points, which, node, before, name):
    """Kill a hook of a new job at each point: the node is as before."""
    for number, point in enumerate(points):
        job = Hooks(node, f"{name}{number}.faults")
        if which == "epilogue":
            assert job.run("prologue")[0] == 0
        where = f"{which} killed at {job.killed(which, str(point))!r} ({point})"
        release_and_compare(job, before, number, where)


@pytest.mark.parametrize(
    ("which", "points"),
    [
        ("prologue", START),
        pytest.param("epilogue", END, marks=pytest.mark.full),
        pytest.param("prologue", MORE_STARTS, marks=pytest.mark.full),
        pytest.param("epilogue", MORE_ENDS, marks=pytest.mark.full),
    ],
)
def test_killed_hook_leaves_nothing(node_again, which, points):
    killed_at(points, which, *node_again, which)


@pytest.mark.full
@pytest.mark.parametrize(("which", "count"), [("prologue", 16), ("epilogue", 12)])
def test_hook_killed_at_many_steps_leaves_nothing(node_again, which, count):
    node, before = node_again
    first = Hooks(node, f"first{which}.faults")
    if which == "epilogue":
        assert first.run("prologue")[0] == 0
    points = points_of(first, which, count)
    if which == "prologue":
        first.release("epilogue")
    killed_at(points, which, node, before, f"at{which}")


@pytest.mark.full
@pytest.mark.parametrize("count", [2, MANY])
def test_prologue_killed_at_random_moments_leaves_nothing(node_again, count):
    node, before = node_again
    moments = random.Random(SEED)  # noqa: S311 - the same moments again with the same seed
    print(f"VTORQUE_FAULT_SEED={SEED}")  # noqa: T201 - pytest shows it with a failure
    for number in range(count):
        job = Hooks(node, f"pr{number}.faults")
        process = job.start("prologue")
        delay = moments.uniform(0.2, 3.0)
        time.sleep(delay)
        process.kill()
        job.end(process)
        release_and_compare(job, before, number, f"prologue killed after {delay:.3f} s")
    next_job_runs(node)


def running(node, text="#!/bin/sh\necho up\nsleep 100\n"):
    """Submit a job; return its hooks' view of it once its script runs."""
    (node.home / "out").unlink(missing_ok=True)
    (node.home / "err").unlink(missing_ok=True)
    job = Hooks(node, node.submit(text))
    out = node.home / "out"
    node.wait_for(lambda: out.exists() and b"up\n" in out.read_bytes(), what="the script's output")
    return job


def waited(node, job):
    """Wait until the job has left the queue; return its exit code and its errors."""
    node.wait_for(lambda: node.state_of(job.job_id) is None, what=f"the end of {job.job_id}")
    err = node.home / "err"
    return err.read_text() if err.exists() else ""


def wrapper_of(job):
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = (entry.parent / "cmdline").read_bytes()
            if f"PBS_JOBID={job.job_id}\0".encode() in entry.read_bytes() and b"jobshell" in words:
                return int(entry.parent.name)
        except OSError:
            continue
    raise AssertionError("no wrapper")


@pytest.mark.full
def test_killed_wrapper_leaves_nothing(node_again):
    node, before = node_again
    job = running(node)
    os.kill(wrapper_of(job), signal.SIGKILL)
    waited(node, job)
    as_before(node, before, "wrapper killed")


@pytest.mark.usefixtures("no_deadline")
def test_qemu_killed_while_the_guest_boots(node_again):
    """The end of the guest is noticed at once, not at the deadline."""
    node, before = node_again
    job = Hooks(node, "qb.faults")
    process = job.start("prologue")
    qemu = job.qemu()
    journal = node.state / "journal/qb.faults.0.jsonl"
    node.wait_for(lambda: '"name": "ready"' in journal.read_text(), what="a guest that boots")
    job.killed_qemu(qemu, process)
    code, out, err = job.wrapper()
    assert (code, out) == (122, "")
    assert "the guest died" in err
    job.release("epilogue")
    as_before(node, before, "QEMU killed in the boot")


@pytest.mark.usefixtures("no_deadline")
def test_qemu_killed_while_the_script_runs(node_again):
    node, before = node_again
    job = running(node)
    os.kill(job.qemu(), signal.SIGKILL)
    err = waited(node, job)
    assert "died while the job ran" in err
    as_before(node, before, "QEMU killed in the run")


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("after create virtiofsd", marks=pytest.mark.full),
        pytest.param("before create domain", marks=pytest.mark.full),
        pytest.param("after create domain", marks=pytest.mark.full),
    ],
)
def test_libvirtd_killed_while_a_job_starts(node_again, point):
    """The start fails with the reason; when libvirtd is back, all leftovers can be released."""
    node, before = node_again
    job = Hooks(node, "ls.faults")
    process = job.start("prologue")
    journal = node.state / "journal/ls.faults.0.jsonl"
    op, _, kind = point.rpartition(" ")
    line = {"before create": "acquire", "after create": "created"}[op]

    def reached():
        if not journal.exists():
            return False
        text = journal.read_text()
        record = next((r for r in text.splitlines() if f'"kind": "{kind}"' in r), "")
        seq = record.partition('"seq": ')[2].partition(",")[0]
        return bool(record) and (line == "acquire" or f'"created", "seq": {seq}' in text)

    node.wait_for(reached, what=point)
    hooks_by_hand.kill_libvirtd()
    assert job.end(process)[0] == 0
    wrapper = job.wrapper()
    if point == "after create domain":  # it does not need libvirtd any more
        assert wrapper[:2] == (0, "ran\n"), wrapper
    else:
        assert wrapper[0] == 122, wrapper
        assert "libvirt" in wrapper[2]
    hooks_by_hand.start_libvirtd(node)
    job.release("reap")
    as_before(node, before, f"libvirtd killed at {point}")


def test_libvirtd_killed_while_the_script_runs(node_again):
    node, before = node_again
    text = "#!/bin/sh\necho up\nwhile [ ! -e go ]; do sleep 0.2; done\necho done\nexit 6\n"
    (node.home / "go").unlink(missing_ok=True)
    job = running(node, text)
    hooks_by_hand.kill_libvirtd()
    hooks_by_hand.start_libvirtd(node)
    (node.home / "go").touch()
    waited(node, job)
    (node.home / "go").unlink()
    assert (node.home / "out").read_text() == "up\ndone\n"
    as_before(node, before, "libvirtd killed in the run")


@pytest.mark.full
def test_libvirtd_killed_while_a_job_is_torn_down(node_again):
    """The epilogue releases what it can and reports the rest, which the reaper releases."""
    node, before = node_again
    job = Hooks(node, "le.faults")
    assert job.run("prologue")[0] == 0
    hooks_by_hand.kill_libvirtd()
    with syslog_listener() as read_syslog:
        code, _, err = job.run("epilogue")
        assert code == 1 and "the node's syslog has the reason" in err, err
        assert "libvirtd does not answer" in read_syslog()
        assert "Traceback" not in err + read_syslog()
    hooks_by_hand.start_libvirtd(node)
    job.release("reap")
    as_before(node, before, "libvirtd killed in the teardown")
    next_job_runs(node)


def kill_wrapper(node, job):
    with contextlib.suppress(AssertionError, ProcessLookupError):  # before or after its time
        os.kill(wrapper_of(job), signal.SIGKILL)


def kill_qemu(node, job):
    with contextlib.suppress(ProcessLookupError):
        if (pid := job.find_qemu()) is not None:
            os.kill(pid, signal.SIGKILL)


def kill_libvirtd(node, job):
    hooks_by_hand.kill_libvirtd()
    time.sleep(0.3)
    hooks_by_hand.start_libvirtd(node)


@pytest.mark.full
@pytest.mark.parametrize("kill", [kill_wrapper, kill_qemu, kill_libvirtd])
def test_job_killed_at_ten_random_moments_leaves_nothing(node_again, kill):
    """From the submission to the end of the teardown, with the batch system's own hooks."""
    node, before = node_again
    moments = random.Random(SEED)  # noqa: S311 - as above
    print(f"VTORQUE_FAULT_SEED={SEED}")  # noqa: T201 - as above
    for _ in range(10):
        job = Hooks(node, node.submit("#!/bin/sh\nsleep 1\n"))
        delay = moments.uniform(0.5, 5.5)
        time.sleep(delay)
        kill(node, job)
        waited(node, job)
        job.release("reap")
        as_before(node, before, f"{kill.__name__} after {delay:.3f} s")
    next_job_runs(node)


@pytest.mark.full
def test_killed_batch_system_leaves_nothing(node_again):
    """The restarted batch system ends running jobs and reaps resources without a job."""
    node, before = node_again
    stray = Hooks(node, "stray.faults")
    stray.killed("prologue", "after create virtiofsd")
    job = running(node)  # the same user: their two jobs may share the node
    service = subprocess.run(
        ["pgrep", "-f", f"vtorque local serve --config {node.config}|"
         f"vtorque_core.cli.vtorque local serve --config {node.config}"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for pid in service:
        os.kill(int(pid), signal.SIGKILL)
    hooks_by_hand.start_service(node)
    err = waited(node, job)
    assert "lost" in err
    as_before(node, before, "batch system killed")


@pytest.mark.full
def test_leftovers_of_another_users_dead_job_do_not_block_a_job(node_again):
    """Leases reserve the node for another user; the prologue reaps once and tries again."""
    node, before = node_again
    dead = Hooks(node, "dead.faults", user="vte2e2")
    dead.killed("prologue", "after create domain")
    next_job_runs(node)
    as_before(node, before, "another user's job killed")
