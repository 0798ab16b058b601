"""Experiments with real guests and bare metal, on a node and without root."""

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
    """Check the results of an experiment of 2x2 combinations; ``call``: runs vmgr as the user."""
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


def test_experiment_runs_guests_and_bare_metal_on_a_node(node, clean):
    node.script(SCRIPT)
    node.script(FILE, "e.toml")
    node.as_user("vmgr", "experiment", "run", "e.toml", timeout=600)

    def call(*argv):
        return node.as_user("vmgr", "experiment", *argv).stdout.decode()

    looked_at(call, node.home, 4)
    again = node.as_user("vmgr", "experiment", "resume", "e.results")
    assert again.stdout.decode() == "4 points of 4 combinations: 4 done\n"


ATTACK = """#!/bin/sh
[ "$EXPERIMENT_POINT" = 1 ] || exit 0
results=$EXPERIMENT_ROOT/attack.results
mkdir -p "$results/points/000/000002"
{
    echo '#!/bin/sh'
    echo '#VSUB -vm none'
    echo "hostname >>$EXPERIMENT_ROOT/evil"
} >"$results/points/000/000002/job.sh"
cp "$results/points/000/000002/job.sh" "$results/scripts/0-job.sh"
echo "0 0 0" >ended
"""


@pytest.mark.full
def test_code_in_a_guest_cannot_choose_programs_run_on_the_host(node, clean):
    node.script(ATTACK)
    node.script(
        'script = "job.sh"\nrepetitions = 2\nvm.ram = "256M"\n'
        "limits = {jobs = 1, poll = 10}\n", "attack.toml",
    )  # fmt: skip
    done = node.as_user("vmgr", "experiment", "run", "attack.toml", timeout=600, check=False)
    assert done.returncode == 4, done.stderr
    assert not (node.home / "evil").exists()
    status = node.as_user("vmgr", "experiment", "status", "attack.results", "--json")
    (failed,) = json.loads(status.stdout)["failed"]
    assert failed["point"] == 2 and "this script was changed" in failed["reason"]
    again = node.as_user("vmgr", "experiment", "resume", "attack.results", "--failed", check=False)
    assert again.returncode == 2 and b"resume --accept " in again.stderr
    assert not (node.home / "evil").exists()
