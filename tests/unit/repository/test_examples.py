"""The examples' scripts, without guests: where they run, and their messages about missing parts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
# Stands for each program that a job script calls: it records its directory.
DOUBLE = '#!/bin/sh\npwd >> "$CALLS"\n'
PROGRAMS = {
    "airflow": ("blockMesh", "decomposePar", "mpirun"),
    "bones": ("python3", "ccx"),
    "compose": ("docker",),
    "container": ("python3",),
    "mpi-halo": ("mpicc", "mpirun"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_job_script_works_in_the_directory_of_its_submission(tmp_path, name):
    """PBS and the batch system local start a job in the home."""
    place, programs, calls = (tmp_path / each for each in ("submitted", "bin", "calls"))
    shutil.copytree(EXAMPLES / name, place)
    programs.mkdir()
    for each in PROGRAMS[name]:
        (programs / each).write_text(DOUBLE)
        (programs / each).chmod(0o755)
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(calls), "HOME": str(tmp_path)}
    subprocess.run(
        ["bash", place / "job.sh"], cwd=tmp_path, env=environ | {"PBS_O_WORKDIR": str(place)},
        timeout=60, check=False, capture_output=True,
    )  # fmt: skip
    assert Path(calls.read_text().splitlines()[0]).is_relative_to(place)


@pytest.mark.parametrize(
    ("name", "packages"),
    [("compose", "mmdebstrap umoci skopeo uidmap"), ("container", "mmdebstrap umoci uidmap")],
)
def test_pack_names_the_packages_of_missing_tools(tmp_path, name, packages):
    (tmp_path / "id").symlink_to("/usr/bin/id")
    done = subprocess.run(
        ["/bin/sh", EXAMPLES / name / "pack"], cwd=tmp_path, env={"PATH": str(tmp_path)},
        timeout=60, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"pack: mmdebstrap is missing. As root: apt-get install {packages}\n"
    assert os.listdir(tmp_path) == ["id"]  # noqa: PTH208
