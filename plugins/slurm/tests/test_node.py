"""The root side with doubles of Slurm's commands: what is believed, what is told."""

import contextlib
import os
import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_doubles import RECORD, Slurm
from vtorque_core.api import HostFault, Refused
from vtorque_core.api_batch import BatchJob, Outcome, PeerGuest, Usage
from vtorque_core.api_context import EnvVar, GuestFile
from vtorque_slurm import client, cpus, hostlist, records
from vtorque_slurm.node import SlurmNode
from vtorque_slurm.records import element, parse_job
from vtorque_slurm.settings import Settings
from vtorque_slurm.steps import Feature
from vtorque_slurm.submitter import SlurmSubmitter

FACTS = {
    "id": "7", "name": "t", "state": "RUNNING", "restarts": 0, "excluded": "(null)", "cpus": "0-1",
    "mem": 512, "share": "OK", "note": "", "comment": "",
}  # fmt: skip
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
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_PAUSE", 0.0)
    return Slurm(tmp_path)


@pytest.fixture
def node(slurm, tmp_path):
    settings = Settings(bindir=str(slurm.bin), feature="vt", requeue_limit=2)
    return SlurmNode(settings, tmp_path / "journal", tmp_path / "proof")


def test_a_prologs_environment(node, slurm):
    slurm.facts(cpus="0", share="NO", restarts=1)
    job = node.job((), PROLOG)
    assert (job.id, job.owner, job.attempt) == ("7", ME, 1)
    assert (job.nodes, job.node_index) == (("n1", "n2"), 1)
    assert (job.cpu_count, job.mem_mib, job.whole_node) == (1, 512, True)
    assert job.blob == b"\0\0"


def test_a_bare_metal_job_asks_nobody(node, slurm):
    assert node.job((), PROLOG | {"SLURM_JOB_COMMENT": "mine"}).blob is None
    assert slurm.calls() == []


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_UID", "SLURMD_NODENAME"])
def test_what_is_no_prolog(node, name):
    with pytest.raises(HostFault, match="not the environment"):
        node.job((), {k: v for k, v in PROLOG.items() if k != name})
    with pytest.raises(HostFault):
        node.job((), PROLOG | {"SLURMD_NODENAME": "other"})


def test_without_its_share_known_a_job_does_not_start(node, slurm):
    slurm.down(True)
    for comment in ("vt1:AAAA", "vt1:in-script"):
        job = node.job((), PROLOG | {"SLURM_JOB_COMMENT": comment})
        assert "Unable to contact" in job.unknown
        assert (job.blob is None, job.bad_request) == (False, "")
        assert node.finish(job, Outcome.HOST_FAULT, "x") == 0


def test_a_user_who_is_another_one_here(node):
    """Slurm knows users by their numbers; their names may differ between its hosts."""
    job = node.job((), PROLOG | {"SLURM_JOB_USER": "ada"})
    assert job.unknown == f"the job's user is ada with uid {os.getuid()} to Slurm, but {ME} here"
    assert "uid 54321" in node.job((), PROLOG | {"SLURM_JOB_UID": "54321"}).unknown


JOB = BatchJob("7", "ada", "n2", ("n1", "n2"), b"", attempt=0)


@pytest.mark.parametrize("outcome", [Outcome.READY, Outcome.REFUSED, Outcome.NOT_OURS])
def test_only_a_host_fault_is_told(node, slurm, outcome):
    assert node.finish(JOB, outcome, "no") == 0
    assert slurm.calls() == []


def test_a_host_fault_requeues_without_this_node(node, slurm):
    slurm.facts(excluded="n9")
    assert node.finish(JOB, Outcome.HOST_FAULT, "n2: libvirt is dead") == 0
    assert ["requeue", "7"] in slurm.calls()
    assert slurm.facts()["excluded"] == "n9,n2"
    assert "libvirt is dead" in slurm.facts()["note"]
    assert slurm.node()["comment"].startswith("vTorque: job 7 did not start on n2: n2: libvirt")


def test_a_users_text_is_no_comment_of_the_admins(node, slurm):
    slurm.facts(name="x\n   AdminComment=forged")
    node.finish(JOB, Outcome.HOST_FAULT, "dead")
    assert slurm.facts()["note"] == "vTorque: job 7 did not start on n2: dead"
    slurm.facts(restarts=0, state="RUNNING", note="the admin's")
    node.finish(JOB, Outcome.HOST_FAULT, "dead")
    assert slurm.facts()["note"] == "the admin's; vTorque: job 7 did not start on n2: dead"


def test_two_nodes_fail_at_once(node, slurm):
    node.finish(JOB, Outcome.HOST_FAULT, "first")
    slurm.calls()
    node.finish(BatchJob("7", "ada", "n1", ("n1", "n2"), b""), Outcome.HOST_FAULT, "second")
    assert not [call for call in slurm.calls() if call[0].startswith("requeue")]
    assert slurm.facts()["excluded"] == "n2,n1"
    assert slurm.facts()["restarts"] == 1


def test_after_the_limit_the_job_is_held(node, slurm):
    slurm.facts(restarts=2)
    job = BatchJob("7", "ada", "n2", ("n2",), b"", attempt=2)
    node.finish(job, Outcome.HOST_FAULT, "dead")
    assert ["requeuehold", "7"] in slurm.calls()
    assert "dead (held; when it is mended: scontrol update" in slurm.facts()["note"]


def test_a_job_that_must_not_be_requeued(node, slurm, capsys):
    slurm.facts(refuse=True)
    assert node.finish(JOB, Outcome.HOST_FAULT, "dead") == 0
    assert "disabled" in capsys.readouterr().err


def test_the_sites_own_note_on_a_node_stays(node, slurm):
    slurm.node(comment="rack 7")
    node.finish(JOB, Outcome.HOST_FAULT, "dead")
    node.mark(False, "ill")
    assert slurm.node()["comment"] == "rack 7"


def test_marking(node, slurm):
    step = Feature("vt", node._client)
    slurm.node(available="a,vt,b", active="a,vt")
    node.mark(False, "libvirt is dead")
    assert (slurm.node()["available"], slurm.node()["active"]) == ("a,b", "a")
    assert slurm.node()["comment"] == "vTorque: libvirt is dead"
    assert step.done(), "what doctor has taken away is not missing: it would never come back"
    node.mark(True, "")
    assert (slurm.node()["available"], slurm.node()["active"]) == ("a,b,vt", "a,vt")
    assert slurm.node()["comment"] == ""
    assert step.done()
    step.undo()
    assert not step.done()


def test_use_is_noted_in_slurmdbd_once_per_node(slurm, tmp_path):
    path = tmp_path / "slurm.conf"
    path.write_text("AccountingStorageType=accounting_storage/none\n")
    node = SlurmNode(Settings(bindir=str(slurm.bin), conf=str(path)), tmp_path, tmp_path)
    node.account("7", Usage(12.6, 300))
    assert not (tmp_path / "db").exists()
    path.write_text("AccountingStorageType=accounting_storage/slurmdbd\n")
    programs = {"sacct": f"cat {tmp_path}/db", "sacctmgr": f'echo "${{7#*=}}" > {tmp_path}/db'}
    for name, text in programs.items():
        (slurm.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (slurm.bin / name).chmod(0o755)
    (tmp_path / "db").write_text("the site's\n")
    for _ in range(2):
        node.account("7", Usage(12.6, 300))
    assert (tmp_path / "db").read_text() == "the site's; vTorque n1: cpu=13s mem=300M\n"


def test_an_element_of_an_array_is_named_apart_from_its_array():
    text = RECORD.format(**FACTS).replace("JobId=7 ", "JobId=7 ArrayJobId=7 ArrayTaskId=3 ")
    other = RECORD.format(**FACTS | {"id": "8"})
    assert element(other + text, "7") == "7_3"
    assert element(text, "7") == ""
    assert parse_job(text, "7").name == "7_3"


FORGED = [
    "x\n   JobState=PENDING Reason=None Dependency=(null)",
    "x\n   Requeue=1 Restarts=9 BatchFlag=1",
    "x\n     Nodes=n[1-2] CPU_IDs=0-63 Mem=0 GRES=",
    "x\n   OverSubscribe=NO Contiguous=0 Licenses=(null)",
    "x\n   ReqNodeList=(null) ExcNodeList=n1",
    "x\n\nJobId=7 JobName=y",
    # All of Slurm's own fields would be in the record of another job, which nobody looks at.
    "x\n   JobState=RUNNING Reason=x\n   Requeue=1 Restarts=0 BatchFlag=1\n"
    "   ReqNodeList=x ExcNodeList=(null)\n     Nodes=n1 CPU_IDs=0-63 Mem=999999\n"
    "   OverSubscribe=NO Contiguous=0\n\nJobId=1 JobName=y",
]


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("place", ["name", "comment"])
def test_a_users_text_forges_no_field(name, place):
    shown = RECORD.format(**FACTS | {place: name})
    with pytest.raises(Refused):
        parse_job(shown.replace(name, name + "\nx"), "7")
    with contextlib.suppress(Refused):  # a line that its end makes unlike Slurm's own
        assert parse_job(shown, "7") == parse_job(RECORD.format(**FACTS), "7")


@pytest.mark.parametrize("name", ["x\n5|5|root|R|1:00|n9|forged", "a|b", "", "\n"])
def test_a_jobs_name_is_no_row_of_another(slurm, name):
    (slurm.top / "7.job").touch()
    (slurm.top / "name").write_text(name)
    rows = list(SlurmSubmitter(Settings(bindir=str(slurm.bin)), Path("/shell")).jobs())
    assert [(r.id, r.owner, r.state, r.node) for r in rows] == [
        ("7", "ada", "R", "n1"), ("100007", "ada", "R", "n1"),
    ]  # fmt: skip
    assert all(row.name.isprintable() for row in rows)


@given(st.text(max_size=200))
def test_any_text_is_a_record_or_a_fault(text):
    for shown in (text, RECORD.format(**FACTS | {"name": text})):
        try:
            found = parse_job(shown, "7")
        except (HostFault, Refused):
            continue
        assert (found.restarts, found.cpus["n1"]) == (0, (0, 1))


def test_what_guests_see(node):
    items = list(node.context(JOB, [PeerGuest("vn1-0", 2), PeerGuest("vn1-1", 2)]))
    environ = {item.name: item.value for item in items if isinstance(item, EnvVar)}
    assert environ["SLURM_JOB_NODELIST"] == environ["SLURM_NODELIST"] == "vn1-0,vn1-1"
    assert (environ["SLURM_NNODES"], environ["SLURM_TASKS_PER_NODE"]) == ("2", "2(x2)")
    files = {item.path: item for item in items if isinstance(item, GuestFile)}
    assert files["/etc/vtorque/slurm/guests"].content == b"vn1-0 2\nvn1-1 2\n"
    assert files["/usr/bin/srun"].mode == files["/usr/bin/sbatch"].mode == 0o755


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7],m2", ["n1", "n2", "n3", "n7", "m2"]),
        ("a[08-11]b", ["a08b", "a09b", "a10b", "a11b"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert list(hostlist.expand(text)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "n[",
        "n[1-]",
        "n[2-1]",
        "n[1-999999999]",
        "n]1",
        "a,,b",
        "n[1-99999]m[1-99999]",
        "[0-99998,0-99998]",
    ],
)
def test_what_is_no_list_of_hosts(text):  # nor do they take memory: users write such
    with pytest.raises(ValueError, match=r"is not a|more than"):
        hostlist.expand(text)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_counts_are_read_as_they_are_shown(numbers):
    assert list(hostlist.counts(hostlist.show_counts(numbers))) == numbers


def test_cpu_ids_follow_the_sockets(tmp_path):
    """Hyper-threads are numbered after all cores by the kernel, beside their core by Slurm."""
    for number, (socket, core) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)] * 2):
        topology = tmp_path / f"cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
        (topology / "core_id").write_text(f"{core}\n")
    assert cpus.kernel_ids((0, 1), tmp_path) == (0, 4)
    assert cpus.kernel_ids((4, 5, 6, 7), tmp_path) == (2, 3, 6, 7)
    assert cpus.kernel_ids((8,), tmp_path) == ()
    assert cpus.kernel_ids((), tmp_path) == ()
    assert cpus.kernel_ids((0,), tmp_path / "none") == ()


def test_features_of_a_node():
    text = "   AvailableFeatures=a,b\n   ActiveFeatures=(null)\n"
    assert records.features(text) == (("a", "b"), ())
