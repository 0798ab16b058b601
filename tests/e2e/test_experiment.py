"""Experiments with real guests: bare metal beside them, on a node and without root."""

import json

import pytest

pytestmark = pytest.mark.e2e

FILE = """
title = "Two sizes, with and without a guest"
script = "job.sh"
matrix.bare = [true, false]
matrix.env.SIZE = [1, 2]
vm.ram = "256M"
limits.poll = 10
take.size = {pattern = "size ([0-9]+)"}
take.twice = {metric = "twice"}
take.release = {json = "kernel", file = "out.json"}
"""
SCRIPT = """#!/bin/sh
echo "size $SIZE"
echo "twice $((SIZE * 2))" >>"$VTORQUE_METRICS"
echo "{\\"kernel\\": $SIZE}" >out.json
echo "$EXPERIMENT_POINT" >>"$EXPERIMENT_ROOT/ran"
"""


def looked_at(call, home, points):
    """Check what an experiment of 2x2 combinations has left; ``call``: runs vmgr as the user."""
    found = json.loads(call("export", "e.results", "--format=json"))
    assert [row["state"] for row in found] == ["done"] * points, found
    for row in found:
        assert row["size"] == row["release"] == row["env.SIZE"] and row["code"] == 0
        assert row["twice"] == 2 * row["env.SIZE"]
    ran = (home / "ran").read_text().split()
    assert sorted(ran, key=int) == [str(number) for number in range(1, points + 1)]
    hosts = {row["bare"]: row["machine"].split(", ")[1] for row in found}
    assert hosts[True] != hosts[False]
    known = json.loads((home / "e.results" / "versions.json").read_text())
    images = known.get("at_end", known).get("images", known["images"])
    assert images["micro"] and known["vtorque"]["vtorque-experiment"]
    compared = call("compare", "e.results", "--baseline", "bare=true")
    assert compared.count("too few runs") >= 2


def test_guests_and_bare_metal_on_a_node(node, clean):
    node.script(SCRIPT)
    node.script(FILE, "e.toml")
    node.as_user("vmgr", "experiment", "run", "e.toml", timeout=600)

    def call(*argv):
        return node.as_user("vmgr", "experiment", *argv).stdout.decode()

    looked_at(call, node.home, 4)
    again = node.as_user("vmgr", "experiment", "resume", "e.results")
    assert again.stdout.decode() == "4 points of 4 combinations: 4 done\n"
