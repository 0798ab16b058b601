"""The installed hooks under a double of Torque with its observed behavior."""

import dataclasses
import subprocess
import syslog
import time

import pytest

from fake_torque_mom import FakeTorqueMom
from pbs_harness import ME
from torque_node import adapter_at
from vtorque_core.api import HostFault, JobAttempt
from vtorque_core.api.batch_system import BatchJob, Detach, JobState, Outcome
from vtorque_core.api.setup_steps import Installation
from vtorque_core.base.names import safe_name
from vtorque_pbs import node as pbs_node
from vtorque_pbs.torque import node as torque
from vtorque_pbs.torque.node import RETRY
from vtorque_testing.submit import run_vsub

pytestmark = pytest.mark.e2e

SITES = '#!/bin/sh\necho "site $# $1 $4 [$5]"; exit {code}\n'


@pytest.fixture
def mom(tmp_path):
    return FakeTorqueMom(tmp_path)


def submitted(mom, *argv):
    assert run_vsub(mom, ["-l", "nodes=1:ppn=2", *argv], stdin=b":\n").code == 0
    return mom.last_input().job_id


VM = ("-vm", "ram=1G")


def test_bare_metal_job_runs_only_the_site_scripts(mom):
    for name in ("prologue", "epilogue"):
        mom.script("n1", name, SITES.format(code=0))
    assert mom.run(submitted(mom, "-N", "a'b", "-l", "other=mine")) == 1
    assert mom.calls() == []
    lines = mom.output.decode().splitlines()
    assert lines[0].startswith("site 8 1.server a'b [nodes=1:ppn=2,other=mine")
    assert lines[1] == "site 11 1.server a'b [77]"


def test_vm_job_calls_both_hooks_with_torque_arguments(mom):
    job = submitted(mom, "-N", "$(touch x) y", *VM)
    mom.script("n1", "prologue", SITES.format(code=0))
    assert mom.run(job) == 1
    (call,) = mom.calls()
    assert call[:6] == ["n1", "hook", "--config", str(mom.root / "v t.toml"), "prologue", "first"]
    assert call[6] == job and call[9] == "$(touch x) y" and "other=vt1:" in call[10]
    assert mom.output.startswith(b"site 8 ")
    assert mom.pbs.job(job)["state"] == "C"


@pytest.mark.parametrize(("code", "state"), [(1, "C"), (3, "Q")])
def test_failing_site_script_fails_as_before(mom, code, state):
    mom.script("n1", "prologue", SITES.format(code=code))
    for vm in ((), VM):
        job = submitted(mom, *vm)
        assert mom.run(job, starts=4) == (1 if code == 1 else 4)
        assert mom.pbs.job(job)["state"] == state
        assert mom.calls() == []


def test_refused_job_runs_once_to_print_the_reason(mom):
    mom.outcome(Outcome.REFUSED)
    job = submitted(mom, *VM)
    assert mom.run(job, runs=("sh", "-c", "echo refused because; exit 121")) == 1
    assert mom.output == b"refused because\n" and mom.pbs.job(job)["hold"] == "n"
    assert not mom.down


def test_host_fault_requeues_the_job_and_notes_the_node(mom):
    mom.outcome(Outcome.HOST_FAULT)
    job = submitted(mom, *VM)
    mom.run(job, starts=1)
    assert mom.pbs.job(job)["state"] == "Q" and mom.pbs.job(job)["hold"] == "n"
    node = mom.pbs.state()["nodes"]["n1"]
    assert node["properties"] == "fast,novtorque" and node["state"] == "free"
    assert node["note"] == "vtorque: libvirtd does not answer"
    assert mom.pbs.job(job)["comment"].endswith("; libvirtd does not answer")
    assert mom.pbs.job(job)["comment"].startswith("vtorque: next start at ")


def test_requeue_delays_grow_and_end(mom, monkeypatch):
    monkeypatch.setattr(pbs_node.time, "time", lambda: 0)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    job, adapter = submitted(mom, *VM), adapter_at(mom.root, "n1")
    told = BatchJob(job, "u", "n1", ("n1",), b"")
    pauses = []
    for attempt in (0, 1, 2, 9, 5000):
        again = dataclasses.replace(told, attempt=attempt)
        assert adapter.finish(again, Outcome.IN_USE, "x", hook_waits=True) == RETRY
        pauses.append(mom.pbs.job(job)["not_before"][8:])
    assert pauses == ["0000.30", "0001.00", "0002.00", "0015.00", "0015.00"]


def test_last_node_with_the_mark_keeps_it(mom):
    """pbs_sched deletes jobs that no node could run; such a job waits."""
    mom.outcome(Outcome.HOST_FAULT)
    state = mom.pbs.state()
    for name in ("n2", "n3", "n4"):
        state["nodes"][name]["properties"] = "novtorque"
    mom.pbs.write(state)
    job = submitted(mom, *VM)
    mom.run(job, starts=1)
    node = mom.pbs.state()["nodes"]["n1"]
    assert "vtorque" in node["properties"].split(",")
    assert node["note"] == "vtorque: libvirtd does not answer"
    assert mom.pbs.job(job)["state"] == "Q"


def test_host_fault_is_retried_three_times_and_then_held(mom):
    mom.outcome(Outcome.HOST_FAULT)
    job = submitted(mom, *VM)
    assert mom.run(job) == 3, "not held after three starts"
    assert mom.pbs.job(job)["state"] == "H"
    said = f"vtorque: held after 3 starts; when the problem is fixed: qrls -h s {job}; "
    said += "libvirtd does not answer"
    assert mom.pbs.job(job)["comment"] == said


@pytest.mark.parametrize("why", ["not a manager", "interactive", "no server"])
def test_host_fault_without_a_requeue_is_reported_by_the_job_shell(mom, why):
    mom.outcome(Outcome.HOST_FAULT)
    job = submitted(mom, *VM, *(["-I"] if why == "interactive" else []))
    state = mom.pbs.state()
    mom.pbs.write(state | {"manager": why != "not a manager"})
    if why == "no server":
        mom.outcome(2)
    assert mom.run(job, runs=("echo", "why")) == 1
    assert mom.output.endswith(b"why\n") and mom.pbs.job(job)["state"] == "C"


@pytest.mark.parametrize("code", [2, 1, 122, 139])
def test_broken_vtorque_does_not_loop_and_shows_its_error(mom, code):
    mom.outcome(code)
    job = submitted(mom, *VM)
    assert mom.run(job, runs=("echo", "no proof")) == 1
    assert mom.output == (b"vtorque: no config\n" if code == 2 else b"") + b"no proof\n"
    assert list(mom.priv("n1").glob(".vtorque*")) == []


def test_prologue_killed_by_a_signal_leaves_the_report_to_the_job_shell(mom):
    assert mom.run(submitted(mom, *VM), runs=("echo", "no proof"), signal_prologue=True) == 1
    assert mom.output == b"no proof\n"


def test_start_killed_before_its_proof_is_retried_once(mom):
    mom.outcome("137 READY")
    job = submitted(mom, *VM)
    assert mom.run(job, runs=("echo", "ran")) == 1
    assert [words[3:5] for _, *words in mom.calls()].count(["prologue", "first"]) == 2


def test_start_killed_after_its_proof_is_left_to_the_job_shell(mom):
    mom.outcome("137 READY")
    job = submitted(mom, *VM)
    proof = mom.paths.proof(job)
    proof.parent.mkdir(parents=True)
    proof.touch()
    mom.run(job)
    assert [words[3:5] for _, *words in mom.calls()].count(["prologue", "first"]) == 1


@pytest.mark.parametrize(
    ("attempt", "hold"), [(0, "n"), (2, "s")], ids=["first start", "last start"]
)
def test_job_whose_detached_start_was_killed_is_requeued(mom, attempt, hold):
    job = submitted(mom, *VM)
    mom.pbs.job(job, exec_host="n1/0-1", state="R", start_count=attempt + 1)
    adapter_at(mom.root, "n1").start_again(JobAttempt(job, attempt, ME, 1000), "it was killed")
    assert (mom.pbs.job(job)["rerun"], mom.pbs.job(job)["hold"]) == (True, hold)
    assert "it was killed" in mom.pbs.job(job)["comment"]
    assert "vtorque" in mom.pbs.state()["nodes"]["n1"]["properties"].split(",")


@pytest.mark.parametrize("change", [{"interactive": True}, {"rerunable": "n"}])
def test_job_that_cannot_be_requeued_continues(mom, change):
    job = submitted(mom, *VM)
    mom.pbs.job(job, exec_host="n1/0-1", state="R", start_count=1, **change)
    adapter_at(mom.root, "n1").start_again(JobAttempt(job, 0, ME, 1000), "it was killed")
    assert "rerun" not in mom.pbs.job(job)


def test_sisters_start_first_and_never_fail(mom):
    job = submitted(mom, *VM, "-l", "nodes=2:ppn=2")
    for outcome in (Outcome.READY, Outcome.REFUSED, 2, 122):
        mom.outcome(outcome)
        mom.pbs.job(job, state="Q")
        mom.run(job, nodes=2)
        nodes = [(call[0], call[5]) for call in mom.calls()]
        assert nodes == [("n2", "sister"), ("n1", "first")]
        assert not mom.down


def test_hanging_server_does_not_delay_each_job(mom, monkeypatch):
    asked = mom.root / "asked"
    asked.touch()
    (mom.pbs.bin / "qstat").write_text(f"#!/bin/sh\necho >>{asked}\nexec sleep 1000\n")
    monkeypatch.setattr(pbs_node, "ALIVE_TIME", 0.3)
    ids = [f"{number}.server" for number in range(500)]
    assert adapter_at(mom.root, "n1").job_states(ids) == dict.fromkeys(ids, JobState.UNKNOWN)
    assert len(asked.read_text().splitlines()) < 10


@pytest.mark.parametrize(("end", "problem"), [(60.0, ""), (900.0, "may take 970 s: set it to")])
def test_setup_refuses_an_alarm_that_would_kill_a_release(mom, tmp_path, end, problem):
    """A long start does not count, because it continues after the prologue has returned."""
    times = {"start_time": 2000.0, "end_time": end}
    place = Installation(tmp_path / "v", tmp_path / "c", tmp_path / "s", **times)
    steps = adapter_at(mom.root, "n1").setup_steps(place)
    (check,) = [each for each in steps if "prologue_alarm" in each.text]
    assert problem in check.problem
    assert check.is_applied() == (problem == "")


def test_host_fault_of_a_sister_requeues_the_job(mom):
    job = submitted(mom, *VM, "-l", "nodes=2:ppn=2")
    mom.pbs.job(job, exec_host="n1/0+n2/0", state="R", start_count=1)
    args = ["sister", job, "u", "g", "n", "nodes=2:ppn=2,other=vt1:AHsidiI6MX0", "batch"]
    adapter = adapter_at(mom.root, "n2")
    told = adapter.job(args, {})
    assert told.detach is Detach.AT_ONCE and told.node_index == 1
    adapter.finish(told, Outcome.HOST_FAULT, "x", hook_waits=False)
    assert mom.pbs.state()["jobs"][job]["rerun"]
    assert "novtorque" in mom.pbs.state()["nodes"]["n2"]["properties"]


@pytest.mark.parametrize("fails", [False, True])
def test_boot_time_is_added_to_walltime_although_qalter_gets_no_answer(mom, monkeypatch, fails):
    monkeypatch.setattr(torque, "_QALTER_TIME", 0.5)
    logged = []
    monkeypatch.setattr(syslog, "syslog", lambda _, text: logged.append(text))
    job = submitted(mom, *VM, "-l", "nodes=1:ppn=2,walltime=100")
    asked = mom.pbs.job(job, exec_host="n1/0-1", state="R", start_count=1)["resources"]["walltime"]
    mom.pbs.change(qalter_fails=fails)
    args = ["first", job, "u", "g", "n", "nodes=1:ppn=2,other=vt1:AHsidiI6MX0", "batch"]
    adapter = adapter_at(mom.root, "n1")
    adapter._began -= 30
    told = adapter.job(args, {})
    assert adapter.finish(told, Outcome.READY, "", hook_waits=False) == 0
    walltime = mom.pbs.state()["jobs"][job]["resources"]["walltime"]
    if fails:
        assert walltime == asked
        (line,) = logged
        assert "the walltime includes the time to boot the guests: qalter" in line
    else:
        assert walltime.startswith("00:02:1"), walltime
        assert logged == []


@pytest.mark.parametrize("job_id", ["5.vm", "22[0].server", "7." + "x" * 60, "a b", "-x"])
def test_epilogue_depends_on_files_of_vtorque_only(mom, job_id):
    """The owner may have changed the job's resources with qalter."""
    args = [job_id, "u", "g", "n", "77", "nodes=1", "", "batch", "", "0", "/x.SC"]
    mom.script("n1", "epilogue", SITES.format(code=9))
    journal, proof = mom.paths.journal, mom.paths.run / "proof"
    for directory in (journal, proof):
        directory.mkdir(parents=True)
    (journal / "5.vmx.0.jsonl").touch()
    (journal / "55.vm.0.jsonl").touch()
    assert mom.hook("n1", "epilogue", args) == 9
    assert mom.calls() == []
    for file in (journal / f"{safe_name(job_id)}.0.jsonl", proof / f"{safe_name(job_id)}.json"):
        file.touch()
        assert mom.hook("n1", "epilogue", args) == 9
        ((_, *call),) = mom.calls()
        assert call[3:] == ["epilogue", *args]
        file.unlink()
    assert mom.output.count(b"site 11 ") == 3


def test_truncated_resource_list_is_not_a_vm_job(mom):
    """The buffer has 2048 bytes; the job shell then finds no proof."""
    job = submitted(mom, *VM)
    found = mom.pbs.job(job)["resources"]
    mom.pbs.job(job, resources=found | {"other": found["other"] + "A" * 2100})
    assert mom.run(job, runs=("echo", "no proof")) == 1
    assert mom.calls() == [] and mom.output == b"no proof\n"


def test_hooks_of_a_bare_metal_job_use_only_shell_builtins(mom, tmp_path):
    """A shell, with built-in commands only."""
    mom.paths.journal.mkdir(parents=True)
    for i in range(20):
        (mom.paths.journal / f"{i}.other.0.jsonl").touch()
    args = ["5.vm", "u", "g", "n", "nodes=1:ppn=2,walltime=1", "batch", "", "/x.SC"]
    for name in ("prologue", "epilogue"):
        argv = ["/bin/sh", "-x", mom.priv("n1") / name, *args]
        done = subprocess.run(argv, check=True, env={}, capture_output=True, text=True)
        commands = {line.removeprefix("+ ").split()[0] for line in done.stderr.splitlines()}
        assert {word for word in commands if "=" not in word} <= {"[", "continue", "exit"}
        assert len(done.stderr.splitlines()) < 15, done.stderr


def test_job_waiting_for_resources_is_never_held(mom):
    mom.outcome(Outcome.IN_USE)
    job = submitted(mom, *VM)
    mom.run(job, starts=7)
    assert mom.pbs.job(job)["state"] == "Q"
    assert mom.pbs.state()["nodes"]["n1"]["properties"] == "fast,vtorque"


def test_fault_that_a_user_can_cause_does_not_blame_the_node(mom):
    mom.outcome(Outcome.NOT_HERE)
    job = submitted(mom, *VM)
    mom.run(job, starts=1)
    assert mom.pbs.job(job)["state"] == "Q"
    assert mom.pbs.state()["nodes"]["n1"]["properties"] == "fast,vtorque"


@pytest.mark.parametrize(("state", "life"), [("S", JobState.SUSPENDED), ("Q", JobState.ALIVE)])
def test_suspended_job_is_alive(mom, state, life):
    """The state after qsig -s suspend: qstat(1B), job_state S."""
    job = submitted(mom, *VM)
    mom.pbs.job(job, state=state)
    assert adapter_at(mom.root, "n1").job_states([job]) == {job: life}


@pytest.mark.parametrize(("hosts", "shown"), [("n7/0", "n7/0"), ("", "none")])
def test_start_on_a_node_outside_the_job_names_its_hosts(mom, hosts, shown):
    """A job without hosts was once requeued while the killed pbs_mom started it."""
    job = submitted(mom, *VM)
    mom.pbs.job(job, exec_host=hosts, state="R")
    args = ["first", job, "u", "g", "n", "nodes=1:ppn=2,other=vt1:AHsidiI6MX0", "batch"]
    with pytest.raises(
        HostFault, match=rf"{job} does not run on this node; its exec_host: {shown}$"
    ):
        adapter_at(mom.root, "n1").job(args, {})
