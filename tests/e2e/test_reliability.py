"""External faults with real guests, and a hundred jobs after which the host is unchanged.

Kills at every kind of step are in test_faults.py and test_device_faults.py, all faults at all steps
in the matrix of recorded nodes (tests/unit/repository/test_fault_matrix.py).
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import flatness
from hooks_by_hand import Hooks, as_before, observe, syslog_listener
from vtorque_core.base._console import LARGEST
from vtorque_core.records.reading import read

pytestmark = pytest.mark.e2e

CYCLES = int(os.environ.get("VTORQUE_CYCLES", "100"))


@pytest.fixture
def host(node):
    """Return the node with the state that must be the same afterwards."""
    yield node, observe(node)


def next_job_runs(node):
    assert node.job("#!/bin/sh\nexit 5\n").code == 5


@contextlib.contextmanager
def stopped(pid):
    """Stop a process, so that it answers no request: SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def daemon(name):
    """Return the pid of this host's, among those of the test cluster's nodes."""
    return int(Path(f"/run/{name}.pid").read_text())


@pytest.mark.full
def test_concurrent_prologues_and_an_epilogue_leave_nothing(host):
    """The epilogue kills the running start; the second prologue waits for the job's lock."""
    node, before = host
    job = Hooks(node, "twice.faults")
    hooks = []
    for which in ("prologue", "prologue", "epilogue"):
        hooks.append(job.start(which))
        time.sleep(0.3)
    codes = []
    for hook in hooks:
        code, _, err = job.end(hook)
        assert "Traceback" not in err, err
        codes.append(code)
    # The first start may have ended before the epilogue began.
    assert codes in ([0, 0, 0], [-signal.SIGKILL, 0, 0]), codes
    for _ in range(2):
        job.release("epilogue")
    as_before(node, before, "hooks came twice")
    assert job.run("prologue")[0] == 0  # and once more for the same job
    assert job.wrapper()[:2] == (0, "ran\n")
    job.release("epilogue")
    as_before(node, before, "the same job again")


@pytest.mark.full
def test_hanging_guest_is_ended(host):
    """QEMU answers neither the job shell nor libvirtd; a cancellation still ends the guest."""
    node, before = host
    (node.home / "out").unlink(missing_ok=True)
    job = Hooks(node, node.submit("#!/bin/sh\necho up\nsleep 1000\n"))
    out = node.home / "out"
    node.wait_for(lambda: out.exists() and b"up\n" in out.read_bytes(), what="the script's output")
    with stopped(job.qemu()):
        node.as_user("vmgr", "cancel", job.job_id)
        node.wait_for(lambda: node.state_of(job.job_id) is None, what="the job's end")
    as_before(node, before, "the guest hung")
    next_job_runs(node)


@pytest.mark.full
def test_flooded_console_log_is_bounded(host):
    """Guest root floods the console during the whole job: the job runs, and the log is bounded."""
    node, before = host
    place, own = node.config.parent / "guest-prologue-flood", node.config.read_text()
    place.mkdir()
    script = place / "10-flood"
    script.write_text(
        "#!/bin/sh\n(while :; do dmesg; done > /dev/console 2>&1; "
        "while :; do echo 0123456789012345678901234567890123456789; done > /dev/console) &\n"
        "(while :; do echo 01234567890123456789012345678901234567890123456789; done"
        " > /dev/console) &\n"
    )
    script.chmod(0o755)
    sizes = []
    try:
        node.config.write_text(f'{own}\n[plugin.linux-guest]\nprologue = "{place}"\n')
        for name in ("out", "go"):
            (node.home / name).unlink(missing_ok=True)
        job = node.submit("#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.2; done\necho done\nexit 4\n")

        def size():
            logs = (node.state / "jobs").glob("*/g0/console.log*")
            with contextlib.suppress(FileNotFoundError):
                sizes.append(sum(path.stat().st_size for path in logs))
            return max(sizes, default=0)

        node.wait_for(lambda: size() > sizes[-1], what="the beginning of the log to be dropped")
        (node.home / "go").touch()
        node.wait_for(lambda: (size(), node.state_of(job))[1] is None, what="the job's end")
    finally:
        node.config.write_text(own)
        shutil.rmtree(place)
        (node.home / "go").unlink(missing_ok=True)
    assert (node.home / "out").read_bytes() == b"done\n"
    assert max(sizes) <= LARGEST
    as_before(node, before, "a flooded console")


@pytest.mark.full
def test_libvirtd_that_hangs_at_the_end_of_a_job_leaves_nothing(host):
    """The epilogue ends; resources that the guest may still use stay leased to the job."""
    node, before = host
    job = Hooks(node, "hangs.faults")
    assert job.run("prologue")[0] == 0
    with stopped(daemon("libvirtd")), syslog_listener() as read_syslog:
        code, _, err = job.run("epilogue")
        assert code == 1 and "the node's syslog has the reason" in err, err
        assert "Traceback" not in err + read_syslog()
        assert "no answer from libvirtd" in read_syslog()
        (state,) = (read(path) for path in (node.state / "journal").glob("hangs.faults.*"))
        assert {record.kind for record in state.open} >= {"domain", "lease", "tree"}
    job.release("reap")
    as_before(node, before, "libvirtd hung")
    next_job_runs(node)


def cpu_of(pid):
    """Return the CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.full
def test_hundred_jobs_accumulate_no_memory_or_time(host):
    """Each boots a guest. CPU time is that of the batch system with its hooks, and of libvirtd."""
    node, before = host
    lines = subprocess.run(
        ["pgrep", "-f", f"local serve --config {node.config}"],
        capture_output=True, check=True, text=True,
    ).stdout.split()  # fmt: skip
    watched = {"local": int(lines[0]), "libvirtd": daemon("libvirtd")}
    watched["virtlogd"] = daemon("virtlogd")
    next_job_runs(node)  # files that the first job leaves for all others: caches, logs
    rows = []
    for _ in range(CYCLES):
        begun, used = time.monotonic(), sum(map(cpu_of, watched.values()))
        next_job_runs(node)
        row = {"seconds": time.monotonic() - begun}
        row["cpu"] = sum(map(cpu_of, watched.values())) - used
        for name, pid in watched.items():
            row |= {f"{name} {what}": value for what, value in flatness.process(pid).items()}
        rows.append(row)
    as_before(node, before, f"{CYCLES} jobs")
    told = {key: [round(value, 3) for value in pair] for key, pair in flatness.tenths(rows).items()}
    if path := os.environ.get("VTORQUE_FLATNESS"):
        Path(path).write_text(json.dumps(told, indent=1))
    for row in rows:
        del row["seconds"]  # the machine is not idle
    assert not flatness.rising(rows), told
