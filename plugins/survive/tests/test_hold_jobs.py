"""Save and requeue of a held job, with real processes, logs and checkpoint directories.

The batch system and vmgr are doubles.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import running_journal
from patience import eventually
from vtorque_core.api import HostFault
from vtorque_core.api.batch_system import JobState
from vtorque_survive import drain, hold_jobs, watcher
from vtorque_survive.hold_jobs import HoldWatcher
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Store

SAVED = "42.srv.0-7"


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Return a node with a running job, and the actions on it."""
    paths, did = running_journal.paths_below(tmp_path), tmp_path / "did"
    did.touch()
    store = Store(tmp_path / "checkpoints", os.getuid())
    (store.directory / SAVED).mkdir(parents=True)
    vmgr = tmp_path / "vmgr"
    vmgr.write_text(
        f'#!/bin/sh\necho "$@" >> {did}\n'
        f"[ -e {tmp_path}/no-room ] && {{ echo vmgr: no room >&2; exit 122; }}\necho {SAVED}\n"
    )
    vmgr.chmod(0o755)
    monkeypatch.setattr(drain.service, "vmgr", lambda _, *words: [str(vmgr), *words])

    def requeue_here(job_id):
        if (tmp_path / "no-rerun").exists():
            raise HostFault("qrerun: Job is not rerunable")
        with did.open("a") as file:
            file.write(f"requeue {job_id}\n")

    its = SimpleNamespace(
        alive_and_held=lambda ids: (dict.fromkeys(ids, JobState.ALIVE), {"42.srv"}),
        requeue_here=requeue_here,
    )
    site = {Settings: Settings(checkpoints=str(store.top))}
    site = type("Site", (dict,), {"paths": paths})(site)
    batch = SimpleNamespace(node=lambda _site: its)
    monkeypatch.setattr(hold_jobs.service, "batch_system", lambda _config: (site, batch))
    job = running_journal.JournalledJob(paths, "42.srv")
    job.kept.add_facts(nodes=["n1"])
    found = SimpleNamespace(
        paths=paths, job=job, store=store, fails=lambda w: (tmp_path / w).touch()
    )
    found.did = lambda: did.read_text().splitlines()
    found.holds = HoldWatcher(Path("/etc/x"))
    found.running = watcher.RunningJobs(paths)
    return found


def await_idle(node, *held_ids):
    """Run the watcher until nothing is in progress."""
    jobs = node.running.jobs()
    eventually(lambda: node.holds.poll(jobs, held_ids) or not any(node.holds._begun.values()))


def logged(node):
    return node.job.kept.read("log.jsonl").decode()


def test_held_job_is_saved_and_then_requeued_once(node):
    await_idle(node)
    assert node.did() == []
    for _ in range(2):
        await_idle(node, "42.srv")
    assert node.did() == ["checkpoint --this-node -- 42.srv", "requeue 42.srv"]
    assert node.store.is_held(SAVED)
    assert f"saved as checkpoint {SAVED}, and requeued" in logged(node)
    await_idle(node)
    await_idle(node, "42.srv")
    assert len(node.did()) == 4, "the job was not saved and requeued after the second hold"


@pytest.mark.parametrize(
    ("failure", "message"),
    [("no-room", "not saved: no room"), ("no-rerun", "not requeued: qrerun: Job is not")],
)
def test_failed_save_or_requeue_is_logged_and_the_job_continues(node, failure, message):
    node.fails(failure)
    await_idle(node, "42.srv")
    assert "requeue 42.srv" not in node.did()
    assert "held by the batch system, but not requeued, and still running: " in logged(node)
    assert message in logged(node)
    await_idle(node, "42.srv")
    assert len(node.did()) == 1, "the failed save was repeated"
    assert not node.store.is_held(SAVED), "a later start would restore the failed checkpoint"


def test_job_that_would_start_from_the_beginning_is_not_requeued(node):
    node.job.kept.add_facts(begins_again=True)
    await_idle(node, "42.srv")
    assert node.did() == [] and "from the beginning (resume=none)" in logged(node)


def test_batch_system_is_queried_once_for_life_and_holds(node):
    batch = watcher.BatchView(Path("/etc/x"), 0.0)
    eventually(lambda: batch.known_states(["42.srv", "43.srv"], soon=True))
    assert batch.known_states(["42.srv", "43.srv"], soon=False)["43.srv"] is JobState.ALIVE
    assert batch.held == {"42.srv"}
    batch.known_states([], soon=False)
    batch.known_states(["42.srv"], soon=False)
    assert batch.held == set(), "the hold of the last attempt applies to the new one"
