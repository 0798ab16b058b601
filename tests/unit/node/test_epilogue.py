"""After the release: usage of the guests is reported, and leftover processes are killed."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from acme_card import in_other_process
from patience import eventually
from vtorque_core.api import kept_records, vcpu_threads
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.kept_records import Usage
from vtorque_core.api.strategies import BatchSystem
from vtorque_core.api.values import hookimpl
from vtorque_core.base.errors import EXIT_GUEST_DIED, HostFault
from vtorque_core.base.locks import job_lock
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.node.end import after_release, epilogue, leftovers, reap, teardown
from vtorque_core.node.end.teardown import release_job
from vtorque_core.node.shell import proof
from vtorque_core.node.shell.proof import Proof
from vtorque_core.records.reading import JobHeader

UUID = "5e1f6a3e-0000-4000-8000-00000000abcd"
BUSY = """
import sys, time
block = bytearray(64 << 20)
while time.process_time() < 0.1:
    pass
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def qemu(tmp_path, monkeypatch):
    """A process that is busy like a guest, and libvirt's file with its number."""
    monkeypatch.setattr(vcpu_threads, "RUNNING", tmp_path)
    argv = [sys.executable, "-c", BUSY, "-uuid", UUID, "-end"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        (tmp_path / "vt-g.pid").write_text(f"{process.pid}\n")
        yield process
        process.kill()


def cpu_of(process):
    """Return the CPU time of a sleeping process, by its own clock.

    That clock's number: clock_getcpuclockid(3), as the C library computes it.
    """
    return pytest.approx(time.clock_gettime(~process.pid << 3 | 2), abs=0.05)


def test_cpu_time_and_peak_memory_are_of_the_guest_process(qemu):
    found = teardown.guest_usage("vt-g", UUID)
    assert found.cpu_seconds == cpu_of(qemu)
    assert 64 <= found.peak_mib < 200


def test_reused_or_unreadable_pid_has_no_usage(qemu, tmp_path):
    assert teardown.guest_usage("vt-g", UUID[::-1]) is None
    assert teardown.guest_usage("vt-other", UUID) is None
    (tmp_path / "vt-bad.pid").write_text("nonsense")
    os.mkfifo(tmp_path / "vt-fifo.pid")
    (tmp_path / "vt-link.pid").symlink_to(tmp_path / "vt-g.pid")
    assert [teardown.guest_usage(f"vt-{n}", UUID) for n in ("bad", "fifo", "link")] == [None] * 3


def test_total_usage_sums_the_known_values():
    assert teardown.total_usage([None]) is None
    assert teardown.total_usage([None, Usage(1.5, 100), Usage(2.0, 28)]) == Usage(3.5, 128)


class RecordingBatch:
    """A batch system that records its calls; the epilogue calls it in a child."""

    def __init__(self, told, error=""):
        self.told, self.error = told, error

    @hookimpl
    def vtorque_batch_systems(self):
        yield BatchSystem("acme", submitter=None, node=lambda _site: self, shell=None)

    def job_states(self, ids):
        return dict.fromkeys(ids, JobState.GONE)

    def account(self, job_id, used):
        if self.error:
            raise HostFault(self.error)
        self.told.write_text(json.dumps([job_id, used.cpu_seconds, used.peak_mib]))

    def start_again(self, job, reason):
        self.told.write_text(f"{job.key}: {reason}")


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node with a job whose guest runs; ``node.acme`` is its batch system."""
    paths = Paths(tmp_path / "state", tmp_path / "run")
    paths.journal.mkdir(parents=True)
    (paths.run / "locks").mkdir(parents=True)
    header = JobHeader(JobAttempt("42.srv", 0, "ada", 1234), "acme", {}, whole_node=True)
    args = {"name": "vt-g", "uuid": UUID, "uri": "test:///default"}
    lines = [
        header.line(),
        {"op": "acquire", "seq": 1, "plugin": "core", "kind": "domain", "scope": "job",
         "guest": 0, "needs": [], "phase": "boot", "args": args, "t": 1.0},
        {"op": "created", "seq": 1},
        {"op": "phase", "name": "run", "guest": None, "t": 2.0},
    ]  # fmt: skip
    (paths.journal / "42.srv.0.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    acme = RecordingBatch(tmp_path / "told")
    plugins = Plugins()
    plugins.register("acme", acme, "vtorque-acme 1.0.0")
    monkeypatch.setattr(Plugins, "load", lambda **_: plugins)
    config = tmp_path / "vtorque.toml"
    config.write_text(
        '[batch]\nsystem = "acme"\nkill_leftovers = true\n'
        f'[paths]\nstate = "{paths.state}"\nrun = "{paths.run}"\n'
    )
    killed = tmp_path / "killed"
    monkeypatch.setattr(leftovers, "kill", lambda _paths, job: killed.write_text(str(job.job.uid)))
    return {"config": config, "paths": paths, "acme": acme, "killed": killed}


def test_epilogue_reports_usage_to_accounting_and_kept_records(node, qemu):
    assert epilogue.run(node["config"], "42.srv") == 0
    job, cpu, mib = json.loads(node["acme"].told.read_text())
    assert job == "42.srv"
    assert cpu == cpu_of(qemu) and cpu >= 0.05
    assert 64 <= mib < 200
    (place,) = kept_records.find(node["paths"], "42.srv")
    span = next(s for s in place.facts()["phases"] if s["name"] == "used")
    assert (span["guest"], span["cpu_seconds"], span["peak_mib"]) == (0, cpu, mib)
    assert node["killed"].read_text() == "1234"
    node["acme"].told.unlink()
    assert epilogue.run(node["config"], "42.srv") == 0
    assert not node["acme"].told.exists(), "a second epilogue reported the usage again"


@pytest.mark.parametrize(
    ("table", "limits"),
    [
        ("[node]\nrelease_timeout = 7\nteardown_timeout = 90\n", (7.0, 90.0)),
        ("", (30.0, 60.0)),
        ("[node]\nteardown_timeout = 'long'\n", (30.0, 60.0)),
    ],
)
def test_epilogue_releases_within_the_limits_of_the_config(node, monkeypatch, table, limits):
    seen = []
    monkeypatch.setattr(epilogue, "release_job", lambda *_, **given: seen.append(given) or [])
    node["config"].write_text(node["config"].read_text() + table)
    epilogue.run(node["config"], "43.srv")
    assert [(given["release_timeout"], given["deadline"]) for given in seen] == [limits]


def test_plugins_are_notified_once_after_everything_is_released(node, qemu, tmp_path):
    told = tmp_path / "ended"

    class Last:
        """Records its observations, and fails."""

        @hookimpl
        def vtorque_job_ended(self, place, site):
            journals = [path.name for path in site.paths.journal.iterdir()]
            with told.open("a") as file:
                facts = place.facts()
                file.write(f"{place.key} {journals} {'ended' in facts} {node['killed'].exists()}\n")
            raise HostFault("no more")

    Plugins.load().register("last", Last(), "vtorque-last 1.0.0")
    assert epilogue.run(node["config"], "42.srv") == 0
    assert told.read_text() == "42.srv.0 [] True True\n"
    assert epilogue.run(node["config"], "42.srv") == 0
    assert len(told.read_text().splitlines()) == 1, "a second epilogue notified the plugins again"


def test_plugins_are_not_notified_while_a_resource_is_left(node, qemu, tmp_path, monkeypatch):
    # It would sleep for a day.
    monkeypatch.setattr(after_release, "reap_until_clean", lambda *_: None)

    class Never:
        @hookimpl
        def vtorque_job_ended(self):
            (tmp_path / "ended").touch()

    Plugins.load().register("never", Never(), "vtorque-never 1.0.0")
    journal = node["paths"].journal / "42.srv.0.jsonl"
    orphan = {"op": "acquire", "seq": 2, "plugin": "gone", "kind": "gone", "scope": "job",
              "guest": 0, "needs": [], "phase": "boot", "args": {}, "t": 1.0}  # fmt: skip
    journal.write_text(journal.read_text() + json.dumps(orphan) + "\n")
    assert epilogue.run(node["config"], "42.srv") == 1
    assert journal.exists() and not (tmp_path / "ended").exists()


def test_epilogue_during_a_start_releases_the_job_afterwards(node, qemu, monkeypatch, capfd):
    """Torque ends a job during its prologue but not the prologue, which may boot for long."""
    ready, go_on = os.pipe(), os.pipe()

    def prologue():
        os.close(go_on[1])  # if the test fails, this ends with the epilogue
        with job_lock(node["paths"], "42.srv"):
            os.write(ready[1], b"x")
            os.read(go_on[0], 1)

    in_other_process(prologue)
    os.read(ready[0], 1)
    monkeypatch.setattr(epilogue, "release_job", lambda *job, **_: release_job(*job, deadline=0))
    monkeypatch.setattr(reap, "_FIRST_PAUSE", 0.05)
    assert epilogue.run(node["config"], "42.srv") == 1
    assert "vTorque tries again" in capfd.readouterr().err
    assert list(node["paths"].journal.iterdir())
    os.write(go_on[1], b"x")
    eventually(lambda: not list(node["paths"].journal.iterdir()))


@pytest.mark.parametrize(
    ("state", "status", "again"),
    [
        ("starting", "122", True),
        ("starting", "271", False),  # deleted by its owner
        ("starting", "", False),
        ("host_fault", "122", False),  # the start has reported its failure itself
        ("ready", "122", False),  # the script's own exit status
    ],
)
def test_job_whose_start_was_killed_is_requeued(node, state, status, again):
    job = JobAttempt("42.srv", 0, "ada", 1234)
    namespace, gone = proof.pid_namespace(), subprocess.Popen(["true"])
    gone.wait()
    proof.write(node["paths"], Proof(job, state, starter=gone.pid, namespace=namespace))
    assert epilogue.run(node["config"], "42.srv", status) == 0
    told = node["acme"].told
    text = told.read_text() if told.exists() else ""
    assert text == ("42.srv.0: the process that started the guests was killed" if again else "")


def hold_lock_in_child(node, work=lambda: None):
    """Fork a process that holds the job's lock until it is killed; return its pid."""
    ready = os.pipe()

    def hold():
        with job_lock(node["paths"], "42.srv"):
            work()
            os.write(ready[1], f"{os.getpid():9}".encode())
            signal.pause()

    in_other_process(hold)
    return int(os.read(ready[0], 9))


def write_starting_proof(node, pid=0, **differs):
    mine = JobAttempt("42.srv", 0, "ada", 1234)
    told = Proof(mine, "starting", starter=pid or os.getpid(), namespace=proof.pid_namespace())
    proof.write(node["paths"], replace(told, **differs))


def test_epilogue_kills_the_start_of_its_job_and_releases_it(node, qemu):
    """No event tells a detached start that its job was deleted. It could boot for minutes."""
    pid = hold_lock_in_child(node, functools.partial(write_starting_proof, node))
    assert epilogue.run(node["config"], "42.srv") == 0
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert not list(node["paths"].journal.iterdir())
    assert not node["paths"].proof("42.srv").exists()


@pytest.mark.parametrize("differs", [{"starter": 1}, {"state": "ready"}, {"namespace": 1}])
def test_epilogue_does_not_kill_another_holder_of_the_job_lock(node, qemu, monkeypatch, differs):
    monkeypatch.setattr(epilogue, "release_job", lambda *job, **_: release_job(*job, deadline=0))
    monkeypatch.setattr(after_release, "reap_until_clean", lambda *_: None)
    pid = hold_lock_in_child(node, functools.partial(write_starting_proof, node, **differs))
    try:
        assert epilogue.run(node["config"], "42.srv") == 1
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_epilogue_does_not_kill_a_starter_that_no_longer_holds_the_lock(node, qemu):
    """Another process may have got the starter's pid."""
    other = subprocess.Popen(["sleep", "1000"])
    write_starting_proof(node, other.pid)
    assert epilogue.run(node["config"], "42.srv") == 0
    assert other.poll() is None
    other.kill()
    other.wait()


def test_failed_accounting_is_reported_and_does_not_stop_the_release(node, qemu, capfd):
    node["acme"].error = "the server does not answer"
    assert epilogue.run(node["config"], "42.srv") == 0
    assert "42.srv: after the release: the server does not answer" in capfd.readouterr().err
    assert node["killed"].exists()
    assert not list(node["paths"].journal.iterdir())


def test_full_disk_under_the_job_output_does_not_stop_the_release(node, qemu):
    program = (
        "import sys; from pathlib import Path;"
        "from vtorque_core.node.end import after_release, epilogue;"
        "epilogue._last_words = lambda _paths, _states: ['panic'];"
        "after_release.finish = lambda *_, **__: None;"
        "sys.exit(epilogue.run(Path(sys.argv[1]), '42.srv', sys.argv[2]))"
    )
    with Path("/dev/full").open("wb") as full:
        argv = [sys.executable, "-c", program, node["config"], str(EXIT_GUEST_DIED)]
        subprocess.run(argv, stdout=full, check=False, timeout=180)
    assert not list(node["paths"].journal.iterdir())


def test_nothing_is_accounted_without_a_running_guest(node, tmp_path, monkeypatch):
    monkeypatch.setattr(vcpu_threads, "RUNNING", tmp_path)
    node["config"].write_text(node["config"].read_text().replace("kill_leftovers = true", ""))
    assert epilogue.run(node["config"], "42.srv") == 0
    assert not node["acme"].told.exists()
    assert not node["killed"].exists(), "processes were killed although kill_leftovers is not set"


# In a separate user and PID namespace, so that only its processes can be seen and killed.
KILL = """
import json, os, subprocess, sys, time
from pathlib import Path
from vtorque_core.node.end import leftovers
from vtorque_core.records.reading import JobHeader
from vtorque_core.base.names import JobAttempt, Paths

case = json.loads(sys.argv[1])
top = Path(case["top"])
paths = Paths(top / "state", top / "run")
paths.journal.mkdir(parents=True)
leftovers.SESSIONS = top / "users"
leftovers.SESSIONS.mkdir()
if case.get("session"):
    (leftovers.SESSIONS / "1234").touch()
if case.get("other"):
    line = JobHeader(JobAttempt("43.srv", 0, "ada", case["other"]), "acme").line()
    (paths.journal / "43.srv.0.jsonl").write_text(json.dumps(line) + "\\n")
os.environ["PATH"] = f"{top}:/usr/bin:/bin"
who = top / "who"
who.write_text(f"#!/bin/sh\\necho '{case.get('who', 'bob')} pts/0'\\n")
who.chmod(0o755)
left = [subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 60; :"], start_new_session=True)
        for _ in range(3)]
header = {"uid": 1234, "whole_node": True, **case.get("header", {})}
job = JobHeader(JobAttempt("42.srv", 0, "ada", header.pop("uid")), "acme", **header)
told = leftovers.kill(paths, job)
end = time.monotonic() + 30
while told.endswith(" killed") and any(p.poll() is None for p in left) and time.monotonic() < end:
    time.sleep(0.01)
print(json.dumps([told, sum(p.poll() is None for p in left)]))
"""


def kill_in_namespace(tmp_path, **case):
    argv = ["unshare", "--user", "--map-user=1234", "--pid", "--fork", "--mount-proc"]
    argv += ["--kill-child", sys.executable, "-c", KILL, json.dumps({"top": str(tmp_path), **case})]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_leftover_processes_are_killed_even_if_they_ignore_sigterm(tmp_path):
    told, left = kill_in_namespace(tmp_path, other=4321)
    assert left == 0
    assert told.startswith("42.srv: ")
    assert told.endswith(" leftover processes of ada killed")
    assert int(told.split()[1]) in (3, 4, 5, 6), "not three shells and at most three sleeps"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"header": {"whole_node": False}}, ""),
        ({"header": {"uid": 999}}, ""),
        ({"header": {"uid": 0}}, ""),
        ({"header": {"uid": 4321}}, ""),
        ({"header": {"boot": "another"}}, ""),
        ({"session": True}, "the user has a login session"),
        ({"who": "ada"}, "the user is logged in"),
        ({"other": 1234}, "the user has job 43.srv on this node, too"),
    ],
)
def test_processes_that_may_be_legitimate_are_not_killed(tmp_path, case, said):
    told, left = kill_in_namespace(tmp_path, **case)
    assert left == 3
    assert said in told
    assert bool(told) == bool(said)


def test_old_journal_without_whole_node_means_a_shared_node(tmp_path):
    from vtorque_core.records.reading import read

    line = JobHeader(JobAttempt("1", 0, "ada", 1234), "acme").line()
    del line["whole_node"]
    path = Path(tmp_path, "1.0.jsonl")
    path.write_text(json.dumps(line) + "\n")
    assert read(path).header.whole_node is False
