"""Mixed requests: arguments of qsub, and nodes with guests, with doubles of qstat."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbs_harness import ME, OpenPbsHarness, TorqueHarness
from vtorque_core.api import Refused
from vtorque_core.api.batch_system import BareNode, Needs, PeerGuest
from vtorque_core.api.guest_context import GuestFile
from vtorque_core.api.submission import to_token
from vtorque_pbs.mixed_requests import (
    openpbs_places,
    require_guests_first,
    select_guest_parts,
    torque_places,
)
from vtorque_pbs.resources import openpbs_given, torque_given
from vtorque_testing.submit import run_vsub

BLOB = b'{"v":1}'
NEEDS = Needs(4, 2304, 60)
HARNESSES = {"torque": TorqueHarness, "openpbs": OpenPbsHarness}


@pytest.mark.parametrize(
    ("parts", "guests"),
    [
        ("1:ppn=2", [True]),
        ("1:ppn=2+4:ppn=8", [True, True]),
        ("1:ppn=2:vtorque+4:ppn=8", [True, False]),
        ("n1:ppn=2:vtorque+4:ppn=8:fast", [True, False]),
        ("1:ncpus=2:vtorque=True+4:ncpus=8", [True, False]),
        ("1:vtorque=t+1:vtorque=False+1:vtorque=1", [True, False, True]),
        ("1:novtorque+2:xvtorque", [True, True]),
    ],
)
def test_parts_with_the_property_or_all_parts_have_guests(parts, guests):
    assert select_guest_parts(parts.split("+"), "vtorque") == guests
    assert select_guest_parts(parts.split("+"), "") == [True] * len(guests)


@pytest.mark.parametrize(
    ("system", "argv", "added"),
    [
        ("torque", "-l nodes=1:vtorque+4:ppn=8", "-l nodes=1:ppn=4:vtorque+4:ppn=8"),
        ("torque", "-l nodes=2:ppn=4:vtorque+2#shared", ""),
        ("openpbs", "-l select=1:vtorque=True+4:ncpus=8:mpiprocs=2",
         "-l select=1:vtorque=True:ncpus=4:mem=2304mb+4:ncpus=8:mpiprocs=2"),
        ("openpbs", "-l nodes=1:vtorque+4:ppn=8", "-l nodes=1:ppn=4:vtorque+4:ppn=8"),
    ],
)  # fmt: skip
def test_parts_without_guests_are_not_changed(tmp_path, system, argv, added):
    """Memory is not requested from Torque either: it would apply to the whole job."""
    harness = HARNESSES[system](tmp_path)
    ended = run_vsub(harness, shlex.split(argv), stdin=b":\n", blob=BLOB, needs=NEEDS)
    assert ended.code == 0, ended
    words = " ".join(harness.last_input().argv)
    assert (
        words.removeprefix(argv)
        .replace(str(harness.paths.jobshell), "S")
        .startswith(" ".join(["", "-S", "S", *added.split(), "-l" if system == "torque" else "-v"]))
    )


@pytest.mark.parametrize(
    ("system", "asked"),
    [("torque", "nodes=4:ppn=8+1:vtorque"), ("openpbs", "select=4+1:vtorque=True+1"),
     ("openpbs", "nodes=4+1:vtorque")],
)  # fmt: skip
def test_script_runs_in_the_first_part(tmp_path, system, asked):
    harness = HARNESSES[system](tmp_path)
    ended = run_vsub(harness, ["-l", asked], stdin=b":\n", blob=BLOB, needs=NEEDS)
    assert ended.code != 0
    assert b"first" in ended.stderr
    assert harness.last_input() is None


def test_size_is_read_from_the_parts_with_guests():
    nodes = {"nodes": "2:ppn=4:vt+8:ppn=1", "pmem": "1gb"}
    assert (torque_given(nodes, "vt").cpus, torque_given(nodes, "vt").mib) == (4, 4096)
    found = openpbs_given({"select": "1:ncpus=8:mem=4gb:vt=True+4:ncpus=2:mem=1gb"}, "vt")
    assert (found.cpus, found.mib) == (8, 4096)


HAS = dict.fromkeys(("n1", "n2"), ("vt",)) | {"n3": ("fast",), "n4": ()}


@pytest.mark.parametrize(
    ("nodes", "placed", "guests"),
    [
        ("1:ppn=2:vt+2:ppn=8", [("n4", 8), ("n3", 8), ("n1", 2)], ["n1"]),
        # The numbers are equal: by the properties, the first match.
        ("1:ppn=2:vt+1:ppn=2", [("n3", 2), ("n1", 2)], ["n1"]),
        ("1:ppn=2:vt+1:ppn=2", [("n2", 2), ("n1", 2)], ["n2"]),
        ("1:ppn=2:vt+n2:ppn=2", [("n2", 2), ("n1", 2)], ["n1"]),
        ("1:ppn=2:vt+1:fast:ppn=2", [("n3", 2), ("n1", 2)], ["n1"]),
        ("1:vt+1:ppn=1", [("n1", 1), ("n1", 1)], ["n1"]),
        ("2:ppn=2:vt:gpus=1+1#shared", [("n1", 2), ("n4", 1), ("n2", 2)], ["n1", "n2"]),
    ],
)
def test_nodes_of_torque_with_guests_are_found(nodes, placed, guests):
    found = torque_places(nodes, placed, "vt", HAS)
    assert [(place.node, place.slots) for place in found] == placed
    assert [place.node for place in found if place.guests] == guests


@pytest.mark.parametrize(
    "placed", [[("n3", 2), ("n4", 8)], [("n1", 2)], [("n1", 3), ("n4", 8)], [("x", 2), ("n4", 8)]]
)
def test_placement_that_does_not_match_the_request_is_refused(placed):
    """No node is at fault: a scheduler may have combined two parts."""
    with pytest.raises(Refused, match="ppn"):
        torque_places("1:ppn=2:vt+1:ppn=8", placed, "vt", HAS)


@given(st.permutations([("n1", 2), ("n2", 2), ("n3", 2), ("n4", 4)]))
def test_number_of_nodes_with_guests_matches_the_request(placed):
    found = torque_places("1:ppn=2:vt+1:ppn=4+1:ppn=2+1:ppn=2:fast", placed, "vt", HAS)
    (node,) = [place.node for place in found if place.guests]
    assert node == next(name for name, _ in placed if "vt" in HAS[name])


def test_openpbs_chunks_are_in_the_order_of_the_request():
    select = "1:ncpus=2:vt=True+2:ncpus=8:mpiprocs=4"
    placed = [("n2", 2), ("n2", 8), ("n1", 8)]
    found = openpbs_places(select, placed, "vt")
    assert [(p.slots, p.guests) for p in found] == [(2, True), (4, False), (4, False)]
    with pytest.raises(Refused):
        openpbs_places(select, placed[:2], "vt")
    with pytest.raises(Refused):
        require_guests_first([False, True])


def node_file(adapter, job):
    items = adapter.context(job, [PeerGuest("vn1", 2)])
    files = [item for item in items if isinstance(item, GuestFile) and "aux" in item.path]
    return files[0].content.decode().split()


def test_root_on_torques_nodes(tmp_path):
    harness = TorqueHarness(tmp_path)
    asked = "nodes=1:ppn=2:vtorque+2:ppn=1,pmem=1gb"
    run_vsub(harness, ["-l", asked], stdin=b":\n", blob=BLOB, needs=NEEDS)
    job_id = harness.last_input().job_id

    def job(node, exec_host, kind="first"):
        harness.pbs.job(job_id, exec_host=exec_host, state="R", start_count=1)
        other = f"{asked},other={to_token(BLOB)}"
        words = [kind, job_id, ME, "g", "STDIN", other, "batch", ""]
        adapter = harness.adapter_of(node)
        return adapter, adapter.job(words, {})

    adapter, first = job("n1", "n1/0-1+n3/0+n2/0")
    assert (first.nodes, first.cpu_count, first.mem_mib) == (("n1",), 2, 2048)
    assert first.bare == (BareNode("n3", 1), BareNode("n2", 1))
    assert node_file(adapter, first) == ["vn1", "vn1", "n3", "n2"]
    for node in ("n2", "n3"):
        assert job(node, "n1/0-1+n3/0+n2/0", "sister")[1].blob is None
    for node in ("n1", "n3"):  # the job shell has to find the reason in its place
        assert "last in Torque's list" in job(node, "n3/0+n2/0+n1/0-1")[1].bad_request
    _, shared = job("n1", "n1/1+n1/2-3+n2/0")  # two parts on one node, the bare one named first
    assert (shared.nodes, shared.cpu_count, shared.bad_request) == (("n1",), 2, "")
    assert shared.bare == (BareNode("n1", 1), BareNode("n2", 1))
    _, odd = job("n1", "n1/0-2+n3/0+n2/0")
    assert "ppn" in odd.bad_request


def test_root_on_openpbs_nodes(tmp_path):
    harness = OpenPbsHarness(tmp_path)
    words = {
        "id": "7.srv", "owner": ME, "request": to_token(BLOB),
        "select": "1:ncpus=2:mem=1gb:vtorque=True+2:ncpus=4:mpiprocs=1",
        "exec_host": "n1:15002/0*2+n1:15002/1*4+n2:15002/0*4",
        "vnodes": "(n1:ncpus=2:mem=1gb)+(n1:ncpus=4)+(n2:ncpus=4)",
    }  # fmt: skip

    def job(node, **more):
        adapter = harness.adapter_of(node)
        return adapter, adapter.job([f"{k}={v}" for k, v in (words | more).items()], {})

    adapter, first = job("n1")
    assert (first.nodes, first.cpu_count, first.cpu_counts) == (("n1",), 2, (2,))
    assert (first.mem_mib, first.bad_request) == (1024, "")
    assert first.bare == (BareNode("n1", 1), BareNode("n2", 1))
    assert node_file(adapter, first) == ["vn1", "vn1", "n1", "n2"]
    assert job("n2")[1].blob is None
    select = "2:ncpus=4+1:ncpus=2:vtorque=True"
    assert "first" in job("n1", select=select)[1].bad_request
