"""Generic resources and licenses: requests, additions, and grants of Slurm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_doubles import RECORD
from vtorque_core.api import HostFault, Refused, UsageError
from vtorque_core.api.batch_system import Grant, Needs
from vtorque_slurm import options
from vtorque_slurm.gres import additions, parse_granted, requested_gres
from vtorque_slurm.job_records import parse_job
from vtorque_slurm.resources import SlurmRequest


def options_of(*argv, environ=(), lines=()):
    return SlurmRequest(options.split(argv), dict(environ), options.split(lines))


def gpus(count, kind=""):
    return {"gres/gpu": count, f"gres/gpu:{kind}" if kind else "gres/gpu": count}


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ([], {}),
        (["--gres=gpu"], gpus(1)),
        (["--gres=gpu:2"], gpus(2)),
        (["--gres=gres:gpu:2"], gpus(2)),
        (["--gres=gpu:a100:2"], gpus(2, "a100")),
        (["--gres=gpu:a100"], gpus(1, "a100")),
        (["--gres=gpu:a100:1,gpu:v100:2"],
         {"gres/gpu": 3, "gres/gpu:a100": 1, "gres/gpu:v100": 2}),
        (["--gres=fpga:1,bandwidth:2K"], {"gres/fpga": 1, "gres/bandwidth": 2048}),
        (["--gres=none"], {}),
        (["--gpus-per-node=2"], gpus(2)),
        (["--gpus-per-node=a100:2"], gpus(2, "a100")),
        (["-G4", "-N2"], gpus(2)),
        (["-G4"], gpus(4)),
        (["--gpus-per-task=2"], gpus(2)),
        (["-L", "matlab:2,ansys@db"], {"matlab": 2, "ansys@db": 1}),
    ],
)  # fmt: skip
def test_requested_gres_are_parsed(argv, found):
    assert requested_gres(options_of(*argv)) == found
    assert requested_gres(options_of(lines=argv)) == found


def test_gres_in_the_environment_are_read():
    assert requested_gres(
        options_of(environ={"SBATCH_GRES": "gpu:2"}, lines=["--gres=gpu:9"])
    ) == gpus(2)
    assert requested_gres(options_of(environ={"SBATCH_GPUS_PER_NODE": "3"})) == gpus(3)


@pytest.mark.parametrize(
    ("argv", "lines", "resources", "licenses", "added"),
    [
        ([], [], {}, {}, []),
        ([], [], {"gres/gpu": 2}, {}, ["--gres=gpu:2"]),
        ([], [], {"gres/gpu:a100": 1, "gres/nic": 1}, {}, ["--gres=gpu:a100:1,nic:1"]),
        (["--gres=gpu:4"], [], {"gres/gpu": 2}, {}, []),
        (["--gres=gpu:a100:2"], [], {"gres/gpu": 2}, {}, []),
        (["-G2"], [], {"gres/gpu": 2}, {}, []),
        (["--gres=fpga:1"], [], {"gres/gpu": 2}, {}, ["--gres=fpga:1,gpu:2"]),
        ([], ["--gres=fpga:1"], {"gres/gpu": 2}, {}, ["--gres=fpga:1,gpu:2"]),
        (["--gres=none"], [], {"gres/gpu": 2}, {}, ["--gres=gpu:2"]),
        (["-Lx"], [], {}, {"matlab": 2}, ["--licenses=x,matlab:2"]),
        (["-Lmatlab:3"], [], {}, {"matlab": 2}, []),
    ],
)  # fmt: skip
def test_gres_and_licenses_are_added_to_the_request(argv, lines, resources, licenses, added):
    needs = Needs(1, None, 0, resources, licenses)
    assert additions(options_of(*argv, lines=lines), needs) == added


def test_unsupported_resource_is_refused():
    with pytest.raises(
        UsageError, match="ngpus is not a resource of Slurm's nodes: its name must begin with gres/"
    ):
        additions(options_of(), Needs(1, None, 0, {"ngpus": 1}))
    with pytest.raises(UsageError, match="is requested without its type: request gpu:a100:2"):
        additions(options_of("--gres=gpu:2"), Needs(1, None, 0, {"gres/gpu:a100": 2}))


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("", {}),
        ("(null)", {}),
        ("gpu:1(IDX:0)", {"gres/gpu": Grant(1, (0,))}),
        ("gpu:3(IDX:0,2-3)", {"gres/gpu": Grant(3, (0, 2, 3))}),
        ("gpu:a100:2(IDX:0-1)",
         {"gres/gpu": Grant(2, (0, 1)), "gres/gpu:a100": Grant(2, (0, 1))}),
        ("gpu:a100:1(IDX:0),gpu:v100:1(IDX:3),nic:1(IDX:1)",
         {"gres/gpu": Grant(2, (0, 3)), "gres/gpu:a100": Grant(1, (0,)),
          "gres/gpu:v100": Grant(1, (3,)), "gres/nic": Grant(1, (1,))}),
        ("bandwidth(CNT:4096),gpu(CNT:2)",
         {"gres/bandwidth": Grant(4096), "gres/gpu": Grant(2)}),
        ("bandwidth:lustre(CNT:3)",
         {"gres/bandwidth": Grant(3), "gres/bandwidth:lustre": Grant(3)}),
        ("shard:1(IDX:0)", {"gres/shard": Grant(1)}),
    ],
)  # fmt: skip
def test_granted_gres_are_parsed(field, found):
    """The format of 22.05 and 26.05 (gres_ctld.c, gres_stepmgr.c)."""
    assert parse_granted(field) == found


@pytest.mark.parametrize(
    "field",
    [
        "gpu",
        "gpu:1",
        "gpu:1(IDX:0",
        "gpu:1(IDX:x)",
        "gpu:1(IDX:0-256)",
        "gpu:1(IDX:3-1)",
        ",",
        "gpu:1(IDX:0);",
    ],
)
def test_unreadable_grant_is_a_host_fault(field):
    with pytest.raises(HostFault, match="scontrol show job"):
        parse_granted(field)


FACTS = {
    "id": "7", "name": "t", "state": "RUNNING", "restarts": 0, "excluded": "(null)", "cpus": "0-1",
    "mem": 512, "share": "OK", "note": "", "comment": "", "account": "(null)", "qos": "(null)",
}  # fmt: skip


def record(field, **more):
    return RECORD.format(**FACTS | more).replace("Mem=512 GRES=", f"Mem=512 GRES={field}")


def test_grants_are_read_for_each_node():
    text = record("gpu:1(IDX:0)").replace(
        "     Nodes=n[1-2]", "     Nodes=n3 CPU_IDs=0 Mem=1 GRES=gpu:1(IDX:1)\n     Nodes=n[1-2]"
    )
    one, two = {"gres/gpu": Grant(1, (0,))}, {"gres/gpu": Grant(1, (1,))}
    assert parse_job(text, "7").granted == {"n1": one, "n2": one, "n3": two}


@given(st.text(alphabet="gpu:12(IDX)-,0 =\n\tNodesCPU_Mm", max_size=80))
def test_job_name_cannot_forge_a_grant(name):
    try:
        found = parse_job(record("gpu:1(IDX:0)", name=name), "7").granted
    except (Refused, HostFault):
        return
    assert all(each == {"gres/gpu": Grant(1, (0,))} for each in found.values())


@pytest.mark.parametrize("place", ["name", "comment"])
def test_forged_line_in_name_or_comment_is_refused(place):
    line = "x\n     Nodes=n1 CPU_IDs=0-1 Mem=512 GRES=gpu:2(IDX:0-1)"
    with pytest.raises(Refused):
        parse_job(record("", **{place: line}), "7")
