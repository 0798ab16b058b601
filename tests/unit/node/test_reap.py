"""The reaper releases jobs that the batch system no longer knows, and no others."""

import dataclasses
import errno
import json
import os
import time
import types

import pytest
from click.testing import CliRunner

import processes
from acme_card import AcmeCard, in_other_process, loaded
from patience import eventually
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.job_files import File
from vtorque_core.base import trust
from vtorque_core.base.errors import UsageError
from vtorque_core.base.locks import job_lock
from vtorque_core.base.names import JobAttempt
from vtorque_core.cli.reap import reap as command
from vtorque_core.config import site_config, site_file
from vtorque_core.config.plugins import Plugins
from vtorque_core.node.end import reap as reap_module
from vtorque_core.node.end import teardown
from vtorque_core.node.end.reap import reap, reap_until_clean
from vtorque_core.node.end.teardown import release_job
from vtorque_core.records.reading import JobHeader, journals


def reaped(paths, lives, batch="local", **more):
    site = dataclasses.replace(site_config.Site(), paths=paths)
    site = dataclasses.replace(site, batch=dataclasses.replace(site.batch, system=batch))
    results = reap(site, lambda ids: lives, lambda _: loaded(), **more)
    return {(r.job, r.attempt): r for r in results}


@pytest.mark.parametrize(
    ("ending", "wanted"),
    [(("telemetry",), {"telemetry", "linux-guest"}), (None, {"telemetry", "linux-guest", "snap"})],
)
def test_only_plugins_that_a_teardown_needs_are_loaded(monkeypatch, ending, wanted):
    plugins = dict.fromkeys(("linux-guest", "snap", "telemetry"), "1.0")
    header = JobHeader(JobAttempt("1", 0, "u", 1), "local", plugins, ending=ending)
    assert JobHeader.line(header)["ending"] == ending
    open_records = [types.SimpleNamespace(plugin=name) for name in ("core", "linux-guest")]
    monkeypatch.setattr(Plugins, "load", lambda *, node, only: (node, only))
    state = types.SimpleNamespace(header=header, open=open_records)
    assert reap_module.plugins_of(state) == (True, wanted)


def test_plugins_are_chosen_by_what_a_start_acquired_before_it_was_killed(paths, start, tmp_path):
    journal, chosen = start("gone"), []
    journal.take(AcmeCard(str(tmp_path / "first")))

    def alive(_):
        journal.take(AcmeCard(str(tmp_path / "second")))
        return {"gone": JobState.GONE}

    site = dataclasses.replace(site_config.Site(), paths=paths)
    site = dataclasses.replace(site, batch=dataclasses.replace(site.batch, system="local"))
    (result,) = reap(site, alive, lambda state: chosen.append(len(state.open)) or loaded())
    assert (result.action, chosen) == ("released", [2])


def test_reaper_releases_only_jobs_that_are_gone(paths, start, tmp_path, monkeypatch):
    monkeypatch.setattr(reap_module, "_LOCK", 0.0)
    for job in ("alive", "gone", "unknown", "silent", "starting"):
        start(job).take(AcmeCard(str(tmp_path / job)))
    read_end, write_end = os.pipe()

    def prologue():
        with job_lock(paths, "starting"):
            os.write(write_end, b"x")
            time.sleep(60)  # until it is killed

    pid = in_other_process(prologue)
    os.read(read_end, 1)
    lives = {"alive": JobState.ALIVE, "unknown": JobState.UNKNOWN}
    lives |= {"gone": JobState.GONE, "starting": JobState.GONE}
    would = reaped(paths, lives, dry_run=True)
    assert would["gone", 0].action == "would release" and (tmp_path / "gone").exists()
    assert would["gone", 0].open == (1,)
    results = reaped(paths, lives)
    assert {job: r.action for (job, _), r in results.items()} == {
        "alive": "alive",
        "gone": "released",
        "unknown": "unknown",
        "silent": "unknown",
        "starting": "busy",
    }
    assert json.dumps([dataclasses.asdict(r) for r in results.values()])
    assert not (tmp_path / "gone").exists()
    for job in ("alive", "unknown", "silent", "starting"):
        assert (tmp_path / job).exists()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert reaped(paths, lives, only="starting")["starting", 0].action == "released"
    assert len(journals(paths)) == 3


def test_reap_command_names_the_directory_even_without_journals(
    paths, start, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for module in (trust, site_file):
        monkeypatch.setattr(module, "require_root_owned", lambda *_, **__: None)
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{paths.state}"\nrun = "{paths.run}"\n')

    def said(*argv):
        argv = ["--dry-run", "--config", str(config), *argv]
        return CliRunner().invoke(command, argv, catch_exceptions=False).output

    where = f"{paths.state} ({config}): "
    assert said() == where + "nothing to release\n"
    assert said("42.srv") == where + "nothing to release of 42.srv\n"
    assert json.loads(said("--json")) == {"state": str(paths.state), "jobs": []}
    assert said("--quiet") == ""
    start("42.srv").take(AcmeCard(str(tmp_path / "card")))
    assert said("--quiet").startswith(where + "1 open journal\n42.srv: unknown: ")
    assert [job["job"] for job in json.loads(said("--json"))["jobs"]] == ["42.srv"]


def test_jobs_of_another_batch_system_are_kept(paths, start, tmp_path):
    start("1").take(AcmeCard(str(tmp_path / "card")))
    result = reaped(paths, {"1": JobState.GONE}, batch="slurm")["1", 0]
    assert (result.action, "batch system local" in result.message) == ("unknown", True)


def test_open_record_is_reported_and_can_be_abandoned(paths, start, tmp_path):
    start("42.srv").take(AcmeCard(str(tmp_path / "card")))
    (tmp_path / "card.mood").write_text("fail")
    gone = {"42.srv": JobState.GONE}
    result = reaped(paths, gone)["42.srv", 0]
    assert (result.action, result.ok) == ("partial", False)
    assert result.message == "1 of 1 records could not be released"
    assert result.report.lines() == ["42.srv:1 acme-card failed: card is busy (try 1)"]
    for wrong in ("42.srv", "42.srv:x", "42.srv:9", "43.srv:1", ":1"):
        with pytest.raises(UsageError, match="--abandon"):
            reaped(paths, gone, abandon=[wrong])
    assert reaped(paths, {"42.srv": JobState.ALIVE}, abandon=["42.srv:1"])["42.srv", 0].open == (1,)
    assert len(journals(paths)) == 1
    assert reaped(paths, gone, abandon=["42.srv:1"])["42.srv", 0].action == "released"
    assert journals(paths) == []


def test_abandon_of_an_ambiguous_record_asks_for_the_attempt(paths, start, tmp_path):
    for attempt in (0, 1):
        start("1", attempt).take(AcmeCard(str(tmp_path / f"card{attempt}")))
        (tmp_path / f"card{attempt}.mood").write_text("fail")
    with pytest.raises(UsageError, match=r"write one of 1\.0:1, 1\.1:1"):
        reaped(paths, {"1": JobState.GONE}, abandon=["1:1"])
    reaped(paths, {"1": JobState.GONE}, abandon=["1.1:1"])
    assert [path.name for path in journals(paths)] == ["1.0.jsonl"]


def test_unreadable_and_empty_journals(paths, start):
    bad, empty = start("bad"), start("empty")
    bad.path.write_bytes(b"x\n" + bad.path.read_bytes())
    empty.path.write_bytes(b'{"op"')
    results = reaped(paths, {})
    assert {job: r.action for (job, _), r in results.items()} == {"bad": "unreadable"}
    assert [path.name for path in journals(paths)] == ["bad.0.jsonl"]


def test_journal_with_an_io_error_does_not_stop_the_others(paths, start, tmp_path, monkeypatch):
    bad = start("bad")
    start("good").take(AcmeCard(str(tmp_path / "card")))
    real = os.open

    def fails(path, *args, **more):
        if path == bad.path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        results = reaped(paths, {"bad": JobState.GONE, "good": JobState.GONE})
        assert {job: r.action for (job, _), r in results.items()} == {
            "bad": "unreadable",
            "good": "released",
        }
        assert "Input/output error" in results["bad", 0].message
    assert reaped(paths, {"bad": JobState.GONE})["bad", 0].action == "released"


def test_unknown_jobs_are_kept_until_the_server_answers(paths, start, tmp_path):
    """Any number of times."""
    start("1").take(AcmeCard(str(tmp_path / "card")))
    for answer in ({}, {"1": JobState.UNKNOWN}, {"1": JobState.ALIVE}, {}):
        result = reaped(paths, answer)["1", 0]
        assert result.action in ("unknown", "alive") and result.ok and not result.report
        assert (tmp_path / "card").exists()
    assert reaped(paths, {"1": JobState.GONE})["1", 0].action == "released"


def test_reaper_after_a_reboot_releases_files_without_starting_daemons(
    paths, start, tmp_path, monkeypatch
):
    """Resources of the node, shared memory, daemons: gone with the boot, by the first line."""
    journal = start("1")
    journal.take(AcmeCard(str(tmp_path / "card")))
    kept = tmp_path / "kept"
    journal.take(File(str(kept), content=b"x"))
    with monkeypatch.context() as patch:
        patch.setattr(AcmeCard, "release", lambda _: 1 / 0)  # volatile: must not be called
        patch.setattr(teardown, "boot_id", lambda: "another")
        assert reaped(paths, {"1": JobState.UNKNOWN})["1", 0].action == "unknown"
        assert kept.exists()
        assert reaped(paths, {"1": JobState.GONE})["1", 0].action == "released"
    assert not kept.exists() and journals(paths) == []


def test_release_job_releases_all_attempts_of_one_job(paths, start, tmp_path):
    for job, attempt in (("4", 0), ("4", 1), ("4.0", 0), ("42", 0)):
        start(job, attempt).take(AcmeCard(str(tmp_path / f"{job}-{attempt}")))
    reports = release_job(paths, "4", plugins_for=lambda _: loaded())
    assert [report.clean for report in reports] == [True, True]
    assert sorted(path.name for path in journals(paths)) == ["4.0.0.jsonl", "42.0.jsonl"]
    assert release_job(paths, "nothing", plugins_for=lambda _: loaded()) == []


def test_release_that_failed_in_an_epilogue_is_retried_by_one_process(
    paths, start, tmp_path, monkeypatch
):
    """One process of the node retries the release, and ends when nothing is left."""
    for name in ("_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(reap_module, name, 0.01)
    kept, over, asked = tmp_path / "kept", tmp_path / "over", tmp_path / "asked"
    start("42.srv").take(File(str(kept), content=b"x"))

    def alive(ids):
        with asked.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return dict.fromkeys(ids, JobState.GONE if over.exists() else JobState.UNKNOWN)

    site = dataclasses.replace(site_config.Site(), paths=paths)
    site = dataclasses.replace(site, batch=dataclasses.replace(site.batch, system="local"))
    for _ in range(2):
        reap_until_clean(site, Plugins(), "42.srv", alive)
    eventually(lambda: asked.exists() and len(asked.read_text().split()) > 2)
    assert len(set(asked.read_text().split())) == 1 and kept.exists()
    over.touch()
    eventually(lambda: not kept.exists() and not journals(paths))
    (pid,) = set(asked.read_text().split())
    eventually(lambda: not processes.alive(pid))
