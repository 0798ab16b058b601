"""Each example as its README says: the image as an admin, the command as a user."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import slurm_cluster as slurm

pytestmark = [pytest.mark.e2e, pytest.mark.full]

EXAMPLES = slurm.REPO / "examples"
# What each prints; every task of an array has a file of its own.
SEEN = {
    "bones": [r"specimen [1-4]: 4\d% bone, [23]\d\d\d MPa"] * 4,
    "container": [r'\{"masses": [123]00, "lowest": \[0\.\d+, 0\.\d+, 0\.\d+\]\}'] * 3,
    "mpi-halo": [r"rank \d of 4 on vn1-[01]\n(.*\n)*heat 1000000\.000 after 200 steps"],
}


def blocks(name):
    """Return what the README has an admin and a user call: its first two blocks of commands."""
    return re.findall(r"```sh\n(.*?)```", (EXAMPLES / name / "README.md").read_text(), re.DOTALL)


def build(cluster, name, commands):
    """Do what the admin does; an image that is there is taken."""
    *before, last = commands.splitlines()
    words = last.split()
    assert words[:3] == ["vmgr", "images", "build"], last
    for line in before:
        if not Path(EXAMPLES, name, "stack").exists():
            subprocess.run(["sh", "-c", line], cwd=EXAMPLES / name, check=True, timeout=900)
    image, builder, *options = words[3:]
    options = [re.sub("=(?=image|stack)", f"={EXAMPLES / name}/", word) for word in options]
    cluster.image(image, *options, builder=builder)


@pytest.mark.parametrize("name", sorted(SEEN))
def test_an_example(cluster, clean, name):
    admin, user = blocks(name)[:2]
    build(cluster, name, admin)
    here = cluster.home / name
    shutil.copytree(EXAMPLES / name, here, ignore=shutil.ignore_patterns("stack"))
    try:
        subprocess.run(["chown", "-R", f"{slurm.UID}:{slurm.UID}", here], check=True)
        command = f"cd {name} && {user}"
        clean.user("sh", "-c", command, timeout=900)
        outputs = [path.read_text() for path in sorted(here.glob("slurm-*.out"))]
        wanted = SEEN[name]
        assert len(outputs) == len(wanted), outputs
        for text in outputs:
            assert re.search(wanted[0], text), text
    finally:
        shutil.rmtree(here)
