"""SIGKILL before and after each create() of a start with device options, with real guests.

The steps are those of the start itself (testing/vtorque_testing/faults.py), with all plugins that
work on this machine. Unit tests cover plugins that need hardware, on a recorded node.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import hooks_by_hand
from device_cases import ONLY_REFUSE
from hooks_by_hand import Hooks
from patience import eventually
from vtorque_core.base.names import Paths
from vtorque_core.resources.kinds import HELPERS
from vtorque_testing.faults import ChildResult, around_create, survive

pytestmark = pytest.mark.e2e

PAIRS = {  # one vCPU and one I/O core: two CPUs
    "vcpu_pinning": "true",
    "iocm": "true",
    "iocm_max_cores": "1",
    "scam": "true",
    "unclot": "true",
    "unclot_shmem": "2M",
}
SETTINGS = """
[plugin.pinning]
emulator_cpu = false

[plugin.scam]
required = false
"""
ELSEWHERE = {
    "passthrough": "needs a PCI card and an IOMMU: tests/unit/testing/test_device_faults.py",
    "vrdma": "needs an image with RDMA programs: tests/e2e/test_vrdma.py, and the same unit test",
}


@dataclass
class HookedJob:
    """A job of the node whose hooks this test runs: a rig for the harness."""

    hooks: Hooks
    steps: list = field(default_factory=list)

    def start(self, last=None):
        code, steps, err = self.hooks.run("prologue", "count" if last is None else str(last))
        if last is not None:
            # The driver reports the step of the kill, the complete start all steps before.
            # Threads do the steps of helpers in any order.
            both = (steps[-1], self.steps[last - 1])
            assert both[0] == both[1] or HELPERS.issuperset(s.split()[-1] for s in both), both
            return ChildResult((*self.steps[: last - 1], steps[-1]), code == -9)
        node = self.hooks.node
        proof = json.loads(Paths(node.state, node.run_dir).proof(self.hooks.job_id).read_text())
        if proof["state"] != "ready":
            return ChildResult(tuple(steps), False, f"{proof}\n{err}", proof["state"])
        self.steps = steps
        return ChildResult(tuple(steps), False)

    def release(self):
        self.hooks.release("epilogue")

    def observe(self):
        return {**hooks_by_hand.observe(self.hooks.node), "started": started_by(self.hooks.node)}


def started_by(node):
    """Return the command lines of all processes that run from the node's directories or in them."""
    places = [f"{path}/".encode() for path in (node.prefix, node.state, node.run_dir)]
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if any(place in words for place in places):
            found.append(words.replace(b"\0", b" ").decode())
    return sorted(found)


@pytest.fixture
def job(node):
    """Return a function that makes a job with these -vm keys; all of them end with the test."""
    # The service reaps old jobs when it starts.
    eventually(lambda: not any(" reap " in words for words in started_by(node)))
    conf = node.config.with_name("device-faults.toml")
    conf.write_text(node.config.read_text() + SETTINGS)
    made = []

    def make(**pairs):
        made.append(
            HookedJob(Hooks(node, f"d{len(made)}.faults", pairs=tuple(pairs.items()), conf=conf))
        )
        return made[-1]

    yield make
    for each in made:
        each.release()
    conf.unlink()


def kinds(steps):
    return {step.removeprefix("before create ") for step in steps if around_create(step)}


def test_every_device_plugin_is_tested_by_this_or_another_file(node):
    done = node.root("vtorque", "plugins", "--json")
    there = {
        plugin["name"]
        for plugin in json.loads(done.stdout)
        if "vtorque_plan" in plugin["hooks"] and ONLY_REFUSE.isdisjoint(plugin["hooks"])
    }
    keys = {"pinning", "iocm", "scam", "unclot"}
    assert there == keys | set(ELSEWHERE)


@pytest.mark.full
def test_start_killed_around_records_of_devices_is_released(clean, job):
    plain = job()
    run = plain.start()
    assert not run.error, run
    plain.release()
    common = kinds(run.steps)
    steps = survive(
        job(**PAIRS),
        lambda step: around_create(step) and step.rpartition(" ")[2] not in common,
        patience=10,
    )
    assert len(steps) >= 4, steps


@pytest.mark.full
def test_start_killed_around_every_create_is_released(clean, job):
    """The two guests have no dedicated CPUs, because this machine has CPUs for only one guest."""
    pairs = {
        **PAIRS,
        "vms_per_node": "2",
        "vcpu_pinning": "false",
        "scam": "false",
        "iocm": "false",
    }
    del pairs["iocm_max_cores"]
    assert len(survive(job(**pairs), patience=10)) > 30
    assert len(survive(job(**PAIRS), patience=10)) > 20
