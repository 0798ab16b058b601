"""``vmgr phases``: of one's own jobs for anybody, of all for root."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vtorque_core.api import kept_records
from vtorque_core.base.errors import Refused
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.records.timeline import timeline

BIN = Path(sys.executable).parent
PHASES = [
    {"name": "boot", "guest": None, "start": 5.0, "seconds": 2.5},
    {"name": "ready", "guest": 0, "start": 7.0, "seconds": 2.0},
    {"name": "used", "guest": 0, "start": 9.0, "seconds": 0, "cpu_seconds": 1.5, "peak_mib": 300},
]


@pytest.fixture
def paths(tmp_path):
    paths = Paths(tmp_path / "state", tmp_path / "run")
    paths.state.mkdir()
    (tmp_path / "vtorque.toml").write_text(
        f'[paths]\nstate = "{paths.state}"\nrun = "{paths.run}"\n'
    )
    kept_records.place(paths, JobAttempt("42.srv", 0, "u", os.getuid())).add_facts(
        job="42.srv", phases=PHASES
    )
    return paths


def call(paths, *argv):
    command = [BIN / "vmgr", "--config", paths.state.parent / "vtorque.toml", "phases"]
    return subprocess.run([*command, *argv], capture_output=True, text=True, check=False)


def test_the_phases_of_an_ended_job(paths):
    done = call(paths, "42.srv")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines == [
        ["boot", "2.500", "s"],
        ["guest", "0:", "ready", "2.000", "s"],
        ["guest", "0:", "used", "1.50", "s", "CPU,", "at", "most", "300", "MiB"],
    ]
    assert json.loads(call(paths, "42.srv", "--json").stdout) == PHASES


def test_an_unknown_job_is_said(paths):
    done = call(paths, "43.srv")
    assert done.returncode == 2 and "nothing is known here of job 43.srv" in done.stderr


def test_others_jobs_are_not_looked_at(paths):
    kept_records.place(paths, JobAttempt("44.srv", 0, "u", os.getuid() + 1)).add_facts(
        job="44.srv", phases=PHASES
    )
    assert timeline(paths, "44.srv") == PHASES
    assert timeline(paths, "44.srv", os.getuid()) == []


def test_what_a_plugin_finds_of_a_job(paths, monkeypatch):
    assert [p.key for p in kept_records.attempts(paths, "42.srv")] == ["42.srv.0"]
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(Refused, match=r"nothing is kept here of a job .* of yours"):
        kept_records.attempts(paths, "42.srv")
