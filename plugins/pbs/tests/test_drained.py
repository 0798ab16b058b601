"""Drained nodes and requeued jobs, with doubles of the commands.

Behavior of the real commands: pbsnodes -o and its notes, qrerun (doc/pool.md, doc/batch-pbs.md).
"""

import pytest

from pbs_harness import PbsHarness
from vtorque_core.api import HostFault, Refused


@pytest.fixture(params=["torque", "openpbs"])
def harness(tmp_path, request):
    return PbsHarness(tmp_path, request.param)


@pytest.mark.parametrize("sites", ["", "a note of the site"])
def test_drained_node_is_offline_with_a_note(harness, sites):
    key = "note" if harness.pbs.system == "torque" else "comment"
    state = harness.pbs.state()
    state["nodes"]["n1"][key] = sites
    harness.pbs.write(state)
    its = harness.system.node(harness.site)
    for reason in ("it asks", "its disk is slow"):
        its.drain(reason)
    node = harness.pbs.state()["nodes"]["n1"]
    assert node["state"] == "offline"
    assert node[key] == (sites or "vtorque: drained: its disk is slow")
    assert its.drained() == ("n1", {} if sites else {"n1": "its disk is slow"})
    its.undrain()
    assert harness.pbs.state()["nodes"]["n1"]["state"] == ("offline" if sites else "free")
    assert its.drained()[1] == {}


def test_drain_on_a_node_with_a_site_note_is_refused(harness):
    state = harness.pbs.state()
    state["nodes"]["n1"]["note" if harness.pbs.system == "torque" else "comment"] = "rack 7"
    harness.pbs.write(state)
    with pytest.raises(
        Refused,
        match="node n1 already has a comment, so vTorque cannot record the drain",
    ):
        harness.system.node(harness.site).drained()


def test_doctor_mark_keeps_the_drain_note(harness):
    its = harness.system.node(harness.site)
    its.drain("its disk is slow")
    for healthy in (True, False):
        its.mark(healthy, "x")
        assert its.drained()[1] == {"n1": "its disk is slow"}


def test_requeue_of_a_job_that_is_not_running_fails(harness):
    with pytest.raises(HostFault, match=r"qrerun 7.srv ended with exit code"):
        harness.system.node(harness.site).requeue("7.srv")
