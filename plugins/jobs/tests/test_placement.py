"""``vmgr ps --placement``: leases of the ledger, as text and as JSON."""

import os
from dataclasses import replace

import pytest

from vtorque_core.api import JobAttempt, Paths, UsageError
from vtorque_core.api.claims import CoreClaim, MemoryClaim, PoolClaim, RamClaim
from vtorque_core.api.host_topology import NumaNode, Topology
from vtorque_core.live.placement import read_leases
from vtorque_jobs import placement
from vtorque_testing import vmgr
from vtorque_testing.planned import NodeShare, lease

MACHINE = Topology(
    (NumaNode(0, (0, 1, 4, 5), 8192, {2048: 1024}), NumaNode(1, (2, 3, 6, 7), 8192)),
    tuple((n, n + 4) for n in range(4)),
)
NODE = NodeShare(MACHINE, reserve_cores=2, exclusive=False)
EXPECTED = """\
NODE  CPUS     THE HOST'S  FREE CPUS  MEMORY  FREE MEMORY  HUGE PAGES
0     0-1,4-5  0,4         -          8G      8G           2G of 2048 KiB, 1G free
1     2-3,6-7  -           -          8G      7424M        -
JOB     OWNER  CPUS     GUEST  ITS OWN CPUS  MEMORY          ITEMS
41.srv  ada    1,5      0      vcpu 1,5      1G on node 0    -
42.srv  eve    2-3,6-7  0      idle 6, io 2  768M on node 1  card 0000:3b:00.0
"""


@pytest.fixture
def found_table(tmp_path):
    paths = Paths(tmp_path / "state", tmp_path / "run")
    pinned = [
        CoreClaim("vcpu", 2, exclusive=True), MemoryClaim(1024, use="guest"),
        RamClaim(page_kib=2048),
    ]  # fmt: skip
    io = [
        CoreClaim("vcpu", 2), MemoryClaim(768, use="guest"), PoolClaim("card", ("0000:3b:00.0",)),
        CoreClaim("io", 1, whole_cores=True, at_most=2),
    ]  # fmt: skip
    for job, owner, claims, count in (("41.srv", "ada", pinned, 2), ("42.srv", "eve", io, 4)):
        lease(paths, JobAttempt(job, 0, owner, 1000), [claims], replace(NODE, cpu_count=count))
    return placement.describe(read_leases(paths, NODE))


def test_tables_show_the_placement(found_table, capsys):
    placement.show_tables(found_table)
    assert capsys.readouterr().out == EXPECTED


def test_jobs_are_sorted_by_number(tmp_path):
    paths = Paths(tmp_path / "state", tmp_path / "run")
    for job in ("10.srv", "9.srv"):
        lease(paths, JobAttempt(job, 0, "ada", 1000), [[MemoryClaim(256, use="guest")]], NODE)
    found = placement.describe(read_leases(paths, NODE))
    assert [job["id"] for job in found["jobs"]] == ["9.srv", "10.srv"]


def test_json_has_all_fields(found_table):
    eve = found_table["jobs"][1]
    assert eve["guests"] == [
        {
            "index": 0, "cores": {"io": [2], "idle": [6]}, "mib": 768, "nodes": [1],
            "items": {"card": ["0000:3b:00.0"]},
        }
    ]  # fmt: skip
    assert found_table["nodes"][0]["huge_pages"] == [{"kib": 2048, "mib": 2048, "taken_mib": 1024}]


def test_empty_node_is_shown(capsys, tmp_path):
    placement.show_tables(placement.describe(read_leases(Paths(tmp_path, tmp_path), NODE)))
    nodes = capsys.readouterr().out.splitlines()
    assert nodes[1].split()[1:4] == ["0-1,4-5", "0,4", "1,5"]
    assert nodes[-1] == "no guests on this node"


def test_unprivileged_user_is_refused(monkeypatch, tmp_path):
    config = tmp_path / "vtorque.toml"
    config.touch()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="ask your administrator"):
        placement.show(config, False)
    result = vmgr.run(config, "ps", "--placement")
    assert isinstance(result.exception, UsageError)
