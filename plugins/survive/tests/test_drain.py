"""Handling of a drained node's jobs, with real journals, logs and processes; the batch system and
vmgr are doubles. With a real Slurm: tests/e2e/slurm/test_slurm_checkpoint.py.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import running_journal
from vtorque_core.api import HostFault, Refused, take_lock
from vtorque_survive import drain, drain_command, periodic
from vtorque_survive.drain import LEFT, MOVED, REQUEUED, Drain, DrainResult, LastDrain
from vtorque_survive.resume_options import CHECKPOINT, NEVER, RESUME
from vtorque_survive.settings import Settings

VMGR = """#!/bin/sh
echo "$@" >> {did}
[ -e {top}/$1-$3 ] && {{ echo "vmgr: $(cat {top}/$1-$3)" >&2; exit 122; }}
case $1 in checkpoint) echo "$4.0-7" ;; esac
exit 0
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Return a node with doubles: their actions, in order, and the actions they have to refuse."""
    did = tmp_path / "did"
    did.touch()
    paths = running_journal.paths_below(tmp_path)
    program = tmp_path / "vmgr"
    program.write_text(VMGR.format(did=did, top=tmp_path))
    program.chmod(0o755)
    monkeypatch.setattr(drain.service, "vmgr", lambda _, *words: [str(program), *words])
    found = SimpleNamespace(refuses={}, paths=paths, did=lambda: did.read_text().splitlines())

    def note(what, *words):
        if what in found.refuses:
            raise found.refuses[what]
        with did.open("a") as file:
            file.write(" ".join((what, *words)) + "\n")

    found.others = {}
    found.batch = SimpleNamespace(
        drain=lambda reason: note("drain", reason), requeue=lambda job: note("requeue", job),
        drained=lambda: ("n1", found.others), undrain=lambda: note("undrain"),
    )  # fmt: skip
    place = tmp_path / "checkpoints"
    place.mkdir()
    monkeypatch.setattr(
        drain.CheckpointWatcher, "refusal", lambda _self, _job, ends: found.refuses.get("why", "")
    )
    found.settings = {"checkpoints": str(place), "checkpoints_shared": True}
    found.fails = lambda what, why: (tmp_path / what).write_text(why)
    return found


def of(node, reason="its disk is slow", *, in_turn=False, **more):
    settings = Settings(**node.settings, **more)
    return Drain(Path("/etc/x"), node.paths, node.batch, settings, reason, in_turn)


def started(node, job_id="42.srv", asked="3600", **facts):
    """Start a job that has requested checkpoints, unless ``asked`` is empty."""
    job = running_journal.JournalledJob(node.paths, job_id)
    job.kept.add_facts(nodes=["n1"], unsaveable=[], **facts)
    state = node.paths.job_state(job.key)
    state.mkdir(parents=True)
    if asked:
        (state / "checkpoint-plan").write_text(asked)
    return job


def logged(job):
    return job.kept.read("log.jsonl").decode()


def test_drained_job_is_saved_then_requeued_and_another_is_left_running(node):
    jobs = [started(node), started(node, "43.srv", asked="")]
    first, second = of(node).run()
    assert first == DrainResult("42.srv", "ada", REQUEUED, "saved as checkpoint 42.srv.0-7")
    assert (second.job, second.done) == (
        "43.srv",
        LEFT,
    ) and "does not request checkpoints" in second.why
    assert node.did() == [
        "drain its disk is slow",
        "checkpoint --this-node -- 42.srv",
        "requeue 42.srv",
    ]
    assert "drained (its disk is slow); the job is requeued: saved as" in logged(jobs[0])
    assert "; the job is left running: the job does not request checkpoints" in logged(jobs[1])
    assert LastDrain.read(node.paths).left == ("43.srv",) and LastDrain.read(node.paths).at > 0


def test_spare_nodes_are_tried_in_their_order(node):
    started(node)
    node.fails("migrate-n3", "n3 has no room")
    (done,) = of(node, spare_nodes=("n3", "n4")).run()
    assert done == DrainResult("42.srv", "ada", MOVED, "to n4")
    assert node.did()[1:] == ["migrate --to n3 -- 42.srv", "migrate --to n4 -- 42.srv"]


def test_job_that_cannot_be_migrated_is_requeued_or_left_with_all_reasons(node):
    started(node)
    started(node, "43.srv", asked="")
    node.fails("migrate-n3", "n3 has no room")
    first, second = of(node, spare_nodes=("n3",)).run()
    assert (first.done, second.done) == (REQUEUED, LEFT)
    assert second.why.startswith("not migrated to n3: n3 has no room; the job does not request")


@pytest.mark.parametrize("error", [HostFault("no server"), Refused("knows no such thing")])
def test_drain_refused_by_the_batch_system_changes_nothing(node, error):
    started(node)
    node.refuses["drain"] = error
    with pytest.raises(type(error)):
        list(of(node, spare_nodes=("n3",)).run())
    assert node.did() == []
    assert LastDrain.read(node.paths) == LastDrain()


def test_unhealthy_node_is_drained_only_below_max_drained_nodes(node):
    started(node)
    node.others = {"n2": "x", "n3": "x"}
    with pytest.raises(Refused, match="2 other nodes"):
        list(of(node, in_turn=True).run())
    assert node.did() == [] and LastDrain.read(node.paths) == LastDrain()
    (done,) = of(node, in_turn=True, max_drained_nodes=3).run()
    assert done.done == REQUEUED
    assert node.did()[:2] == [
        "drain requests a drain: its disk is slow",
        "drain its disk is slow",
    ]


def test_job_whose_checkpoint_failed_is_not_requeued(node):
    started(node)
    node.fails("checkpoint---", "no room")
    (done,) = of(node).run()
    assert (done.done, done.why) == (LEFT, "not saved: no room")
    assert node.did()[1:] == ["checkpoint --this-node -- 42.srv"]


def test_job_whose_requeue_failed_continues(node):
    job = started(node)
    node.refuses["requeue"] = HostFault("scontrol: Requested operation is presently disabled")
    (done,) = of(node).run()
    assert done.done == LEFT
    assert "saved as checkpoint 42.srv.0-7, but not requeued: scontrol: Req" in done.why
    assert "presently disabled" in logged(job)


def test_job_that_would_start_from_the_beginning_is_not_requeued(node):
    """The job has resume=none, or no other node can read its checkpoints."""
    started(node, begins_again=True)
    (done,) = of(node).run()
    assert done.done == LEFT and "resume=none" in done.why
    node.settings["checkpoints_shared"] = False
    started(node, "43.srv")
    assert "only be restored on this node" in list(of(node).run())[1].why
    assert not [line for line in node.did() if not line.startswith("drain")]


def test_job_whose_guests_are_ending_is_skipped(node):
    job = started(node)
    job.journal.phase("teardown")
    (done,) = of(node, spare_nodes=("n3",)).run()
    assert (done.done, done.why) == (LEFT, "its guests are starting or ending")


def test_dry_run_changes_nothing(node):
    started(node)
    started(node, "43.srv", asked="")
    first, second = of(node).plan()
    assert (first.done, second.done) == (REQUEUED, LEFT)
    on_two = started(node, "44.srv", asked="")
    on_two.kept.add_facts(node="n2", nodes=["n1", "n2"], immovable=[])
    first, second, third = of(node, spare_nodes=("n1", "n3"), remote_command="ssh {node}").plan()
    assert (first.done, first.why) == (REQUEUED, "saved first")
    assert (second.done, third.done) == (LEFT, LEFT)
    assert "moved" not in second.why
    assert third.why.endswith("(resume=none), unless it can be migrated to n3")
    assert node.did() == []


def test_job_whose_command_cannot_run_does_not_stop_others(node, monkeypatch):
    for number in ("41", "42", "43"):
        started(node, f"{number}.srv")
    called = drain.service.vmgr

    def vmgr(config, *words):
        return ["/nonexistent/vmgr"] if words[-1] == "42.srv" else called(config, *words)

    monkeypatch.setattr(drain.service, "vmgr", vmgr)
    done = list(of(node, spare_nodes=("n3",)).run())
    assert [each.done for each in done] == [MOVED, LEFT, MOVED]
    assert "No such file" in done[1].why
    assert LastDrain.read(node.paths).left == ("42.srv",)


def test_concurrent_drains_are_refused(node):
    lock = take_lock(node.paths.run / "survive-drain.lock", 0.0)
    try:
        with pytest.raises(HostFault, match="held by another process"):
            list(of(node).run())
    finally:
        os.close(lock)
    assert node.did() == []


@pytest.mark.parametrize("every", [3600, NEVER])
def test_resume_none_is_recorded_at_the_start(node, every):
    job = running_journal.JournalledJob(node.paths)
    first = SimpleNamespace(
        request={CHECKPOINT: every, RESUME: "none"},
        job=SimpleNamespace(key=job.key, id=job.id, uid=job.uid, attempt=0),
    )
    start = SimpleNamespace(guests=[first], site=SimpleNamespace(paths=node.paths))
    start.acquire = start.warn = lambda *_: None
    periodic.plan(start)
    assert job.kept.facts()["begins_again"] is True


@pytest.mark.root
@pytest.mark.parametrize(("left", "code"), [(False, 0), (True, 1)])
def test_drain_command_prints_results(node, monkeypatch, left, code):
    started(node, asked="" if left else "3600")
    monkeypatch.setattr(drain_command.os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        drain_command.Drain, "from_config", lambda _config, reason, **_: of(node, reason)
    )
    called = CliRunner().invoke(drain_command.drain, ["n1", "--reason", "test"])
    assert called.exit_code == code
    what = "left running: the job does" if left else "requeued: saved as"
    assert called.output.startswith(f"42.srv (ada): {what}")
    called = CliRunner().invoke(drain_command.drain, ["n1", "--dry-run", "--json"])
    assert json.loads(called.output)[0]["job"] == "42.srv"
    called = CliRunner().invoke(drain_command.drain, ["n2"])
    assert isinstance(called.exception, Refused)
    assert "ssh n2 vtorque drain n2" in str(called.exception)
    monkeypatch.setattr(drain_command.os, "geteuid", lambda: 1000)
    assert CliRunner().invoke(drain_command.drain, ["n1"]).exit_code != 0
    assert node.did()[0] == "drain test"
