"""``vmgr ssh``: whose guests it finds, and what it then runs."""

import os

import pytest
from click.testing import CliRunner

from vtorque_core.api import kept_records
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.cli.vmgr import vmgr


@pytest.fixture
def called(tmp_path, monkeypatch):
    """Return what calls ``vmgr ssh``, and gives what it would have become, or its refusal."""
    paths = Paths(tmp_path / "state", tmp_path / "run")
    paths.state.mkdir()
    job = JobAttempt("42.srv", 0, "u", os.getuid())
    guests = [{"rank": 3, "index": 1, "hostname": "vm-1"}]
    kept_records.place(paths, job).add_facts(job="42.srv", guests=guests)
    run_dir = paths.job_run(job.key) / "g1"
    run_dir.mkdir(parents=True)
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{paths.state}"\nrun = "{paths.run}"\n')
    ran = []
    monkeypatch.setattr(os, "execvp", lambda _program, argv: ran.append(argv))

    def call(*argv):
        done = CliRunner().invoke(vmgr, ["--config", str(config), "ssh", *argv])
        return ran.pop() if ran else str(done.exception)

    call.run_dir = run_dir
    return call


def test_ssh_has_the_jobs_own_client_configuration(called):
    (called.run_dir / "ssh_config").write_text("")
    argv = called("42.srv", "3", "--", "id", "-un")
    assert argv == ["ssh", "-F", f"{called.run_dir}/ssh_config", "vm-1", "id", "-un"]


def test_what_is_not_there_is_said(called):
    assert "no ssh: look for" in called("42.srv", "3")
    assert "job 42.srv of yours has no guest of rank 0" in called("42.srv")
    assert "job 43.srv of yours has no guest" in called("43.srv", "3")
