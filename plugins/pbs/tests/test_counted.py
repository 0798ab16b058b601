"""Other resources that PBS counts: requests, additions, and grants as read by root."""

import json

import pytest

from fake_torque_mom import FakeTorqueMom
from pbs_harness import ME, OpenPbsHarness, TorqueHarness
from torque_node import adapter_at
from vtorque_core.api import UsageError
from vtorque_core.api.batch_system import Grant, Needs
from vtorque_core.api.submission import to_token
from vtorque_pbs import countable_resources
from vtorque_pbs.resources import openpbs_additions, torque_additions
from vtorque_testing.submit import run_vsub

GPUS = Needs(4, None, 0, {"gpus": 2})
NGPUS = Needs(4, None, 0, {"ngpus": 2})
LICENCE = Needs(4, None, 0, {}, {"matlab": 1})


# -- Torque ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "found"),
    [
        ({}, {}),
        ({"nodes": "2:ppn=4"}, {}),
        ({"nodes": "2:ppn=4:gpus=2"}, {"gpus": 2}),
        ({"nodes": "n1:gpus=4:shared+2:ppn=4:gpus=1#excl"}, {"gpus": 1}),
        ({"nodes": "1:ppn=4:xgpus=9"}, {}),
        ({"gpus": "3"}, {"gpus": 3}),
        ({"gres": "matlab:2+ansys"}, {"matlab": 2, "ansys": 1}),
    ],
)
def test_resources_requested_from_torque_are_parsed(resources, found):
    assert countable_resources.torque_counts(resources) == found


@pytest.mark.parametrize(
    ("nodes", "needs", "expected"),
    [
        ("1", GPUS, "1:ppn=4:gpus=2:exclusive_process:vt"),
        ("2:ppn=8:fast", GPUS, "2:ppn=8:fast:gpus=2:exclusive_process:vt"),
        ("2:ppn=8:gpus=4", GPUS, "2:ppn=8:gpus=4:exclusive_process:vt"),
        ("n1:gpus=4:exclusive_thread+n2#excl", GPUS,
         "n1:ppn=4:gpus=4:exclusive_thread:vt+n2:ppn=4:gpus=2:exclusive_process:vt#excl"),
        ("n1:gpus=4:exclusive_thread:vt+n2#excl", GPUS,
         "n1:ppn=4:gpus=4:exclusive_thread:vt+n2#excl"),
        ("1:ppn=8:gpus=4:shared", GPUS, "1:ppn=8:gpus=4:shared:vt"),
        ("1:ppn=8:gpus=4", Needs(4, None), "1:ppn=8:gpus=4:vt"),
    ],
)  # fmt: skip
def test_torque_request_gets_additional_resources(nodes, needs, expected):
    assert torque_additions({"nodes": nodes}, needs, "vt") == {"nodes": expected}


def test_licenses_of_torque_schedulers_are_requested():
    assert torque_additions({}, LICENCE, "vt") == {"nodes": "1:ppn=4:vt", "gres": "matlab:1"}
    assert torque_additions({"gres": "matlab:2"}, LICENCE, "vt") == {"nodes": "1:ppn=4:vt"}
    with pytest.raises(
        UsageError, match="the job needs matlab:1: request all of them in one -l gres="
    ):
        torque_additions({"gres": "ansys"}, LICENCE, "vt")
    with pytest.raises(UsageError, match="ngpus: not supported on Torque, which only counts gpus"):
        torque_additions({}, NGPUS, "vt")
    with pytest.raises(UsageError, match="guests need gpus on each node: request -l nodes=N:ppn=M"):
        torque_additions({"procs": "8"}, GPUS, "vt")
    assert torque_additions({"procs": "8", "gpus": "2"}, GPUS, "vt") == {}


@pytest.mark.parametrize(
    ("exec_gpus", "nodes", "found"),
    [
        ("", "1:ppn=1", {}),
        ("n1-gpu/0", "1:gpus=1", {}),
        ("n1-gpu/0+n1-gpu/3", "1:ppn=4:gpus=2:exclusive_process:vt", {"gpus": Grant(2, (0, 3))}),
        ("n1-gpu/1+n2-gpu/0", "2:gpus=1:Exclusive_Thread", {"gpus": Grant(1, (1,))}),
        ("n2-gpu/1", "1:gpus=1:exclusive_process", {}),
        ("n1-gpu/1", "1:gpus=1:shared", {}),
        ("n1-gpu/1", "1:gpus=1:exclusive_process:default", {}),
        ("n1-gpu/1", "1:gpus=1:exclusive_process+1:gpus=1", {}),
        ("n1-gpu/x+n1-mic/1+n1/1", "1:gpus=1:exclusive_process", {}),
    ],
)
def test_resources_granted_by_torque_are_parsed(exec_gpus, nodes, found):
    """The format of pbs_server 6.1.3; GPUs that other jobs may share are not the job's."""
    assert countable_resources.torque_granted(exec_gpus, nodes, "n1") == found


def test_grant_is_read_from_the_torque_server(tmp_path):
    mom = FakeTorqueMom(tmp_path)
    argv = ["-l", "nodes=1:ppn=2:gpus=1:exclusive_process", "-vm", "ram=1G"]
    assert run_vsub(mom, argv, stdin=b":\n").code == 0
    job = mom.last_input().job_id
    args = ["first", job, "u", "g", "n", "nodes=1,other=vt1:AHsidiI6MX0", "batch"]
    mom.pbs.job(job, exec_host="n1/0-1", state="R", start_count=1)
    assert adapter_at(mom.root, "n1").job(args, {}).granted == {}
    mom.pbs.job(job, exec_gpus="n1-gpu/1")
    assert adapter_at(mom.root, "n1").job(args, {}).granted == {"gpus": Grant(1, (1,))}


def test_qsub_of_torque_gets_additional_resources(tmp_path):
    harness = TorqueHarness(tmp_path)
    (harness.directory / "j.sh").write_text("#!/bin/sh\n#PBS -l nodes=2:ppn=8\n")
    split = harness.system.submitter(harness.site).split(["-I", "-l", "nodes=1:gpus=1"])
    assert split.resources_given == {"gpus": 1}
    ended = run_vsub(harness, ["j.sh"], blob=b'{"v":1}', needs=GPUS)
    assert ended.code == 0, ended
    assert "nodes=2:ppn=8:gpus=2:exclusive_process:vtorque" in harness.last_input().argv


# -- OpenPBS -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "found"),
    [
        ({}, {}),
        ({"select": "2:ncpus=4:ngpus=2:mem=4gb"}, {"ncpus": 4, "ngpus": 2}),
        ({"select": "1:ngpus=4+2:ngpus=1+1:ncpus=1"}, {"ngpus": 1, "ncpus": 1}),
        ({"ngpus": "2", "walltime": "60"}, {"ngpus": 2, "walltime": 60}),
        ({"select": "1:ngpus=²", "matlab": "1"}, {"matlab": 1}),
    ],
)
def test_resources_requested_from_openpbs_are_parsed(resources, found):
    assert countable_resources.openpbs_counts(resources) == found


@pytest.mark.parametrize(
    ("resources", "needs", "found"),
    [
        ({}, NGPUS, {"select": "1:ncpus=4:ngpus=2:vt=True"}),
        ({"select": "2:ncpus=8+1:ngpus=4"}, NGPUS,
         {"select": "2:ncpus=8:ngpus=2:vt=True+1:ngpus=4:ncpus=4:vt=True"}),
        ({"ncpus": "8"}, NGPUS, {"vt": "True", "ngpus": "2"}),
        ({"ncpus": "8", "ngpus": "2"}, NGPUS, {"vt": "True"}),
        ({"nodes": "1:ppn=8"}, LICENCE, {"nodes": "1:ppn=8:vt", "matlab": "1"}),
        ({"select": "1:ncpus=8", "matlab": "2"}, LICENCE, {"select": "1:ncpus=8:vt=True"}),
    ],
)  # fmt: skip
def test_openpbs_request_gets_additional_resources(resources, needs, found):
    assert openpbs_additions(resources, needs, "vt") == found


def test_old_style_openpbs_request_with_node_resources_is_refused():
    with pytest.raises(
        UsageError, match="the job needs ngpus on each node: request -l select=N:ngpus=2"
    ):
        openpbs_additions({"nodes": "1:ppn=8"}, NGPUS, "vt")


CHUNKS = [
    {"ncpus": "2", "ngpus": "1"},
    {"ncpus": "1", "ngpus": "1", "mem": "1gb", "bandwidth": "9"},
]
COUNTS = {"ncpus": Grant(3), "ngpus": Grant(2), "bandwidth": Grant(9)}


def assigned(*names):
    return json.dumps({"cpuset.cpus": [0, 1], "device_names": names, "devices": []}).encode()


@pytest.mark.parametrize(
    ("noted", "ngpus"),
    [
        (b"", Grant(2)),
        (b"{}", Grant(2)),
        (assigned("nvidia0", "nvidia3"), Grant(2, (0, 3))),
        (assigned("nvidia0", "nvidia3", "mic0"), Grant(2, (0, 3))),
        (assigned("nvidia0"), Grant(2)),
        (assigned("nvidia0", "nvidia1", "nvidia2"), Grant(2)),
        (assigned("nvidia0", "nvidia-cap21"), Grant(2)),
    ],
)
def test_resources_granted_by_openpbs_are_parsed(noted, ngpus):
    """Only pbs_cgroups knows which GPUs are assigned; parts of one (MIG) are not cards."""
    assert countable_resources.openpbs_granted(CHUNKS, noted) == COUNTS | {"ngpus": ngpus}


def test_grant_is_read_from_the_openpbs_hook_and_pbs_cgroups(tmp_path):
    harness = OpenPbsHarness(tmp_path)
    words = {
        "id": "7.srv", "owner": ME, "request": to_token(b"{}"), "exec_host": "n1/0*2+n2/0",
        "vnodes": "(n1:ncpus=2:ngpus=1)+(n2:ncpus=1)",
    }  # fmt: skip
    argv = [f"{k}={v}" for k, v in words.items()]
    assert harness.adapter_of("n1").job(argv, {}).granted == {"ncpus": Grant(2), "ngpus": Grant(1)}
    place = tmp_path / "node/spool/mom_priv/hooks/hook_data"
    place.mkdir(parents=True)
    (place / "7.srv").write_bytes(assigned("nvidia1"))
    assert harness.adapter_of("n1").job(argv, {}).granted["ngpus"] == Grant(1, (1,))
    assert harness.adapter_of("n2").job(argv, {}).granted == {"ncpus": Grant(1)}
    other = [word.replace("7.srv", "../hook_data/7.srv") for word in argv]
    assert harness.adapter_of("n1").job(other, {}).granted["ngpus"] == Grant(1)
