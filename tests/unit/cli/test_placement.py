"""``vmgr ps --placement``: what the ledger holds, as text and as JSON."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from vtorque_core.api_claims import CoreClaim, MemoryClaim, PoolClaim, RamClaim
from vtorque_core.api_topology import NumaNode, Topology
from vtorque_core.cli import placement
from vtorque_core.cli.vmgr import vmgr
from vtorque_core.errors import UsageError
from vtorque_core.journal import JobHeader, Journal
from vtorque_core.ledger import NodeShare, place, states
from vtorque_core.names import Paths

MACHINE = Topology(
    (NumaNode(0, (0, 1, 4, 5), 8192, {2048: 1024}), NumaNode(1, (2, 3, 6, 7), 8192)),
    tuple((n, n + 4) for n in range(4)),
)
NODE = NodeShare(MACHINE.cpus, MACHINE.mem_mib, topology=MACHINE, reserve_cores=2, exclusive=False)
EXPECTED = """\
NUMA node 0: 2 cores, 8G, 8G not taken
  huge pages of 2048 KiB: 2G, 1G free
  cores [hh][AA]
NUMA node 1: 2 cores, 8G, 7424M not taken
  cores [BB][bb]
A 41.srv ada: CPUs 1,5
    guest 0:  vcpu 1,5  1G on node 0
B 42.srv eve: CPUs 2-3,6-7
    guest 0:  idle 6  io 2  768M on node 1  card 0000:3b:00.0
upper case: a guest's own; lower case: the job's, shared by its guests; * several jobs'; \
h the host's; . free; [SMT siblings]"""


@pytest.fixture
def found(tmp_path):
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
        with Journal.start(paths, JobHeader(job, 0, owner, 1000, "local")) as journal:
            share = NodeShare(**{**vars_of(NODE), "cpu_count": count})
            place(journal, [claims], share, paths)
    return placement.describe(states(paths), NODE)


def vars_of(share):
    return {name: getattr(share, name) for name in share.__dataclass_fields__}


def test_the_picture(found):
    assert "\n".join(placement.picture(found)) == EXPECTED


def test_in_a_terminal_it_has_the_same_text_in_color(found, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    colored = placement._colored(placement.picture(found))
    assert "\x1b[1;36mAA\x1b[0m" in colored
    assert "\x1b[32mb\x1b[0m" in placement._colored(["  cores AbBh."])
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == EXPECTED


def test_json_has_it_all(found):
    eve = found["jobs"][1]
    assert eve["guests"] == [
        {
            "index": 0, "cores": {"io": [2], "idle": [6]}, "mib": 768, "nodes": [1],
            "items": {"card": ["0000:3b:00.0"]},
        }
    ]  # fmt: skip
    assert found["nodes"][0]["huge_pages"] == [{"kib": 2048, "mib": 2048, "taken_mib": 1024}]


def test_an_empty_node():
    lines = placement.picture(placement.describe([], NODE))
    assert lines[2] == "  cores [hh][..]"
    assert lines[-1] == "no guests on this node"


def test_users_are_told_to_ask(monkeypatch):
    monkeypatch.setattr(placement.os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="ask your administrator"):
        placement.show(Path("/nonexistent"), False)
    result = CliRunner().invoke(vmgr, ["ps", "--placement"])
    assert isinstance(result.exception, UsageError)
