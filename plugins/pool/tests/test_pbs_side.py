"""Torque and OpenPBS, with doubles of their commands that print observed or documented output."""

import dataclasses
import json
import os
import signal

import pytest

from directory_cloud import DirectoryDriver
from recorded_command import RecordedCommand
from vtorque_core.api import HostFault, Refused, take_lock
from vtorque_pool import rounds, serve
from vtorque_pool.machines import Machines
from vtorque_pool.pbs import Pbs, QueuedJob
from vtorque_pool.settings import MachineShape, Settings

TORQUE_NODES = b"""<Data><Node><name>n1</name><state>job-exclusive</state><np>2</np>
<jobs>0-1/12.server</jobs></Node><Node><name>n2</name><state>free,offline</state>
<note>vtorque-pool: idle</note></Node><Node><name>other</name><state>free</state></Node>
<Node><name>n3</name><state>down</state></Node></Data>"""
TORQUE_JOBS = b"""<Data><Job><Job_Id>12.server</Job_Id><job_state>R</job_state></Job>
<Job><Job_Id>13.server</Job_Id><job_state>Q</job_state><queue>batch</queue><Account_Name>acme</Account_Name>
<Resource_List><nodes>2:ppn=2:vtorque</nodes></Resource_List></Job>
<Job><Job_Id>14.server</Job_Id><job_state>H</job_state></Job>
<Job><Job_Id>15[].server</Job_Id><job_state>Q</job_state></Job></Data>"""
OFF = "offline</state><note>vtorque-pool: off</note>"
TORQUE_OFF = "".join(f"<Node><name>n{n}</name><state>{OFF}</Node>" for n in range(1, 5))
TORQUE_OFF = f"<Data>{TORQUE_OFF}</Data>".encode()
OPEN_NODES = json.dumps({"nodes": {
    "n1": {"state": "job-busy", "jobs": ["7.server/0", "7.server/1"]},
    "n2": {"state": "offline", "comment": "vtorque-pool: idle"},
    "n3": {"state": "state-unknown,down"},
}}).encode()  # fmt: skip
OPEN_JOBS = b"""Job Id: 8.server
    Job_Name = job
    job_state = Q
    queue = workq
    Account_Name = acme
    Resource_List.ncpus = 5
    Resource_List.select = 2:ncpus=2+1:ncpus=1
    Variable_List = X=0123,Y=\\q^A,\\n    queue = other

Job Id: 9.server
    job_state = R

Job Id: 10[].server
    job_state = Q

"""
TOOLS = ("pbsnodes", "qstat", "qmgr", "qrerun", "qalter")
FORGED = "x\n\nJob Id: 9999.server\n    job_state = Q\n    Resource_List.select = 100:ncpus=2\n\n"


class PbsServer:
    def __init__(self, top, batch):
        self.commands = {name: RecordedCommand(top / "bin" / name) for name in TOOLS}
        shape = MachineShape("small", "n[1-4]", "here", cpus=2, features=("vtorque",))
        self.settings = Settings(
            "test", (shape,), {"here": {"driver": "double"}}, batch=batch,
            bindir=str(top / "bin"), state=str(top / "state"),
        )  # fmt: skip
        self.pbs = Pbs(self.settings)
        (top / "cloud").mkdir()
        self.driver = DirectoryDriver(top / "cloud")
        self.said = []
        self.machines = Machines(self.settings, {"here": self.driver}, self.said.append)

    def answer(self, name, out):
        self.commands[name].say(out)

    def called(self, name):
        return self.commands[name].calls()


@pytest.mark.parametrize(
    ("batch", "nodes", "jobs", "job", "waiting"),
    [
        (
            "torque", TORQUE_NODES, TORQUE_JOBS, "12.server",
            QueuedJob("13.server", "batch", 2, 2, frozenset({"vtorque"}), "acme"),
        ),
        (
            "openpbs", OPEN_NODES, OPEN_JOBS, "7.server",
            QueuedJob("8.server", "workq", 3, 2, account="acme"),
        ),
    ],
)  # fmt: skip
def test_nodes_and_waiting_jobs_are_parsed(tmp_path, batch, nodes, jobs, job, waiting):
    server = PbsServer(tmp_path, batch)
    server.answer("pbsnodes", nodes)
    server.answer("qstat", jobs)
    found = server.pbs.nodes()
    states = {"n1": "busy", "n2": "draining", "n3": "unusable"}
    assert {name: each.state for name, each in found.items()} == states
    assert found["n1"].jobs == (job,)
    assert server.pbs.queued_jobs() == [waiting]


@pytest.mark.parametrize("batch", ["torque", "openpbs"])
def test_server_without_nodes_has_none(tmp_path, batch):
    server = PbsServer(tmp_path, batch)
    problem = "pbsnodes: Server has no node list MSG=node list is empty - check 'server_priv/nodes'"
    server.commands["pbsnodes"].say(err=problem, code=1)
    assert server.pbs.nodes() == {}


@pytest.mark.parametrize("batch", ["torque", "openpbs"])
def test_truncated_answer_is_a_host_fault(tmp_path, batch):
    server = PbsServer(tmp_path, batch)
    if batch == "torque":
        server.answer("qstat", TORQUE_JOBS[:-20])
        with pytest.raises(HostFault, match="truncated answer of the batch system"):
            server.pbs.queued_jobs()
    server.answer("pbsnodes", b'{"nodes": {"n1"' if batch == "openpbs" else b"<Data><Node>")
    with pytest.raises(HostFault, match="truncated answer of the batch system"):
        server.pbs.nodes()


def job_of(batch, number, asked, name="x"):
    if batch == "openpbs":
        return (
            f"Job Id: {number}.server\n    Job_Name = {name}\n    job_state = Q\n"
            f"    queue = batch\n    Resource_List.select = {asked}\n\n"
        )
    return (
        f"<Job><Job_Id>{number}.server</Job_Id><Job_Name>{name}</Job_Name><job_state>Q</job_state>"
        f"<queue>batch</queue><Resource_List><nodes>{asked}</nodes></Resource_List></Job>"
    )


@pytest.mark.parametrize("batch", ["torque", "openpbs"])
@pytest.mark.parametrize("name", ["\x01", "\x1b[2J&", "&nbsp;", "nan", '"\\q', "0123", "]]>"])
def test_job_name_does_not_hide_other_jobs(tmp_path, batch, name):
    server = PbsServer(tmp_path, batch)
    jobs = job_of(batch, 1, "1", name) + job_of(batch, 2, "2")
    server.answer("qstat", (jobs if batch == "openpbs" else f"<Data>{jobs}</Data>").encode())
    assert [(job.id, job.nodes) for job in server.pbs.queued_jobs()] == [
        ("1.server", 1),
        ("2.server", 2),
    ]


def test_job_text_is_not_read_as_another_job(tmp_path):
    """Output of OpenPBS 23.06.06 with -w, and without."""
    server = PbsServer(tmp_path, "openpbs")
    (tmp_path / "plain").write_text(job_of("openpbs", 7, "1", FORGED))
    (tmp_path / "wide").write_text(job_of("openpbs", 7, "1", FORGED.replace("\n", "\\n")))
    which = f'case " $* " in *" -w "*) cat {tmp_path}/wide ;; *) cat {tmp_path}/plain ;; esac'
    (tmp_path / "bin" / "qstat").write_text(f"#!/bin/sh\n{which}\n")
    assert [job.id for job in server.pbs.queued_jobs()] == ["7.server"]


@pytest.mark.parametrize("batch", ["torque", "openpbs"])
@pytest.mark.parametrize("asked", ["9" * 5000, "9999999", "1:{cpus}=9999999", "1:{cpus}=x"])
def test_only_the_unreadable_job_is_skipped(tmp_path, batch, asked):
    server = PbsServer(tmp_path, batch)
    asked = asked.format(cpus="ncpus" if batch == "openpbs" else "ppn")
    jobs = job_of(batch, 1, asked) + job_of(batch, 2, "2")
    server.answer("qstat", (jobs if batch == "openpbs" else f"<Data>{jobs}</Data>").encode())
    assert [job.id for job in server.pbs.queued_jobs()] == ["2.server"]


def test_failed_round_is_reported_and_the_service_continues(tmp_path, monkeypatch):
    server = PbsServer(tmp_path, "torque")
    rounds = iter([lambda: int("none"), lambda: os.kill(os.getpid(), signal.SIGTERM)])

    def one():
        next(rounds)()

    monkeypatch.setattr(serve, "make_round", lambda *_: one)
    settings = dataclasses.replace(server.settings, interval=0.01)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        serve.serve(settings, server.machines, server.pbs)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    told = [line for line in server.said if "a round has failed" in line]
    assert len(told) == 1 and 'ValueError("invalid literal' in told[0]
    assert next(rounds, None) is None


def test_round_creates_machines_and_then_their_nodes(tmp_path):
    server = PbsServer(tmp_path, "torque")
    server.answer("pbsnodes", TORQUE_OFF)
    server.answer("qstat", TORQUE_JOBS)
    assert serve.make_round(server.settings, server.machines, server.pbs)() == 2
    assert sorted(m.node for m in server.driver.machines("test")) == ["n1", "n2"]
    assert server.called("pbsnodes") == ["-x", "-x", "-c n1 -N n", "-c n2 -N n"]


def test_torque_knows_all_nodes_and_those_without_a_machine_are_down(tmp_path):
    """6.1.3 refuses a job that no known nodes could run, and pbs_sched deletes it."""
    server = PbsServer(tmp_path, "torque")
    server.answer("qstat", b"<Data/>")
    round_ = serve.make_round(server.settings, server.machines, server.pbs)
    assert round_() == 0
    made = [f'-c create node n{n} np=2,properties="vtorque"' for n in range(1, 5)]
    assert server.called("qmgr") == made
    server.called("pbsnodes")
    server.answer("pbsnodes", b"<Data><Node><name>n1</name><state>down</state></Node></Data>")
    round_()
    assert "-o n1 -N vtorque-pool: off" in server.called("pbsnodes")
    assert server.called("qmgr") == made[1:]
    server.answer("pbsnodes", TORQUE_OFF)
    assert round_() == 0
    assert server.pbs.nodes() == {}
    assert server.called("qmgr") == []


def test_node_refused_by_torque_does_not_stop_the_round(tmp_path):
    server = PbsServer(tmp_path, "torque")
    server.answer("qstat", b"<Data/>")
    server.commands["qmgr"].say(err="qmgr obj=n1: Unknown node", code=2)
    serve.make_round(server.settings, server.machines, server.pbs)()
    assert sum("unknown to Torque" in line for line in server.said) == 4


@pytest.mark.parametrize(
    ("batch", "features", "address", "has"),
    [
        ("torque", ("a", "b"), "", 'np=4,properties="a,b"'),
        ("torque", (), "10.0.0.1", "np=4"),
        ("openpbs", (), "", "resources_available.ncpus=4"),
        ("openpbs", ("a",), "10.0.0.1", "mom=10.0.0.1,resources_available.ncpus=4"),
    ],
)
def test_node_is_created_by_one_command(tmp_path, batch, features, address, has):
    """A kill between two commands would leave a node that no job finds."""
    server = PbsServer(tmp_path, batch)
    server.pbs.create("n1", 4, features, address)
    made, *rest = server.called("qmgr")
    assert made == f"-c create node n1 {has}"
    assert rest == (["-c set node n1 state = down"] if batch == "torque" else [])


def test_node_created_by_another_process_is_not_a_failure(tmp_path):
    server = PbsServer(tmp_path, "torque")
    server.settings = dataclasses.replace(server.settings, timeout=0.1, max_creating=1)
    server.machines = Machines(server.settings, {"here": server.driver}, server.said.append)
    server.answer("pbsnodes", TORQUE_OFF)
    server.answer("qstat", TORQUE_JOBS)
    lock = take_lock(server.machines.memory.directory / "nodes" / "n1", 0)
    try:
        serve.make_round(server.settings, server.machines, server.pbs)()
    finally:
        os.close(lock)
    assert server.machines.memory.read().failed == {}
    assert server.called("pbsnodes") == ["-x", "-x"]


def test_openpbs_node_is_set_offline_and_online_by_its_name(tmp_path):
    """pbsnodes -o of 23.06.06 prints "Unknown node" for a node whose mom is an address."""
    server = PbsServer(tmp_path, "openpbs")
    server.pbs.drain("n1", 'held: "odd" noise, it\'s hot')
    server.pbs.undrain("n1")
    note = "vtorque-pool: held: 'odd' noise, it's hot"
    assert server.called("qmgr") == [
        f'-c set node n1 state+=offline,comment="{note}"',
        '-c set node n1 state-=offline,comment=""',
    ]


def test_drained_node_is_deleted_before_its_machine_ends(tmp_path):
    server = PbsServer(tmp_path, "torque")
    server.machines.make(["n2"], "test")
    server.answer("pbsnodes", TORQUE_NODES)
    server.answer("qstat", b"<Data/>")
    serve.make_round(server.settings, server.machines, server.pbs)()
    assert "-o n2 -N vtorque-pool: off" in server.called("pbsnodes")
    assert server.driver.machines("test") == []
    assert server.called("qalter") == ["-r y 12.server"]  # n1 has no machine
    assert server.called("qrerun") == ["-f 12.server"]


@pytest.mark.parametrize(("first", "failures"), [("free", 0), ("down", 1)])
def test_node_that_was_up_and_goes_down_pauses_no_shape(tmp_path, first, failures):
    server = PbsServer(tmp_path, "torque")
    settings = dataclasses.replace(server.settings, boot_timeout=1e-9, delete_timeout=1e-9)
    round_ = serve.make_round(settings, server.machines, server.pbs)
    (made,) = server.machines.make(["n1"], "test").values()
    server.answer("qstat", b"<Data/>")
    for state in (first, "down", "down"):
        said = f"<Data><Node><name>n1</name><state>{state}</state></Node></Data>"
        server.answer("pbsnodes", said.encode())
        if server.driver.machines("test"):
            round_()
    assert server.driver.machines("test") == []
    assert server.machines.memory.read().shape_counters(made.shape).failures == failures


def test_nodes_that_miss_their_timeout_together_are_one_failure(tmp_path):
    server = PbsServer(tmp_path, "torque")
    settings = dataclasses.replace(server.settings, boot_timeout=1e-9, delete_timeout=1e-9)
    round_ = serve.make_round(settings, server.machines, server.pbs)
    server.machines.make(["n1", "n2", "n3"], "test")
    server.answer("qstat", b"<Data/>")
    down = "".join(f"<Node><name>n{n}</name><state>down</state></Node>" for n in (1, 2, 3))
    server.answer("pbsnodes", f"<Data>{down}</Data>".encode())
    round_()
    round_()
    assert server.driver.machines("test") == []
    assert server.machines.memory.read().shape_counters("small").failures == 1


def test_refused_delete_keeps_the_machine(tmp_path):
    """OpenPBS refuses if a job has started: no machine is ended under it."""
    server = PbsServer(tmp_path, "openpbs")
    server.machines.make(["n2"], "test")
    server.answer("pbsnodes", OPEN_NODES)
    server.answer("qstat", b"")
    server.commands["qmgr"].say(err="qmgr: Node is busy", code=1)
    serve.make_round(server.settings, server.machines, server.pbs)()
    assert [m.node for m in server.driver.machines("test")] == ["n2"]
    assert any("leave failed" in line for line in server.said)


@pytest.mark.parametrize("state", ["free", "free,offline"])
def test_node_with_a_new_job_is_kept(tmp_path, monkeypatch, state):
    """Torque would set the node offline, and lose its job."""
    server = PbsServer(tmp_path, "torque")
    server.machines.make(["n2"], "test")
    server.answer("pbsnodes", TORQUE_NODES)
    server.answer("qstat", b"<Data/>")
    held = server.machines.list_machines

    def found(*clouds):  # queried when the round begins, and when the node is locked
        if server.called("pbsnodes"):
            said = TORQUE_NODES.replace(b"free,offline</state>", f"{state}</state>".encode())
            server.answer("pbsnodes", said.replace(b"<note>", b"<jobs>0/7.server</jobs><note>"))
        return held(*clouds)

    monkeypatch.setattr(server.machines, "list_machines", found)
    serve.make_round(server.settings, server.machines, server.pbs)()
    assert [m.node for m in server.driver.machines("test")] == ["n2"]
    assert "-o n2 -N vtorque-pool: off" not in server.called("pbsnodes")
    assert any("n2: not deleted:" in line for line in server.said)


@pytest.mark.parametrize("runs", [serve.serve, serve.tidy])
def test_only_one_process_runs_rounds(tmp_path, runs):
    server = PbsServer(tmp_path, "torque")
    lock = take_lock(server.machines.memory.directory / "serve.lock", 0)
    try:
        with pytest.raises(Refused, match="is already running"):
            runs(server.settings, server.machines, server.pbs)
    finally:
        os.close(lock)


@pytest.mark.parametrize(
    ("batch", "asked"), [("torque", "node07:ppn=2"), ("openpbs", "1:ncpus=2:host=node07")]
)
def test_job_waiting_for_a_named_node_creates_no_machine(tmp_path, batch, asked):
    server = PbsServer(tmp_path, batch)
    said = job_of(batch, 7, asked)
    server.answer("qstat", (said if batch == "openpbs" else f"<Data>{said}</Data>").encode())
    shapes = server.settings.shapes
    assert not [job for job in server.pbs.queued_jobs() if rounds._can_run(job, shapes[0])]
