"""Placeholder jobs of root that hold nodes for guests of other jobs, with doubles of commands."""

import os
import pwd

import pytest

from vtorque_core.api import HostFault, Refused
from vtorque_core.api.batch_system import MigrationAdapter
from vtorque_slurm import placeholder_job
from vtorque_slurm.batch_commands import SlurmClient
from vtorque_slurm.node import SlurmNode
from vtorque_slurm.settings import Settings

ME = pwd.getpwuid(os.getuid()).pw_name
SHOWN = """JobId={id} {array}JobName=x
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:10 TimeLimit=01:00:00 TimeMin=N/A
   JobState={state} Reason=None Dependency=(null)
   ReqNodeList=n[1-2] ExcNodeList=(null)
   OverSubscribe={sharing} Contiguous=0 Licenses=(null)
{shares}"""


class SlurmState:
    """The state of Slurm: the job 7 on n1 and n2, and placeholders."""

    def __init__(self):
        self.restarts, self.state, self.sharing, self.gres = 0, "RUNNING", "OK", ""
        self.held_is = "R"
        self.nodes, self.held, self.room, self.did = ["n1", "n2"], {}, True, []
        self.texts, self.array = {"comment": "mine vt1:AAAA", "account": "chem"}, ""

    def run(self, name, *words):
        if name in ("sbatch", "scancel") or words[:1] == ("update",):
            self.did.append([name, *words])
        found = getattr(self, name)(*words)
        return found if found.endswith("\n") or not found else f"{found}\n"

    def sbatch(self, *words):
        given = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        self.held[given["job-name"]] = (str(20 + len(self.held)), given)
        return self.held[given["job-name"]][0]

    def scancel(self, _user, name):
        self.held.pop(name.removeprefix("--name="), None)
        return ""

    def squeue(self, *words):
        if "--user=root" in words:
            named = next(word for word in words if word.startswith("--name="))
            states = next(word for word in words if word.startswith("--states="))
            if self.held_is not in states.removeprefix("--states=").split(","):
                return ""
            return self.held.get(named.removeprefix("--name="), ("",))[0]
        if words[-1].startswith("--Format="):
            assert "--jobs=7" in words, "the query is not limited to one job"
            return self.texts[words[-1].removeprefix("--Format=").removesuffix(":2000")].ljust(2000)
        fields = {"%u|%U|%P|%L": f"{ME}|{os.getuid()}|main|59:50",
                  "%N": f"n[{','.join(n[1:] for n in self.nodes)}]", "%T": self.state}  # fmt: skip
        form = words[-1].removeprefix("--format=%A|")
        return f"70|other\n7|{fields[form]}" if self.state else ""

    def scontrol(self, verb, *words):
        if verb == "update":
            if words[0] in ("JobId=7", "JobId=7_1"):
                self.nodes = words[1].removeprefix("NodeList=").split(",")
            return ""
        number = words[-1]
        shares = [(node, "0-1") for node in self.nodes]
        for held, given in self.held.values():
            if held == number:
                shares = [(given["nodelist"], "2-3")]
        state = ("RUNNING" if self.room else "PENDING") if number != "7" else self.state
        lines = [f"     Nodes={n} CPU_IDs={c} Mem=512 GRES={self.gres}" for n, c in shares]
        said = {"id": number, "array": self.array, "restarts": self.restarts, "state": state}
        return SHOWN.format(**said, sharing=self.sharing, shares="\n".join(lines))


@pytest.fixture
def slurm(monkeypatch):
    made = SlurmState()
    monkeypatch.setattr(SlurmClient, "run", made.run)
    monkeypatch.setattr(placeholder_job.controller_updates, "this_node", lambda _: "n3")
    monkeypatch.setattr(placeholder_job, "_POLL", 0.0)
    monkeypatch.setattr(placeholder_job.cpus, "kernel_ids", tuple)
    return made


@pytest.fixture
def adapter(tmp_path):
    return SlurmNode(Settings(), tmp_path, tmp_path)


def test_placeholder_job_holds_the_resources_of_the_job(slurm, adapter):
    assert isinstance(adapter, MigrationAdapter)
    job = adapter.reserve_node("7", ("n1", "n3"), "n2", "n3")
    assert (job.id, job.owner, job.node, job.nodes) == ("7", ME, "n3", ("n1", "n3"))
    assert (job.cpus, job.cpu_count, job.mem_mib, job.node_index) == ((2, 3), 2, 512, 1)
    assert (job.partition, job.account, job.blob) == ("main", "chem", b"\0\0")
    ((_, *words),) = slurm.did
    assert {"--job-name=vtorque-7-n3", "--nodelist=n3", "--cpus-per-task=2", "--mem=512M",
            "--time=59:50", "--partition=main", "--no-requeue"} <= set(words)  # fmt: skip
    assert not any("vt1:" in word for word in words), "the placeholder job has a VM request"
    adapter.reserve_node("7", ("n1", "n3"), "n2", "n3")
    assert len(slurm.did) == 1, "a second placeholder job was submitted"
    slurm.held_is = "S"
    adapter.reserve_node("7", ("n1", "n3"), "n2", "n3")
    assert len(slurm.did) == 1, (
        "a second placeholder job was submitted while the first one is suspended"
    )


def test_job_of_slurms_own_commands_is_not_migrated(slurm, adapter):
    slurm.texts["comment"] = "mine"
    with pytest.raises(Refused, match="use vsub to submit jobs that may be migrated"):
        adapter.reserve_node("7", ("n1", "n3"), "n2", "n3")
    assert slurm.did == []


def test_resources_on_a_held_node_are_found(slurm, adapter, monkeypatch):
    adapter.reserve_node("7", ("n1", "n3"), "n2", "n3")
    adapter.remove_node("7", "n2")
    assert slurm.nodes == ["n1"]
    monkeypatch.setattr(placeholder_job.controller_updates, "this_node", lambda _: "n2")
    assert adapter.reserve_node("7", ("n1", "n2"), "n3", "n2").cpus == (2, 3)
    adapter.release_node("7", "n3")
    adapter.remove_node("7", "n3")
    assert [*slurm.held] == ["vtorque-7-n2"] and slurm.nodes == ["n1"]


def test_exclusive_node_is_held_exclusively(slurm, adapter):
    slurm.sharing = "NO"
    assert adapter.reserve_node("7", ("n1", "n3"), "n2", "n3").whole_node
    assert "--exclusive" in slurm.did[0]


def test_node_that_cannot_be_held_is_refused(slurm, adapter, monkeypatch):
    with pytest.raises(Refused, match="has no resources on n9"):
        adapter.reserve_node("7", ("n1", "n3"), "n9", "n3")
    slurm.gres = "gpu:1(IDX:0)"
    with pytest.raises(Refused, match="generic resources"):
        adapter.reserve_node("7", ("n1", "n3"), "n2", "n3")
    with pytest.raises(Refused, match="reached n3"):
        adapter.reserve_node("7", ("n1", "n4"), "n2", "n4")
    slurm.gres, slurm.room = "", False
    monkeypatch.setattr(placeholder_job, "_WAIT", 0.0)
    with pytest.raises(
        Refused,
        match="n3 has no free resources for the job's guests: the job that would reserve",
    ):
        adapter.reserve_node("7", ("n1", "n3"), "n2", "n3")
    adapter.release_node("7", "n3")
    assert slurm.held == {}


def test_ended_attempt_is_detected(slurm, adapter):
    assert not adapter.has_ended("7", 0)
    slurm.restarts = 1
    assert adapter.has_ended("7", 0) and not adapter.has_ended("7", 1)
    slurm.state = "PENDING"
    assert adapter.has_ended("7", 1)
    for state in ("COMPLETING", ""):
        slurm.state = state
        assert adapter.has_ended("7", 1)


def test_held_node_is_detected(slurm, adapter):
    assert not adapter.is_reserved("7", "n3")
    adapter.reserve_node("7", ("n1", "n3"), "n2", "n3")
    assert adapter.is_reserved("7", "n3") and not adapter.is_reserved("7", "n2")


def test_invalid_row_of_squeue_is_a_host_fault(slurm, adapter, monkeypatch):
    monkeypatch.setattr(slurm, "squeue", lambda *_: "7|RUNNING|and more")
    with pytest.raises(HostFault, match="output of squeue"):
        adapter.has_ended("7", 0)


def test_account_with_line_ends_does_not_change_the_owner(slurm, adapter):
    slurm.texts["account"] = "x\n7|daemon|1|main"
    assert adapter.reserve_node("7", ("n1", "n3"), "n2", "n3").owner == ME


def test_only_one_array_task_leaves_a_node(slurm, adapter):
    slurm.array = "ArrayJobId=7 ArrayTaskId=1 "
    adapter.remove_node("7", "n2")
    assert slurm.did == [["scontrol", "update", "JobId=7_1", "NodeList=n1"]]
