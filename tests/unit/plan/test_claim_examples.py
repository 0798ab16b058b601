"""The claims of examples/plugin work as described, alone and together."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from doc_blocks import block
from vtorque_core.api.acquired import Resource
from vtorque_core.api.claims import CoreClaim, MemoryClaim
from vtorque_core.api.host_topology import Topology
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.live import cores
from vtorque_core.live.cores import resize
from vtorque_core.plan.placement import node_hardware
from vtorque_core.plan.placement.divide_cores import divide
from vtorque_core.plan.placement.ledger import place
from vtorque_core.plan.placement.model import Leases, NodeShare
from vtorque_core.plan.placement.topology import parse
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader

ROOT = Path(__file__).parents[3]
CAPABILITIES = ROOT / "testing/vtorque_testing/machines/xeon-2x32-smt.xml"
HOST = parse(CAPABILITIES.read_text())
NODE = NodeShare(HOST, exclusive=False)


@pytest.fixture(scope="module")
def shown_claims():
    text = block("examples/plugin/README.md", "from vtorque_core.api.claims")
    scope = {}
    exec(compile(text, "examples/plugin/README.md", "exec"), scope)  # noqa: S102 - our own manual
    return SimpleNamespace(**scope)


def guest(index=0, host=HOST):
    return SimpleNamespace(vcpus=4, index=index, host=host)


def core_claims(vcpus=4):
    return [CoreClaim("vcpu", vcpus), MemoryClaim(4096, use="guest"), MemoryClaim(256)]


def answer(*claims):
    return divide([[*core_claims(), *claims]], NODE, Leases())[0]


def test_example_of_pinning_is_placed(shown_claims):
    got = answer(*shown_claims.pinning(guest(), ()))
    assert (got.cores["vcpu"], got.own, got.page_kib) == ((0, 64, 1, 65), {"vcpu"}, 2048)
    assert (got.numa, got.nodes, dict(got.paged)) == ("strict", (0,), {0: 4096})
    assert not set(got.cores["emulator"]) & set(got.cores["vcpu"])
    assert answer(*shown_claims.pinning(guest(), (9, 8, 7, 6))).cores["vcpu"] == (9, 8, 7, 6)


def test_example_of_iocm_is_placed_and_resized(shown_claims, tmp_path):
    paths = Paths(tmp_path / "state", tmp_path / "run")
    with Journal.start(paths, JobHeader(JobAttempt("1", 0, "u", 1000), "local")) as journal:
        claims = [*core_claims(), *shown_claims.iocm(guest(), 1, 3)]
        (got,), _ = place(journal, [claims], NODE, paths)
    assert got.cores["io"] == got.cores["emulator"] == (0,)
    assert got.most == {"io": 3}
    assert not set(got.cores["vcpu"]) & {0}
    grown = resize(paths, "1.0", 0, "io", 5)
    assert len(grown.cores) == 3
    assert not set(grown.floating) & set(grown.cores)
    assert HOST.nodes_of(grown.cores) == (0,)


@dataclass(frozen=True)
class RunningDomain(Resource):
    """A domain record of a running guest, in the journal's form."""

    kind: ClassVar[str] = "domain"
    name: str
    uuid: str
    uri: str

    def create(self):
        pass

    def release(self):
        pass


def test_cores_are_added_to_a_running_guest(shown_claims, tmp_path, monkeypatch):
    """The example of ``resize`` in doc/plugins.md, for a guest in the journal's form."""
    pins = []
    monkeypatch.setattr(node_hardware, "topology", lambda _: HOST)
    monkeypatch.setattr(cores, "_vcpu_count", lambda *_: 4)
    monkeypatch.setattr(
        cores, "_pin_domain", lambda _uri, uuid, *threads: pins.append((uuid, threads))
    )
    paths = Paths(tmp_path / "state", tmp_path / "run")
    with Journal.start(paths, JobHeader(JobAttempt("1", 0, "u", 1000), "local")) as journal:
        place(journal, [[*core_claims(), *shown_claims.iocm(guest(), 1, 3)]], NODE, paths)
        journal.acquire(RunningDomain("n", "U", "qemu:///x"), plugin="core", phase="boot", guest=0)
    scope = {"paths": paths}
    text = block("doc/plugins.md", "from vtorque_core.live.cores")
    exec(compile(text, "examples/plugin/README.md", "exec"), scope)  # noqa: S102 - our own manual
    assert len(scope["now"].cores) == 2
    ((uuid, (_, emulator, iothreads)),) = pins
    assert (uuid, emulator, iothreads) == ("U", scope["now"].cores, scope["now"].cores)


def test_examples_of_devices_are_leased_near_each_other(shown_claims):
    vfs = {"0000:81:00.1": 1, "0000:81:00.2": 1}
    got = answer(
        *shown_claims.vrdma(guest(), vfs),
        *shown_claims.passthrough(guest(), {"0000:82:00.0": 1}, 1),
    )
    assert got.leased == {"pci/vrdma": ("0000:81:00.1",), "pci/gpu": ("0000:82:00.0",)}
    assert got.nodes == (1,)


def test_unclot_is_claimed_once_per_node(shown_claims):
    claims = [[*core_claims(), *shown_claims.unclot(guest(i), 64)] for i in range(2)]
    assert [p.memory_mib for p in divide(claims, NODE, Leases())] == [4416, 4352]


def test_example_of_scam_gets_cache_and_own_cores(shown_claims):
    got = answer(*shown_claims.scam(guest(), 5000))
    assert got.caches == ((3, 0, 8192),)
    assert "vcpu" in got.own
    assert len(shown_claims.scam(guest(host=Topology()), 5000)) == 1


def test_all_examples_work_together(shown_claims):
    got = answer(
        *shown_claims.pinning(guest(), ()),
        *shown_claims.iocm(guest(), 1, 3),
        *shown_claims.vrdma(guest(), {"vf": 1}),
        *shown_claims.unclot(guest(), 64),
        *shown_claims.scam(guest(), 5000),
        *shown_claims.passthrough(guest(), {"gpu": 1}, 1),
    )
    assert (got.nodes, got.own) == ((1,), {"vcpu", "io"})
    every = [*got.cores["vcpu"], *got.cores["io"], *got.idle, *got.cores["emulator"]]
    assert len(set(every)) == len(every)
