"""Each example's README: the image as an admin, the commands as a user."""

import json
import os
import re
import shutil
import subprocess

import pytest

import slurm_cluster as slurm

pytestmark = [pytest.mark.e2e, pytest.mark.full]

NO_LOADER = "VTORQUE_OSV_LOADER is not set"  # OSv is not part of this repository
osv = pytest.param(
    "osv-c", marks=pytest.mark.skipif("VTORQUE_OSV_LOADER" not in os.environ, reason=NO_LOADER)
)
WORK = {"compute": 256, "files": 1000}  # the result of the study's jobs
# Output of each; every task of an array has its own file.
SEEN = {
    "bones": [r"specimen [1-4]: 4\d% bone, [23]\d\d\d MPa"] * 4,
    "container": [r'\{"masses": [123]00, "lowest": \[0\.\d+, 0\.\d+, 0\.\d+\]\}'] * 3,
    "mpi-halo": [r"rank \d of 4 on vn1-[01]\n(.*\n)*heat 1000000\.000 after 200 steps"],
    "osv-c": [r"^vn\d-0: temperature 2\.0: magnetisation 0\.91\d$"],
}


def source(name):
    return slurm.REPO / ("bench" if name == "hpc" else "examples") / name


def blocks(name):
    """Return the README's commands of an admin and of a user, in order."""
    text = (source(name) / "README.md").read_text()
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


def build(commands, place):
    """Run the admin's commands in a copy of the directory; an existing image is used."""
    vmgr = f"{slurm.PREFIX}/vmgr --config /var/lib/{slurm.NAME}/build.toml"
    image = re.search(r"vmgr images build (\S+)", commands).group(1)
    if subprocess.run([*vmgr.split(), "images", "show", image], check=False).returncode:
        loader = os.environ.get("VTORQUE_OSV_LOADER", "")
        commands = re.sub(r"(?<= loader=)\S+", loader, commands)
        script = f'vmgr() {{ {vmgr} "$@"; }}\n{commands}'
        subprocess.run(["sh", "-ec", script], cwd=place, check=True, timeout=900)


@pytest.fixture
def example(clean, tmp_path):
    """Return a function that copies an example into the user's home, and builds its image."""
    places = []

    def copy(name):
        admin = next((each for each in blocks(name) if "images build" in each), None)
        if admin:
            build(admin, shutil.copytree(source(name), tmp_path / name))
        places.append(shutil.copytree(source(name), clean.home / name))
        subprocess.run(["chown", "-R", f"{slurm.UID}:{slurm.UID}", places[0]], check=True)
        return places[0]

    yield copy
    for place in places:
        shutil.rmtree(place)


def printed(cluster, place, command):
    """Run a command as the user; return its jobs' output."""
    for path in place.glob("slurm-*.out"):
        path.unlink()
    cluster.user("sh", "-c", f"cd {place.name} && {command}", timeout=1800)
    return [path.read_text() for path in sorted(place.glob("slurm-*.out"))]


@pytest.mark.parametrize("name", [osv if name == "osv-c" else name for name in sorted(SEEN)])
def test_example_prints_the_output_of_its_readme(clean, example, name):
    outputs = printed(clean, example(name), blocks(name)[1])
    wanted = SEEN[name]
    assert len(outputs) == len(wanted), outputs
    for text in outputs:
        assert re.search(wanted[0], text, re.MULTILINE), text


def test_airflow_result_is_equal_in_guests_and_on_bare_metal(clean, example):
    place = example("airflow")
    _, two, more = blocks("airflow")[:3]
    one, bare = more.splitlines()
    said = [printed(clean, place, command) for command in (two, one, bare)]
    line = r"ranks on (.*): drag (1\.8\d+) after 60 steps, \d+ s\n"
    found = [re.fullmatch(line, *outputs) for outputs in said]
    assert all(found), said
    assert [each[1] for each in found] == ["vn1 vn2", "vn1-0 vn1-1", "n1 n2"]
    assert len({each[2] for each in found}) == 1, said


def test_study_runs_as_in_its_readme(clean, example):
    place = example("study")
    *run, compare = blocks("study")[0].splitlines()
    clean.user("sh", "-c", f"cd study && {' && '.join(run)}", timeout=1800)
    assert "<svg" in (place / "study.html").read_text()
    exported = "vmgr experiment export study.results --format=json"
    points = json.loads(clean.user("sh", "-c", f"cd study && {exported}").stdout)
    found = {(row["bare"], row["env.WORK"], row["result"]) for row in points}
    assert found == {(b, *w) for b in (True, False) for w in WORK.items()}
    assert len(points) == 24
    shown = clean.user("sh", "-c", f"cd study && {compare}").stdout.decode()
    assert re.search(r"wall, s +guest WORK=compute +6/6 .*\n", shown), shown


def test_cost_experiment_runs_as_in_its_readme(clean, archive, example):
    place = example("hpc")
    done = clean.user("hpc/run", "--small", "--with", "hugepages,ends", check=False, timeout=1800)
    status = clean.user("vmgr", "experiment", "status", "hpc/hpc.results").stdout.decode()
    assert "5 points of 5 combinations: 3 done, 2 failed" in status, (done, status)
    assert done.returncode == 4, done
    assert "hugepages" in status  # the reason: no node of this cluster has such cards
    assert "<svg" in (place / "hpc.html").read_text()
    exported = clean.user("vmgr", "experiment", "export", "hpc/hpc.results", "--format=json").stdout
    ended = [row for row in json.loads(exported) if row["state"] == "done" and not row["bare"]]
    assert [row["end"] > 0 for row in ended] == [True, True], ended
    assert list(archive.glob("*.zip"))  # the head gets it from there
