"""A node that is to get no new jobs, and a job that is to start again, by doubles of the commands.

On the real ones: pbsnodes -o and its notes, qrerun (doc/pool.md, doc/batch-pbs.md).
"""

import pytest

from pbs_harness import PbsHarness
from vtorque_core.base.errors import HostFault


@pytest.fixture(params=["torque", "openpbs"])
def harness(tmp_path, request):
    return PbsHarness(tmp_path, request.param)


@pytest.mark.parametrize("sites", ["", "the site's"])
def test_a_node_is_offline_and_says_why_where_the_site_does_not(harness, sites):
    key = "note" if harness.pbs.system == "torque" else "comment"
    state = harness.pbs.state()
    state["nodes"]["n1"][key] = sites
    harness.pbs.write(state)
    for _ in range(2):
        harness.system.node(harness.site).drain("its disk is slow")
    node = harness.pbs.state()["nodes"]["n1"]
    assert node["state"] == "offline"
    assert node[key] == (sites or "vtorque: its disk is slow")


def test_the_server_says_no_to_a_job_that_does_not_run(harness):
    with pytest.raises(HostFault, match=r"qrerun 7\.srv ended with"):
        harness.system.node(harness.site).requeue("7.srv")
