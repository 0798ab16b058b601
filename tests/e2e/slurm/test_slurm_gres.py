"""Cards that a real Slurm counts and grants: guests get those, and no others.

The cards are recorded ones and their device files doubles (scripts/cluster), so no guest starts
with one: the job fails at VFIO, with the name of the granted card.
"""

import io
import json
import re
import tarfile

import pytest

import slurm_cluster as slurm
from vtorque_testing import sysfs_tree

pytestmark = pytest.mark.e2e

NODE = "n1"
CARDS = "/var/lib/cards"
FIRST, SECOND = "0000:3b:00.0", "0000:5e:00.0"
SITE = f"""
[plugin.passthrough]
sysfs = "{CARDS}"
[[plugin.passthrough.classes]]
name = "gpu"
ids = ["10de:20b0"]
resource = "gres/gpu"
files = ["/dev/null", "/dev/zero"]
"""
MAKE = f"""
import os, pathlib, sys
sys.path.insert(0, "/var/lib/make/support")
import sysfs_tree
top = pathlib.Path("{CARDS}")
sysfs_tree.tree("gpu-node", top)
for file, address in (("/dev/null", "{FIRST}"), ("/dev/zero", "{SECOND}")):
    number = os.stat(file).st_rdev
    card = top / "devices" / address / "drm"
    card.mkdir()
    link = top / "dev/char" / f"{{os.major(number)}}:{{os.minor(number)}}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(card)
"""


def recorded():
    """Return the program and data that make the recorded machine on a node, as a tar file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(sysfs_tree.__file__, "make/support/sysfs_tree.py")
        tar.add(sysfs_tree.DATA / "gpu-node.txt", "make/support/machines/gpu-node.txt")
    return packed.getvalue()


@pytest.fixture
def cards(clean):
    """Return the cluster, whose first node has two cards."""
    config = "/etc/vtorque/vtorque.toml"
    for machine in ("head", NODE):
        clean.root(machine, "cp", config, f"{config}.before")
        clean.root(machine, "sh", "-c", f"cat >> {config}", stdin=SITE.encode())
    clean.root(NODE, "tar", "-x", "-C", "/var/lib", stdin=recorded())
    clean.root(NODE, "python3", "-B", "-", stdin=MAKE.encode())
    yield clean
    clean.root("head", "scancel", "-u", slurm.USER)
    clean.wait(lambda: not clean.root("head", "squeue", "-h"), what="empty queue")
    clean.root(NODE, "rm", "-r", CARDS, "/var/lib/make")
    for machine in ("head", NODE):
        clean.root(machine, "mv", f"{config}.before", config)
    clean.root("head", "scontrol", "update", f"NodeName={NODE}", "Comment=")


def bare(cluster, gres):
    """Start a job on bare metal that holds cards; return its id."""
    script = cluster.script("#!/bin/sh\nsleep 120\n", "bare.sh")
    done = cluster.user("sbatch", "--parsable", f"-w{NODE}", "--mem=100M", f"--gres={gres}", script)
    job_id = done.stdout.decode().strip()
    cluster.wait_state(job_id, "RUNNING")
    return job_id


def granted(cluster, job_id):
    """Return Slurm's own record of a job's resources."""
    shown = cluster.root("head", "scontrol", "show", "job", "-d", job_id)
    return re.findall(r"^     Nodes=\S+ .* GRES=(\S*)", shown, re.MULTILINE)


def test_guest_gets_the_granted_card_and_no_card_of_a_bare_metal_job(cards):
    """The first card belongs to a bare-metal job; when that has ended the same request gets it."""
    argv = (f"-w{NODE}", "--no-requeue", "-vm", "pci=gpu")
    first = bare(cards, "gpu:1")
    assert granted(cards, first) == ["gpu:1(IDX:0)"]
    code, _, err = cards.job("#!/bin/sh\necho ran\n", *argv)
    assert (code, f"PCI function {SECOND}" in err.decode()) == (122, True), err
    assert FIRST not in err.decode()
    cards.root("head", "scancel", first)
    cards.wait_state(first, "CANCELLED")
    code, _, err = cards.job("#!/bin/sh\necho ran\n", *argv)
    assert (code, f"PCI function {FIRST}" in err.decode()) == (122, True), err
    assert SECOND not in err.decode()


def test_job_waits_in_slurm_for_the_cards_of_all_its_guests(cards):
    holder = bare(cards, "gpu:1,bandwidth:4")
    assert granted(cards, holder) == ["gpu:1(IDX:0),bandwidth(CNT:4)"]
    argv = (f"-w{NODE}", "--gres=bandwidth:2", "-vm", "vms_per_node=2,pci=gpu")
    waiting = cards.submit("#!/bin/sh\necho ran\n", *argv)
    shown = cards.wait(
        lambda: (job := cards.show(waiting)).get("Reason") == "Resources" and job, 60, "Resources"
    )
    assert shown["JobState"] == "PENDING"
    assert sorted(shown["TresPerNode"].split(",")) == ["gres:bandwidth:2", "gres:gpu:2"]


def test_gres_request_smaller_than_the_guests_need_is_refused_by_vsub(cards):
    script = cards.script("#!/bin/sh\n")
    done = cards.user("vsub", "--gres=gpu:1", "-vm", "pci=gpu:2", script, check=False)
    assert done.returncode != 0
    assert b"need 2 gres/gpu, but the job requests 1" in done.stderr
    done = cards.user("vsub", "-vm", "pci=tpu", script, check=False)
    assert b"unknown class tpu" in done.stderr
    shown = cards.user("vsub", "--dry-run", "-vm", "pci=gpu:2", script)
    assert b"asks the batch system for gres/gpu = 2" in shown.stdout


@pytest.mark.parametrize(
    "gres", [(), pytest.param(("--gres=bandwidth:1",), marks=pytest.mark.full)]
)
def test_request_that_bypasses_vsub_gets_no_card(cards, gres):
    """The user forges the request and the environment."""
    word = cards.submit("#!/bin/sh\n:\n", "-H", f"-w{NODE}", "--gres=gpu:1", "-vm", "pci=gpu")
    comment = re.search(r"Comment=(\S+)", cards.root("head", "scontrol", "show", "job", word))
    cards.root("head", "scancel", word)
    script = cards.script("#!/usr/libexec/vtorque-jobshell\n#!/bin/sh\necho ran\n", "forged.sh")
    lies = {"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}
    done = cards.user(
        "sbatch", "-W", "-o", "forged", f"-w{NODE}", *gres, f"--comment={comment[1]}", script,
        check=False, env=lies.items(),
    )  # fmt: skip
    said = cards.read("forged").decode()
    assert (done.returncode, "need 1 gres/gpu, but the batch system granted the job 0" in said) == (
        121, True,
    ), said  # fmt: skip
    assert json.dumps("ran") not in said
