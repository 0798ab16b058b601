"""A running job that is held and restarts on its node, with doubles of the commands.

Behavior of the real commands: doc/batch-pbs.md, "Holds".
"""

import pytest

from patience import eventually
from pbs_harness import PbsHarness
from vtorque_core.api import HostFault, Refused
from vtorque_core.api.batch_system import JobState
from vtorque_pbs import batch_commands

JOB = "7.server"


@pytest.fixture(params=["torque", "openpbs"])
def harness(tmp_path, request):
    found = PbsHarness(tmp_path, request.param)
    where = "n1/0-1" if request.param == "torque" else "n1/0*2"
    asked = (
        {"nodes": "1:ppn=2:vtorque"}
        if request.param == "torque"
        else {"select": "1:ncpus=2:mem=1gb:vtorque=True"}
    )
    job = {
        "name": "x", "owner": "ada", "state": "R", "hold": "u", "exec_host": where,
        "resources": asked, "variables": {}, "start_count": 1, "interactive": False,
    }  # fmt: skip
    found.pbs.change(jobs={JOB: job})
    found.its = found.system.node(found.site)
    return found


def test_only_a_running_held_job_is_reported_as_held(harness):
    ids = [JOB, "9.server"]
    assert harness.its.alive_and_held(ids) == (
        {JOB: JobState.ALIVE, "9.server": JobState.GONE},
        {JOB},
    )
    for change in ({"hold": "n"}, {"hold": "u", "state": "H", "exec_host": ""}):
        harness.pbs.job(JOB, **change)
        assert harness.its.alive_and_held(ids)[1] == set()


def test_requeued_job_starts_only_on_its_node(harness, monkeypatch):
    """On Torque qrerun ends before the job. The job may have been held before."""
    monkeypatch.setattr(batch_commands, "RERUN_TIME", 0.0)
    where, wanted = {
        "torque": ("n1/0-1", {"nodes": "n1:ppn=2:vtorque"}),
        "openpbs": ("n1/0*2", {"select": "1:ncpus=2:mem=1gb:vtorque=True:host=n1"}),
    }[harness.pbs.system]
    for _ in range(2):
        harness.pbs.job(JOB, state="R", exec_host=where, rerun=False)
        harness.its.requeue_here(JOB)
        eventually(lambda: harness.pbs.state()["calls"][-1][0] == "qalter")
        eventually(lambda: harness.pbs.state()["jobs"][JOB]["state"] == "H")
        eventually(lambda: harness.pbs.state()["jobs"][JOB]["resources"] == wanted)
        harness.pbs.change(calls=[])


@pytest.mark.parametrize("asked", ["2:ppn=1", "1:ppn=1+n1:ppn=1", "", "1:ppn=1,walltime=9:0:0"])
def test_job_with_several_parts_is_not_requeued_here(harness, asked):
    resources = {"nodes": asked}
    if harness.pbs.system == "openpbs":
        resources = {"select": asked.replace("ppn", "ncpus")}
    harness.pbs.job(JOB, resources=resources)
    with pytest.raises(Refused, match="cannot be requeued on this node"):
        harness.its.requeue_here(JOB)
    assert not harness.pbs.state()["jobs"][JOB].get("rerun")


def test_failed_requeue_restores_the_resources_of_the_job(harness):
    before = harness.pbs.job(JOB, state="Q")["resources"]
    with pytest.raises(HostFault, match="qrerun"):
        harness.its.requeue_here(JOB)
    assert harness.pbs.state()["jobs"][JOB]["resources"] == before


def test_job_released_in_between_is_not_requeued(harness):
    harness.pbs.job(JOB, hold="n")
    with pytest.raises(Refused, match="is no longer held"):
        harness.its.requeue_here(JOB)
    assert not harness.pbs.state()["jobs"][JOB].get("rerun")
