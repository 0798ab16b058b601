"""Prolog and Epilog."""

import subprocess
from pathlib import Path

import pytest

from vtorque_core.api.setup_steps import Installation
from vtorque_slurm.hooks import epilog, prolog


@pytest.fixture
def hooks(tmp_path):
    """Return a function that runs one of the hooks; vtorque records its arguments and fails."""
    program = tmp_path / "vtorque"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\nexit 3\n')
    program.chmod(0o755)
    place = Installation(program, Path("/etc/v.toml"), Path("/shell"))
    journal, proofs = tmp_path / "jour nal", tmp_path / "proof"
    journal.mkdir()
    proofs.mkdir()
    scripts = {"prolog": prolog(place), "epilog": epilog(place, journal, proofs)}

    def call(kind, *, code=0, **environ):
        said = tmp_path / "said"
        said.unlink(missing_ok=True)
        done = subprocess.run(
            ["sh", "-c", scripts[kind]], env=environ, capture_output=True, check=False
        )
        assert done.returncode == code, "not this exit status: a failing hook drains the node"
        return said.read_text().strip() if said.exists() else ""

    return call


def test_prolog_calls_vtorque_for_vm_jobs_only(hooks):
    called = "hook --config /etc/v.toml prologue\nhook --config /etc/v.toml epilogue 7"
    assert hooks("prolog", SLURM_JOB_ID="7", SLURM_JOB_COMMENT="mine vt1:AAAA") == called
    for comment in ({}, {"SLURM_JOB_COMMENT": "vt2:x $(id) `id` *"}):
        assert hooks("prolog", SLURM_JOB_ID="7", **comment) == ""


def test_prolog_fails_only_if_a_spank_plugin_must_start_the_job_shell(hooks, tmp_path):
    called = "hook --config /etc/v.toml prologue\nhook --config /etc/v.toml epilogue 7"
    by_spank = {"SLURM_JOB_ID": "7", "SPANK_VTORQUE_REQUEST": "vt1:AAAA"}
    assert hooks("prolog", code=1, **by_spank) == called
    program = tmp_path / "vtorque"
    program.write_text(program.read_text().replace("exit 3", "exit 0"))
    assert hooks("prolog", **by_spank) == called.split("\n", maxsplit=1)[0]


def test_epilog_checks_files_and_not_the_comment(hooks, tmp_path):
    called = "hook --config /etc/v.toml epilogue 7"
    assert hooks("epilog", SLURM_JOB_ID="7", SLURM_JOB_COMMENT="vt1:AAAA") == ""
    (tmp_path / "jour nal/77.0.jsonl").touch()
    assert hooks("epilog", SLURM_JOB_ID="7") == ""
    (tmp_path / "jour nal/7.1.jsonl").touch()
    assert hooks("epilog", SLURM_JOB_ID="7", SLURM_JOB_COMMENT="changed") == called
    (tmp_path / "jour nal/7.1.jsonl").unlink()
    (tmp_path / "proof/7.json").touch()
    assert hooks("epilog", SLURM_JOB_ID="7") == called
