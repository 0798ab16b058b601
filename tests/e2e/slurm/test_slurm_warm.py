"""Guests that are booted before their job, on a real Slurm."""

import json

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.full]

NODES = ("n1", "n2")
CONFIG = "/etc/vtorque/vtorque.toml"
KEEP = b'\n[plugin.warm]\nshapes = ["img=micro vcpus=1 ram=256M"]\n'
TAKEN = "was booted before: "
# Set all nice values of the node to 0: with 19 a guest would not boot on a busy machine.
HURRY = "cd /proc; renice -n 0 $(ls -d [0-9]*/task/* | sed 's|.*/||') >/dev/null 2>&1; true"


def waiting(cluster, node):
    """Return the keys of a node's waiting guests."""
    cluster.root(node, "sh", "-c", HURRY)
    guests = json.loads(cluster.root(node, "vtorque", "warm", "--json"))["guests"]
    return {each["key"] for each in guests if each["state"] == "waits"}


@pytest.fixture
def warm(clean):
    """Keep a guest ready on each of two nodes; return the keys by node."""
    for node in NODES:
        clean.root(node, "cp", CONFIG, f"{CONFIG}.before")
        clean.root(node, "sh", "-c", f"cat >> {CONFIG}", stdin=KEEP)
        clean.root(node, "vtorque", "warm", "start")
    yield {
        node: clean.wait(lambda node=node: waiting(clean, node), what="a guest") for node in NODES
    }
    for node in NODES:
        clean.root(node, "mv", f"{CONFIG}.before", CONFIG)
        clean.root(node, "vtorque", "warm", "stop")


def test_job_on_two_nodes_claims_warm_guests_and_boots_the_others(warm, clean):
    """Two guests per node, of which one is warm. Then new ones are booted."""
    args = ("-N2", "-wn1,n2", "-vm", "vms_per_node=2")
    code, out, err = clean.job("#!/bin/sh\nhostname; echo $SLURM_JOB_ID\n", *args)
    name, job_id = out.decode().split()
    assert (code, name, err) == (0, "vn1-0", b"")
    for node, keys in warm.items():
        log = clean.root(node, "vmgr", "logs", "--json", job_id).splitlines()
        said = [str(json.loads(line)["message"]) for line in log]
        taken = {text.removeprefix(TAKEN) for text in said if text.startswith(TAKEN)}
        assert taken == keys, said
        assert clean.wait(lambda node=node: waiting(clean, node), what="a new one") - keys
