"""The root side with doubles of Slurm's commands: trusted input, and updates."""

import os
import pty
import pwd
import termios
from dataclasses import replace

import pytest

from slurm_doubles import SlurmDoubles
from vtorque_core.api import HostFault, Paths, job_log, kept_records
from vtorque_core.api.batch_system import BareNode, BatchJob, JobState, Outcome, PeerGuest
from vtorque_core.api.guest_context import EnvVar, GuestFile
from vtorque_core.api.kept_records import Usage
from vtorque_slurm import batch_commands, hostlist
from vtorque_slurm.node import SlurmNode
from vtorque_slurm.settings import Settings
from vtorque_slurm.setup import feature_step
from vtorque_slurm.shell import SlurmJobShell

ME = pwd.getpwuid(os.getuid()).pw_name
PROLOG = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_USER": ME,
    "SLURM_JOB_UID": str(os.getuid()),
    "SLURMD_NODENAME": "n2",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_RESTART_COUNT": "1",
    "SLURM_JOB_COMMENT": "mine vt1:AAAA",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ACCOUNT": "chem",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_commands, "_PAUSE", 0.0)
    return SlurmDoubles(tmp_path)


@pytest.fixture
def node(slurm, tmp_path):
    settings = Settings(bindir=str(slurm.bin), feature="vt", requeue_limit=2)
    return SlurmNode(settings, tmp_path / "journal", tmp_path / "proof")


def test_environment_of_the_prolog_is_read(node, slurm):
    slurm.facts(cpus="0", share="NO", restarts=1, account="chem", qos="high")
    job = node.job((), PROLOG)
    assert (job.partition, job.account, job.qos, job.queue) == ("gpu", "chem", "high", "")
    assert (job.id, job.owner, job.attempt) == ("7", ME, 1)
    assert (job.nodes, job.node_index) == (("n1", "n2"), 1)
    assert (job.cpu_count, job.mem_mib, job.whole_node) == (1, 512, True)
    assert job.cpu_counts == (1, 1)
    assert job.blob == b"\0\0"


@pytest.mark.parametrize(("share", "alone"), [("USER", (False, True)), ("OK", (False, False))])
def test_sharing_of_the_node_follows_from_the_record(node, slurm, share, alone):
    slurm.facts(cpus="0", share=share, account="chem")
    job = node.job((), PROLOG)
    assert (job.whole_node, job.whole_user) == alone


def test_bare_metal_job_calls_no_command(node, slurm):
    assert node.job((), PROLOG | {"SLURM_JOB_COMMENT": "mine"}).blob is None
    assert slurm.calls() == []


HET = PROLOG | {"SLURM_HET_JOB_ID": "7"}


def test_other_components_of_a_heterogeneous_job_are_bare_metal(node, slurm):
    """The controller reports their nodes; a node has room for CPUs by --cpus-per-task."""
    slurm.facts(components=3, cpus="0-3", account="chem")
    job = node.job((), HET)
    assert (job.unknown, job.bad_request, job.nodes) == ("", "", ("n1", "n2"))
    assert job.bare == tuple(
        BareNode(f"n{number}", 2, part=part) for number, part in ((3, 1), (4, 1), (5, 2), (6, 2))
    )
    assert (job.id, job.known_as) == ("7", "7")
    items = list(node.context(job, [PeerGuest("vn1", 2), PeerGuest("vn2", 1)]))
    files = {item.path: item.content for item in items if isinstance(item, GuestFile)}
    assert files["/etc/vtorque/slurm/guests"].startswith(b"vn1 2 0\nvn2 1 0\nn3 2 1\n")
    hosts = b"vn1 vn1 vn2 n3 n3 n4 n4 n5 n5 n6 n6 ".replace(b" ", b"\n")
    assert files["/etc/vtorque/slurm/hosts"] == hosts
    environ = {item.name: item.value for item in items if isinstance(item, EnvVar)}
    assert environ["VTORQUE_HOSTFILE"] == "/etc/vtorque/slurm/hosts"
    given = {f"SLURM_JOB_NODELIST_{kind}_GROUP_{n}": f"n{n}" for kind in ("HET", "PACK")
             for n in (0, 1)}  # fmt: skip
    found = SlurmJobShell().guest_env(given | {"SLURM_NTASKS_HET_GROUP_0": "9"}, environ)
    assert found["SLURM_JOB_NODELIST_HET_GROUP_0"] == "vn1,vn2"
    assert found["SLURM_JOB_NODELIST_PACK_GROUP_0"] == "vn1,vn2"
    assert "SLURM_JOB_NODELIST_HET_GROUP_1" not in found


def test_request_in_another_component_is_refused(node, slurm):
    """vsub makes none: its comment was changed, or the job was composed manually."""
    slurm.facts(components=2)
    job = node.job((), HET | {"SLURM_HET_JOB_ID": "6"})
    assert "only the first component" in job.bad_request
    assert job.bare == ()


def test_heterogeneous_job_is_requeued_and_its_first_component_excludes_the_node(node, slurm):
    slurm.facts(components=2)
    node.finish(JOB, Outcome.HOST_FAULT, "n2: libvirt is dead", hook_waits=True)
    calls = slurm.calls()
    assert ["requeue", "7"] in calls
    assert ["update", "JobId=7+0", "ExcNodeList=n2"] in calls


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_UID", "SLURMD_NODENAME"])
def test_incomplete_prolog_environment_is_a_host_fault(node, name):
    with pytest.raises(HostFault, match="not the environment"):
        node.job((), {k: v for k, v in PROLOG.items() if k != name})
    with pytest.raises(HostFault):
        node.job((), PROLOG | {"SLURMD_NODENAME": "other"})


def test_job_with_an_unknown_share_does_not_start(node, slurm):
    slurm.down(True)
    for comment in ("vt1:AAAA", "vt1:in-script"):
        job = node.job((), PROLOG | {"SLURM_JOB_COMMENT": comment})
        assert "Unable to contact" in job.unknown
        assert (job.blob is None, job.bad_request) == (False, "")
        assert node.finish(job, Outcome.HOST_FAULT, "x", hook_waits=True) == 0


def test_user_with_another_uid_on_the_node_is_reported(node):
    """Slurm knows users by their numbers; their names may differ between its hosts."""
    job = node.job((), PROLOG | {"SLURM_JOB_USER": "ada"})
    said = f"Slurm reports the job's user ada with uid {os.getuid()}, but on this node the uid is "
    assert job.unknown == said + ME
    other = PROLOG | {"SLURM_JOB_USER": "daemon", "SLURM_JOB_UID": "54321"}
    assert "uid 54321" in node.job((), other).unknown


JOB = BatchJob("7", "ada", "n2", ("n1", "n2"), b"", attempt=0)


@pytest.mark.parametrize("outcome", [Outcome.READY, Outcome.REFUSED, Outcome.NOT_OURS])
def test_other_outcomes_than_a_host_fault_call_no_command(node, slurm, outcome):
    assert node.finish(JOB, outcome, "no", hook_waits=True) == 0
    assert slurm.calls() == []


def test_host_fault_requeues_without_this_node(node, slurm):
    slurm.facts(excluded="n9")
    assert node.finish(JOB, Outcome.HOST_FAULT, "n2: libvirt is dead", hook_waits=True) == 0
    assert ["requeue", "7"] in slurm.calls()
    assert slurm.facts()["excluded"] == "n9,n2"
    assert "libvirt is dead" in slurm.facts()["note"]
    assert slurm.node()["comment"].startswith("vTorque: job 7 did not start on n2: n2: libvirt")


def test_job_that_waits_for_resources_is_requeued_and_never_held(node, slurm):
    slurm.facts(restarts=9, excluded="n9")
    job = BatchJob("7", "ada", "n2", ("n2",), b"", attempt=9)
    assert node.finish(job, Outcome.IN_USE, "n2: in use by other jobs", hook_waits=True) == 0
    assert ["requeue", "7"] in slurm.calls()
    assert slurm.facts()["excluded"] == "n9"
    waited = "vTorque: waited too long for free resources on n2: n2: in use by other jobs"
    assert slurm.facts()["note"] == waited
    assert not slurm.node()["comment"]
    slurm.facts(restarts=10, state="RUNNING", note="; ".join([waited] * 10))
    slurm.calls()
    node.finish(replace(job, attempt=10), Outcome.HOST_FAULT, "dead", hook_waits=True)
    assert ["requeue", "7"] in slurm.calls(), (
        "starts that waited for resources are counted as failures"
    )


def test_user_text_is_not_read_as_the_admin_comment(node, slurm):
    slurm.facts(name="x\n   AdminComment=forged")
    node.finish(JOB, Outcome.HOST_FAULT, "dead", hook_waits=True)
    assert slurm.facts()["note"] == "vTorque: job 7 did not start on n2: dead"
    slurm.facts(restarts=0, state="RUNNING", note="the admin's")
    node.finish(JOB, Outcome.HOST_FAULT, "dead", hook_waits=True)
    assert slurm.facts()["note"] == "the admin's; vTorque: job 7 did not start on n2: dead"


def test_concurrent_faults_of_two_nodes_requeue_once(node, slurm):
    node.finish(JOB, Outcome.HOST_FAULT, "first", hook_waits=True)
    slurm.calls()
    node.finish(
        BatchJob("7", "ada", "n1", ("n1", "n2"), b""), Outcome.HOST_FAULT, "second", hook_waits=True
    )
    assert not [call for call in slurm.calls() if call[0].startswith("requeue")]
    assert slurm.facts()["excluded"] == "n2,n1"
    assert slurm.facts()["restarts"] == 1


def test_after_the_limit_the_job_is_held(node, slurm):
    slurm.facts(restarts=2)
    job = BatchJob("7", "ada", "n2", ("n2",), b"", attempt=2)
    node.finish(job, Outcome.HOST_FAULT, "dead", hook_waits=True)
    assert ["requeuehold", "7"] in slurm.calls()
    assert "dead (held; when the problem is fixed: scontrol update" in slurm.facts()["note"]


def test_job_that_must_not_be_requeued_fails(node, slurm, capsys):
    slurm.facts(refuse=True)
    assert node.finish(JOB, Outcome.HOST_FAULT, "dead", hook_waits=True) == 0
    assert "disabled" in capsys.readouterr().err


def test_note_of_the_site_on_a_node_is_kept(node, slurm):
    slurm.node(comment="rack 7")
    node.finish(JOB, Outcome.HOST_FAULT, "dead", hook_waits=True)
    node.mark(False, "ill")
    assert slurm.node()["comment"] == "rack 7"


def test_mark_removes_and_restores_the_feature_of_a_node(node, slurm):
    step = feature_step("vt", node._client)
    slurm.node(available="a,vt,b", active="a,vt")
    node.mark(False, "libvirt is dead")
    assert (slurm.node()["available"], slurm.node()["active"]) == ("a,b", "a")
    assert slurm.node()["comment"] == "vTorque: libvirt is dead"
    assert step.is_applied(), "a mark that doctor removed is reported as missing"
    node.mark(True, "")
    assert (slurm.node()["available"], slurm.node()["active"]) == ("a,b,vt", "a,vt")
    assert slurm.node()["comment"] == ""
    assert step.is_applied()
    step.undo()
    assert not step.is_applied()


def keep(tmp_path, seconds, **facts):
    place = kept_records.Place(Paths(tmp_path, tmp_path), os.getuid(), "7.0")
    phases = [{"name": "run", "guest": None, "start": 1.0, "seconds": seconds}]
    place.add_facts(job="7", node="n1", phases=phases, **facts)
    return place


def answering(slurm, tmp_path, reason):
    """Return an adapter whose scontrol shows a failed job, and the file that lists its calls."""
    text = f"JobId=7 JobName=t\n   JobState=FAILED Reason={reason} Dependency=(null)\n"
    text += "   StdErr=/home/ada/nodir/x\n   StdOut=/home/ada/nodir/x\n"
    (tmp_path / "shown").write_text(text)
    program = f"#!/bin/sh\necho called >> {tmp_path}/asked\ncat {tmp_path}/shown\n"
    (slurm.bin / "scontrol").write_text(program)
    (tmp_path / "slurm.conf").touch()
    settings = Settings(bindir=str(slurm.bin), conf=str(tmp_path / "slurm.conf"))
    return SlurmNode(settings, tmp_path / "journal", tmp_path / "proof"), tmp_path / "asked"


def test_reason_of_a_script_that_slurm_did_not_start_is_kept(slurm, tmp_path):
    place = keep(tmp_path, 0.2)
    adapter, _ = answering(slurm, tmp_path, "JobLaunchFailure")
    adapter.account("7", Usage(1.0, 300))
    reason = place.facts()["reason"]
    assert reason.startswith("Slurm could not start the script (JobLaunchFailure)")
    assert "/home/ada/nodir/x" in reason
    assert [entry["message"] for entry in job_log.entries(place)] == [f"ended: {reason}"]


@pytest.mark.parametrize(
    ("seconds", "facts", "reason", "is_asked"),
    [
        (0.2, {}, "NonZeroExitCode", True),
        (60.0, {}, "JobLaunchFailure", False),
        (0.2, {"reason": "refused"}, "JobLaunchFailure", False),
    ],
)
def test_controller_is_not_queried_about_other_jobs(
    slurm, tmp_path, seconds, facts, reason, is_asked
):
    place = keep(tmp_path, seconds, **facts)
    adapter, asked = answering(slurm, tmp_path, reason)
    adapter.account("7", Usage(1.0, 300))
    assert place.facts().get("reason") == facts.get("reason")
    assert asked.exists() == is_asked


def test_use_is_noted_in_slurmdbd_once_per_node(slurm, tmp_path):
    path = tmp_path / "slurm.conf"
    path.write_text("AccountingStorageType=accounting_storage/none\n")
    node = SlurmNode(Settings(bindir=str(slurm.bin), conf=str(path)), tmp_path, tmp_path)
    node.account("7", Usage(12.6, 300))
    assert not (tmp_path / "db").exists()
    path.write_text("AccountingStorageType=accounting_storage/slurmdbd\n")
    change = 'echo "9|8_9|"; printf "7|%s|%s\\n" "${5#*=}" "${7#*=}" | tr A-Z a-z'
    programs = {"sacct": f"cat {tmp_path}/db", "sacctmgr": f"{{ {change}; }} > {tmp_path}/db"}
    for name, text in programs.items():
        (slurm.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (slurm.bin / name).chmod(0o755)
    (tmp_path / "db").write_text("9|8_9|\n7|8_7|The site's\n")  # an element of the array 8
    for _ in range(2):
        node.account("7", Usage(12.6, 300))
    told = "9|8_9|\n7|8_7|the site's; vtorque n1: cpu=13s mem=300m\n"
    assert (tmp_path / "db").read_text() == told
    with pytest.raises(HostFault, match="sacct does not list job 8"):
        node.account("8", Usage(12.6, 300))


def test_node_is_drained_once_and_the_reason_of_the_site_is_kept(node, slurm):
    slurm.node(others={"n3": "vTorque: x", "n4": "the admin's: vTorque: x"})
    for reason in ("it asks", "its disk is slow\n", "its disk is slow\n"):
        node.drain(reason)
    assert slurm.node()["state"] == "MIXED+DRAIN"
    assert slurm.node()["reason"] == "vTorque: its disk is slow\\n"
    assert [call[0] for call in slurm.calls()].count("update") == 2
    assert node.drained() == ("n1", {"n1": "its disk is slow\\n", "n3": "x"})
    node.undrain()
    assert (slurm.node()["state"], node.drained()[1]) == ("MIXED", {"n3": "x"})
    slurm.node(state="IDLE+DRAIN", reason="the admin's")
    node.drain("x")
    node.undrain()
    assert slurm.node()["state"] == "IDLE+DRAIN" and slurm.node()["reason"] == "the admin's"
    slurm.down(True)
    with pytest.raises(HostFault, match="Unable to contact"):
        node.drain("x")


def test_job_is_requeued_by_its_number(node, slurm):
    slurm.facts(state="RUNNING")
    node.requeue("7")
    assert ["requeue", "7"] in slurm.calls()
    with pytest.raises(HostFault, match="no longer runs: COMPLETING"):
        node.requeue("7")  # which has just ended, or is requeued
    assert ["requeue", "7"] not in slurm.calls()
    slurm.facts(state="RUNNING", refuse=True)
    with pytest.raises(HostFault, match="disabled for job"):
        node.requeue("7")


def test_guests_get_slurm_variables_and_commands(node):
    items = list(node.context(JOB, [PeerGuest("vn1-0", 2), PeerGuest("vn1-1", 2)]))
    environ = {item.name: item.value for item in items if isinstance(item, EnvVar)}
    assert environ["SLURM_JOB_NODELIST"] == environ["SLURM_NODELIST"] == "vn1-0,vn1-1"
    assert (environ["SLURM_NNODES"], environ["SLURM_TASKS_PER_NODE"]) == ("2", "2(x2)")
    files = {item.path: item for item in items if isinstance(item, GuestFile)}
    assert files["/etc/vtorque/slurm/guests"].content == b"vn1-0 2 0\nvn1-1 2 0\n"
    assert files["/usr/bin/srun"].mode == files["/usr/bin/sbatch"].mode == 0o755


HOST = {"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "9", "SLURM_MEM_PER_NODE": "4096"}


@pytest.mark.parametrize(
    ("cpus", "host", "told"),
    [
        ((8,), {"NTASKS": "8"}, {"NTASKS": "8", "TASKS_PER_NODE": "8"}),
        ((8,), {"CPUS_PER_TASK": "8"}, {"CPUS_PER_TASK": "8", "TASKS_PER_NODE": "1"}),
        ((8,), {"NTASKS": "1"}, {"NTASKS": "1", "TASKS_PER_NODE": "1"}),
        ((8,), {}, {"TASKS_PER_NODE": "8"}),
        # -vm vcpus=2 of eight
        ((2,), {"NTASKS": "8"}, {"NTASKS": "2", "TASKS_PER_NODE": "2"}),
        ((2,), {"CPUS_PER_TASK": "8"}, {"CPUS_PER_TASK": "2", "TASKS_PER_NODE": "1"}),
        # vms_per_node=2
        ((4, 4), {"NTASKS": "1", "CPUS_PER_TASK": "8"},
         {"NTASKS": "2", "CPUS_PER_TASK": "4", "TASKS_PER_NODE": "1(x2)"}),
        ((4, 4), {"NTASKS": "8", "NTASKS_PER_NODE": "8"},
         {"NTASKS": "8", "NTASKS_PER_NODE": "4", "TASKS_PER_NODE": "4(x2)"}),
        ((4, 4), {"NTASKS": "5"}, {"NTASKS": "5", "TASKS_PER_NODE": "4,1"}),
        # nodes with other numbers of CPUs
        ((4, 2), {"NTASKS": "6"}, {"NTASKS": "6", "TASKS_PER_NODE": "4,2"}),
        ((4, 2), {"CPUS_PER_TASK": "2"}, {"CPUS_PER_TASK": "2", "TASKS_PER_NODE": "2,1"}),
        ((4,), {"NTASKS": "x"}, {"NTASKS": "4", "TASKS_PER_NODE": "4"}),
    ],
)  # fmt: skip
def test_tasks_fit_the_guests(node, cpus, host, told):
    """No variable inside states more than the guests have."""
    guests = [PeerGuest(f"vn1-{n}", count, 1000) for n, count in enumerate(cpus)]
    items = {i.name: i for i in node.context(JOB, guests) if isinstance(i, EnvVar)}
    environ = HOST | {f"SLURM_{name}": value for name, value in host.items()}
    found = SlurmJobShell().guest_env(environ, {name: each.value for name, each in items.items()})
    assert found == {f"SLURM_{name}": value for name, value in told.items()}
    tasks = hostlist.counts(found["SLURM_TASKS_PER_NODE"])
    each = int(found.get("SLURM_CPUS_PER_TASK", 1))
    assert all(n * each <= count for n, count in zip(tasks, cpus, strict=True))
    assert items["SLURM_CPUS_ON_NODE"].value == str(cpus[0])
    assert items["SLURM_MEM_PER_NODE"].value == "1000"


def test_memory_per_cpu_is_that_of_the_guests(node):
    items = {i.name: i for i in node.context(JOB, [PeerGuest("vn1", 4, 1000)])
             if isinstance(i, EnvVar)}  # fmt: skip
    values = {name: each.value for name, each in items.items()}
    found = SlurmJobShell().guest_env({"SLURM_MEM_PER_CPU": "300"}, values)
    assert found["SLURM_MEM_PER_CPU"] == "250"
    assert items["SLURM_MEM_PER_NODE"].unless == ("SLURM_MEM_PER_CPU",)


@pytest.mark.parametrize(
    ("state", "life"),
    [
        ("RUNNING", JobState.ALIVE),
        ("SUSPENDED", JobState.SUSPENDED),
        ("COMPLETING", JobState.ALIVE),
        ("PENDING", JobState.ALIVE),
    ],
)
def test_life_of_a_job_follows_from_its_slurm_state(node, slurm, state, life):
    (slurm.top / "7.job").touch()
    slurm.facts(state=state)
    assert node.job_states(["7", "8"]) == {"7": life, "8": JobState.GONE}


def test_terminal_of_an_interactive_job_does_not_echo_before_the_guest_does():
    leader, terminal = pty.openpty()
    try:
        assert SlurmJobShell().read_start([], {"SLURM_JOB_ID": "7"}, terminal).script is None
        assert not termios.tcgetattr(leader)[3] & termios.ECHO
    finally:
        os.close(leader)
        os.close(terminal)
