"""The ledger: all claims of a job or none, exclusive over all jobs of the node."""

import dataclasses
import threading

import pytest

from vtorque_core.api_node import CoreClaim, MemoryClaim, PoolClaim
from vtorque_core.errors import HostFault, Refused
from vtorque_core.journal import JobHeader, Journal, JournalError, read
from vtorque_core.ledger import NodeShare, NoFit, Taken, choose_cores, place, plan
from vtorque_core.names import Paths
from vtorque_core.units import show_mib

NODE = NodeShare(node_cpus=(0, 1, 2, 3), node_mem_mib=8192)
SHARED = dataclasses.replace(NODE, exclusive=False)


@pytest.fixture
def paths(tmp_path):
    return Paths(tmp_path / "state", tmp_path / "run")


def start(paths, job, uid=1000):
    return Journal.start(paths, JobHeader(job, 0, f"u{uid}", uid, "local"))


def vm(vcpus=1, ram=512, **more):
    return (CoreClaim("vcpu", vcpus, **more), MemoryClaim(ram), MemoryClaim(256, use="emulator"))


def leases(journal):
    return {(r.args["pool"], r.args["item"], r.guest) for r in read(journal.path).leases}


def test_a_job_gets_what_it_asks_and_it_is_journalled(paths):
    cards = PoolClaim("card", ("a", "b", "c"), 2)
    journal = start(paths, "1")
    got = place(journal, [(*vm(), cards), (*vm(), PoolClaim("card", ("c",)))], NODE, paths)
    assert [p.memory_mib for p in got] == [768, 768]
    assert [dict(p.leased) for p in got] == [{"card": ("a", "b")}, {"card": ("c",)}]
    assert leases(journal) == {
        ("node", "alone", None),
        ("memory", "g0", 0),
        ("card", "a", 0),
        ("card", "b", 0),
        ("memory", "g1", 1),
        ("card", "c", 1),
    }


def test_items_are_nobody_elses_until_released(paths):
    claim = [(PoolClaim("address", ("10.0.0.1", "10.0.0.2")),)]
    first, second, third = (start(paths, job) for job in "123")
    assert place(first, claim, NODE, paths)[0].leased == {"address": ("10.0.0.1",)}
    assert place(second, claim, NODE, paths)[0].leased == {"address": ("10.0.0.2",)}
    with pytest.raises(HostFault, match="in use by other jobs: address=1: "):
        place(third, claim, NODE, paths)
    assert leases(third) == set()
    first.released(next(r.seq for r in read(first.path).leases if r.args["pool"] == "address"))
    assert place(third, claim, NODE, paths)[0].leased == {"address": ("10.0.0.1",)}


def test_what_the_node_can_never_give_is_refused(paths):
    journal = start(paths, "1")
    for claims, what in (
        ([vm(ram=9000)], r"ram=9256M: .*limit: 8G"),
        ([vm(vcpus=5)], r"vcpus=5: .*limit: 4 CPUs"),
        ([vm(vcpus=2, exclusive=True)] * 3, r"vcpus=6: .*limit: 4 CPUs"),
        ([(PoolClaim("card", ("a",), 2),)], r"card=2: .*limit: 1 on this node"),
        ([(PoolClaim("card", ("a",)),)] * 2, r"card=2: .*1 on this node, 0 free"),
        ([vm(), (PoolClaim("card", ()),)], r"card=1: .*limit: 0 on this node"),
    ):
        with pytest.raises(Refused, match=what):
            place(journal, claims, NODE, paths)
    assert leases(journal) == set()


@pytest.mark.parametrize(
    ("share", "most"),
    [
        ({}, 8192),
        ({"mem_mib": 2048}, 2048),
        ({"mem_mib": 9999}, 8192),
        ({"reserve_mib": 1024}, 7168),
        ({"reserve_mib": 9000}, 0),
    ],
)
def test_memory_with_qemus_own_fits_share_and_node(share, most):
    share = dataclasses.replace(NODE, **share)
    if most:
        assert plan([vm(ram=most - 256)], share, Taken())[0].memory_mib == most
    with pytest.raises(NoFit, match=f"limit: {show_mib(most)}"):
        plan([vm(ram=most - 255 if most else 1)], share, Taken())


def test_memory_is_shared_out_over_jobs(paths):
    place(start(paths, "1"), [vm(ram=5000)], SHARED, paths)
    with pytest.raises(HostFault, match=r"in use by other jobs: ram=.*limit: 2936M"):
        place(start(paths, "2", 2000), [vm(ram=3000)], SHARED, paths)
    place(start(paths, "3", 2000), [vm(ram=2680)], SHARED, paths)


def test_exclusive_cores_are_distinct_and_within_the_share(paths):
    share = dataclasses.replace(NODE, cpus=(1, 2, 3))
    guest = (CoreClaim("vcpu", 1, exclusive=True), CoreClaim("emulator", 1))
    got = place(start(paths, "1"), [guest, guest], share, paths)
    assert [p.cores for p in got] == [
        {"vcpu": (1,), "emulator": (3,)},
        {"vcpu": (2,), "emulator": (3,)},
    ]
    assert got[0].share == (1, 2, 3)
    again = dataclasses.replace(NODE, cpus=(2, 3))
    got = place(start(paths, "2"), [guest], again, paths)
    assert got[0].cores == {"vcpu": (3,), "emulator": ()}
    with pytest.raises(HostFault, match="in use by other jobs: vcpus=1"):
        place(start(paths, "3"), [guest], dataclasses.replace(NODE, cpus=(1, 2)), paths)


def test_shared_cores_may_overlap_but_no_guest_is_larger_than_the_share():
    share = dataclasses.replace(NODE, cpus=(4, 5))
    many = [[CoreClaim("vcpu", 2), CoreClaim("emulator", 1)]] * 4
    assert choose_cores(many, share, frozenset()) == [{"vcpu": (), "emulator": ()}] * 4
    with pytest.raises(NoFit):
        choose_cores([[CoreClaim("vcpu", 3)]], share, frozenset())
    with pytest.raises(NoFit):
        choose_cores([[CoreClaim("vcpu", 2)]], dataclasses.replace(NODE, cpu_count=1), frozenset())


def test_reserved_cores_are_kept_from_jobs_without_ids():
    share = dataclasses.replace(NODE, reserve_cores=1)
    assert plan([vm()], share, Taken())[0].share == (1, 2, 3)
    assert plan([vm()], NODE, Taken())[0].share == ()
    own = dataclasses.replace(share, cpus=(0, 1))
    assert plan([vm(exclusive=True)], own, Taken())[0].cores["vcpu"] == (0,)
    with pytest.raises(NoFit, match="limit: 3 CPUs"):
        plan([vm(vcpus=4)], share, Taken())


KNOWN = dataclasses.replace(NODE, cpus=(0, 1))


@pytest.mark.parametrize(
    ("first", "second", "other_user", "fits"),
    [
        (NODE, NODE, True, False),
        (NODE, NODE, False, True),
        (NODE, KNOWN, True, False),
        (KNOWN, NODE, True, False),
        (KNOWN, KNOWN, True, True),
        (SHARED, SHARED, True, True),
        (SHARED, NODE, True, False),
    ],
)
def test_without_known_ids_the_node_is_one_users(paths, first, second, other_user, fits):
    one = start(paths, "1")
    place(one, [vm()], first, paths)
    two = start(paths, "2", 2000 if other_user else 1000)
    if fits:
        place(two, [vm()], second, paths)
        return
    with pytest.raises(HostFault, match="job 1 of another user has guests here"):
        place(two, [vm()], second, paths)
    assert leases(two) == set()
    one.delete()
    place(two, [vm()], second, paths)


def test_a_journal_that_cannot_be_read_stops_placing(paths):
    """What it holds is unknown, so nothing may be given away."""
    bad = start(paths, "1")
    bad.path.write_bytes(b"garbage\n" + bad.path.read_bytes())
    with pytest.raises(JournalError, match=r"1\.0\.jsonl, line 1"):
        place(start(paths, "2"), [vm()], NODE, paths)
    bad.path.write_bytes(b"")
    place(start(paths, "3"), [vm()], NODE, paths)


def test_pools_of_the_ledger_cannot_be_claimed():
    with pytest.raises(ValueError, match="own"):
        plan([(PoolClaim("memory", ("g0",)),)], NODE, Taken())


def test_jobs_that_start_together_share_nothing(paths):
    items = tuple(str(i) for i in range(6))
    journals = [start(paths, str(job)) for job in range(8)]
    results = []

    def run(journal):
        try:
            results.append(place(journal, [(PoolClaim("card", items),)], NODE, paths)[0].leased)
        except HostFault:
            results.append(None)

    threads = [threading.Thread(target=run, args=(j,)) for j in journals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = [r["card"][0] for r in results if r]
    assert sorted(got) == sorted(items)
    assert results.count(None) == 2
