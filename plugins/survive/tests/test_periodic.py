"""Periodic checkpoints: times, kept checkpoints, and refused values."""

import dataclasses
import os
from types import SimpleNamespace

import pytest

import running_journal
from finished import finish, saved_guest
from vtorque_core.live.jobs import RunningJobs
from vtorque_survive import periodic
from vtorque_survive.resume_options import CHECKPOINT
from vtorque_survive.settings import Settings
from vtorque_survive.stored import OVER, Manifest, Store

GUEST = saved_guest("0b1ad9ba")
STARTED = 1_000_000.0


@pytest.fixture
def paths(tmp_path):
    return running_journal.paths_below(tmp_path)


@pytest.fixture
def fake_clock(monkeypatch):
    clock = SimpleNamespace(time=STARTED)
    monkeypatch.setattr(periodic.time, "time", lambda: clock.time)
    return clock


def running(paths, wanted, begun=0.0, **facts):
    """Return a running job with checkpoint=``wanted``, whose script began ``begun`` s later."""
    job = running_journal.JournalledJob(paths)
    job.kept.add_facts(started=STARTED, **facts)
    paths.job_state(job.key).mkdir(parents=True)
    file = periodic._file(paths, job.key)
    if wanted:
        file.write_text(str(CHECKPOINT.parse(wanted)))
        os.utime(file, (STARTED, STARTED))
    (found,) = RunningJobs(paths).jobs()
    return dataclasses.replace(found, phases=(("boot", STARTED), ("run", STARTED + begun)))


def at(now, job, paths, seconds, **settings):
    now.time = STARTED + seconds
    return periodic.is_due(paths, job, Settings(**settings))


def test_every_counts_from_the_start_and_from_the_last_checkpoint(paths, fake_clock):
    job = running(paths, "every:1h")
    assert at(fake_clock, job, paths, 3599) is None
    assert at(fake_clock, job, paths, 3600) is False, "no checkpoint is due, or the job would end"
    os.utime(periodic._file(paths, job.job.key), (STARTED + 3650, STARTED + 3650))
    assert at(fake_clock, job, paths, 7200) is None, (
        "the interval does not begin at the last checkpoint"
    )
    assert at(fake_clock, job, paths, 7250) is False
    assert at(fake_clock, job, paths, 7250, min_checkpoint_interval=7200.0) is None, (
        "the site's new minimum interval is ignored"
    )


def test_before_walltime_is_due_once_per_interval(paths, fake_clock):
    job = running(paths, "before-walltime", walltime="02:00:00")
    assert at(fake_clock, job, paths, 6899) is None
    assert at(fake_clock, job, paths, 6900) is True
    assert at(fake_clock, job, paths, 6500, checkpoint_before_end=700.0) is True
    os.utime(periodic._file(paths, job.job.key), (STARTED + 6900, STARTED + 6900))
    assert at(fake_clock, job, paths, 6959) is None, "due again within a minute of the last attempt"
    assert at(fake_clock, job, paths, 6960) is True, "not due again before the walltime ends"


def test_short_walltime_leaves_half_for_work(paths, fake_clock):
    job = running(paths, "before-walltime", walltime="60")
    assert at(fake_clock, job, paths, 29) is None and at(fake_clock, job, paths, 30) is True


def test_long_boot_leaves_the_script_half_of_the_rest(paths, fake_clock):
    job = running(paths, "before-walltime", begun=40.0, walltime="60")
    assert at(fake_clock, job, paths, 49) is None and at(fake_clock, job, paths, 50) is True


@pytest.mark.parametrize("walltime", [{}, {"walltime": ""}, {"walltime": "UNLIMITED"}])
def test_before_walltime_without_a_walltime_is_never_due(paths, fake_clock, walltime):
    job = running(paths, "before-walltime", **walltime)
    assert at(fake_clock, job, paths, 1e9) is None


def test_job_without_the_option_is_never_due(paths, fake_clock):
    assert at(fake_clock, running(paths, ""), paths, 1e9) is None


def test_only_the_last_checkpoints_of_a_job_are_kept(paths, tmp_path):
    job, top = running(paths, "every:1h"), tmp_path / "checkpoints"
    top.mkdir(mode=0o700)
    store = Store(top, os.getuid())
    for made, name in enumerate(("41.srv.0-3", "42.srv.0-3", "42.srv.1-9", "42.srv.2-11")):
        store.make(name)
        id_ = name.split(".")[0] + ".srv"
        finish(store, Manifest(name, store.uid, "ada", "n1", made, "m", "ab", {}, (GUEST,), id_))
    periodic.trim(paths, job, store, 2)
    kept = ["41.srv.0-3", "42.srv.1-9", "42.srv.2-11"]
    assert [each.id for each in store.manifests()] == kept, (
        "not the last two of all attempts are kept"
    )
    store.disown("42.srv")
    periodic.trim(paths, job, store, 1)
    assert len(list(store.manifests())) == 3, (
        "a checkpoint of an earlier job with this id was removed"
    )
    (store.directory / "42.srv.2-11" / OVER).unlink()
    periodic._file(paths, job.job.key).unlink()
    periodic.trim(paths, job, store, 1)
    assert len(list(store.manifests())) == 3, (
        "a checkpoint of a job without checkpoint= was removed"
    )


@pytest.mark.parametrize("text", ["1h", "every:", "every:1y", "always"])
def test_invalid_time_is_refused(text):
    with pytest.raises(ValueError, match=r"is invalid|is not a"):
        CHECKPOINT.parse(text)
