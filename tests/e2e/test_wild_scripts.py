"""Realistic job scripts run in a guest like under the bare batch system."""

import os
import re
import shutil
from pathlib import Path

import pytest

from vtorque_testing.wild_scripts import SCRIPTS

pytestmark = pytest.mark.e2e

RECIPE = Path(__file__).resolve().parents[2] / "doc/recipes/hpc.toml"
HPC = ("-vm", "img=hpc,ram=512M,vcpus=1")  # whatever ppn: test machines have few cores
# CI's scripts of kinds that the contract does not have.
SHORT = {"trap-term.sh"}
# What the user's login shell, which runs the script on bare metal, says when a signal ended it; and
# what vTorque says in its place.
LOGIN_SHELL = re.compile(
    rb"^(-bash: line 1: +[0-9]+ .*/[0-9]+\.[^/]*\.SC"
    rb"|vtorque: the script was killed by signal [0-9]+ \([A-Za-z0-9 ]+\))\n",
    re.MULTILINE,
)
# The script's directory, which shells print before errors: the batch system's spool, the guest's
# /run.
PLACE = re.compile(rb"/[^\s:'\"]*/(?=[0-9]+\.[^/\s]*\.SC)")
OURS = (b"job.sh", b"out", b"err")
MICRO = [wild for wild in SCRIPTS if wild.runs == "micro"]
FULL = [wild for wild in SCRIPTS if wild.runs == "hpc"]


def files(home):
    """Return the visible files of the home: by name the content, or the target."""
    found = {}
    for path in sorted(home.rglob("[!.]*")):
        name = os.fsencode(path.relative_to(home))
        if path.is_symlink():
            found[name] = os.fsencode(path.readlink())
        elif name not in OURS:
            found[name] = path.read_bytes() if path.is_file() else b""
    return found


def empty(home):
    for path in home.glob("[!.]*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def ended(node, wild, *vm):
    """Return the script's result in an empty home: code, output, errors, files.

    The job's number and the script's directory are removed.
    """
    empty(node.home)
    job = node.job(wild.content, *vm, name="wild", timeout=300)
    out, err, left = job.out, LOGIN_SHELL.sub(b"killed\n", job.err), files(node.home)
    empty(node.home)
    job_id = job.done.stdout.split()[0]

    def same(text):
        return PLACE.sub(b"", text).replace(job_id, b"N.host")

    return job.code, same(out), same(err), {same(n): same(text) for n, text in left.items()}


def compare(node, wild, *vm):
    """Run the script on bare metal and in a guest; results, output and files have to be equal."""
    if b"-l mem=" in wild.content and not vm:
        vm = ("-vm", "ram=job")  # this node's own default is a number
    bare = ended(node, wild, "-vm", "none")
    assert any(bare), "the script has no output and no files to compare"
    assert ended(node, wild, *vm) == bare


@pytest.mark.full
@pytest.mark.parametrize("wild", [w for w in MICRO if w.name in SHORT], ids=lambda wild: wild.name)
def test_script_behaves_in_a_guest_as_under_the_batch_system(clean, wild):
    compare(clean, wild)


@pytest.mark.full
@pytest.mark.parametrize(
    "wild", [w for w in MICRO if w.name not in SHORT], ids=lambda wild: wild.name
)
def test_script_in_a_micro_guest_runs_as_on_bare_metal(clean, wild):
    compare(clean, wild)


@pytest.fixture(scope="module")
def hpc(node):
    """Provide the recipe's image in the pool; building it takes some minutes."""
    if node.root("vmgr", "images", "show", "hpc", check=False).returncode:
        build = ("vmgr", "images", "build", "hpc", "linux", "-o", f"recipe={RECIPE}")
        node.root(*build, timeout=1200)


@pytest.mark.full
@pytest.mark.parametrize("wild", FULL, ids=lambda wild: wild.name)
def test_script_in_a_recipe_guest_runs_as_on_bare_metal(hpc, clean, wild):
    compare(clean, wild, *HPC)
