"""Options in PBS form are refused with their Slurm form, before anything is submitted."""

import pytest

from slurm_doubles import SlurmDoubles
from vtorque_core.api import UsageError
from vtorque_slurm.settings import Settings
from vtorque_slurm.submitter import SlurmSubmitter

JOB = b"#!/bin/sh\n"


@pytest.fixture
def split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_bytes(JOB)
    return SlurmSubmitter(
        Settings(bindir=str(SlurmDoubles(tmp_path / "slurm").bin)), tmp_path
    ).split


@pytest.mark.parametrize("vm", [[], ["-vm", "none"]])
@pytest.mark.parametrize(
    ("argv", "given", "fix"),
    [
        (
            ["-W", "block=true", "job.sh"],
            "-W block=true is PBS syntax: on Slurm -W is --wait",
            "to wait for the job's end use --wait,",
        ),
        (
            ["-Jx", "-Wblock=true", "job.sh"],
            "-W block=true is PBS syntax: on Slurm -W",
            "to wait for the job's end use --wait,",
        ),
        (["-W", "depend=afterok:1", "job.sh"], "-W depend=afterok:1 is PBS", "--dependency="),
        (
            ["-v", "A=1,B", "job.sh"],
            "-v A=1,B is PBS syntax: on Slurm -v is --verbose",
            "--export=ALL,A=1,B",
        ),
        (
            ["-V", "job.sh"],
            "-V job.sh is PBS syntax: on Slurm -V prints sbatch's version",
            "leave it out",
        ),
        (
            ["-N", "hello", "job.sh"],
            "-N hello is PBS syntax: on Slurm -N is --nodes",
            "--job-name=hello",
        ),
        (
            ["-S", "/bin/bash", "job.sh"],
            "-S /bin/bash is PBS syntax: on Slurm -S is --core",
            "first line",
        ),
        (["-l", "nodes=1", "job.sh"], "option -l is unknown", "-N, -n, -c, --mem and --time"),
    ],
)
def test_pbs_option_is_refused_with_its_slurm_form(split, argv, given, fix, vm):
    with pytest.raises(UsageError) as raised:
        split([*vm, *argv])
    assert str(raised.value).startswith(given) and fix in str(raised.value)


@pytest.mark.parametrize(
    "argv",
    [["-W", "job.sh", "block=true"], ["-WJx", "job.sh"], ["-v", "job.sh"], ["-N2-4", "job.sh"],
     ["-S", "1", "job.sh"], ["-W", "a=b"], ["-q", "long", "-t", "0-9", "job.sh"]],
)  # fmt: skip
def test_slurm_options_are_accepted(split, tmp_path, argv):
    (tmp_path / "a=b").write_bytes(JOB)
    assert split(argv).content == JOB


def test_version_option_is_passed_to_sbatch(split):
    assert split(["-V"]).rest == ("-V",)
