"""A job's lock, its journal and its phase, as a plugin's processes use them."""

from __future__ import annotations

import os

import pytest

import running_journal
from vtorque_core.base.locks import Busy, take_lock
from vtorque_core.base.names import Paths
from vtorque_core.live import locked_job as module
from vtorque_core.live.locked_job import journal_of, locked_job
from vtorque_core.records.journal import Journal

JOB = "42.srv"


@pytest.fixture
def paths(tmp_path):
    return Paths(tmp_path / "state", tmp_path / "run")


@pytest.fixture
def job(paths):
    return running_journal.JournalledJob(paths, JOB)


def phases(job):
    return [mark.name for mark in journal_of(job.paths, job.key).phases]


def test_locked_job_without_a_journal_yields_none(paths):
    with locked_job(paths, f"{JOB}.0") as locked:
        assert locked is None


def test_locked_job_held_by_another_process_raises_busy(paths, job, monkeypatch):
    monkeypatch.setattr(module, "WAIT", 0.0)
    lock = take_lock(paths.job_lock(JOB), 0.0)
    try:
        with pytest.raises(Busy, match="is held by another process"), locked_job(paths, job.key):
            pass
    finally:
        os.close(lock)


def test_enter_records_a_phase_once(paths, job):
    before = phases(job)
    with locked_job(paths, job.key) as locked:
        assert locked.enter("moves") is True
        assert locked.enter("moves") is False
        assert locked.enter("run") is True  # the journal counts, not the state at the start
    assert phases(job) == [*before, "moves", "run"]


def test_domains_of_all_records_are_listed(paths, job):
    with locked_job(paths, job.key) as locked:
        (uuid,) = locked.domains
        with Journal.open(paths, locked.state.path) as journal:
            (record,) = [each for each in locked.state.open if each.kind == "domain"]
            journal.released(record.seq)
    with locked_job(paths, job.key) as locked:
        assert locked.domains == {uuid: True}
