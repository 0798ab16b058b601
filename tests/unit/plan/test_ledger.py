"""The ledger: all claims of a job or none, exclusive over all jobs of the node."""

import dataclasses
import threading

import pytest

from vtorque_core.api.batch_system import BatchJob
from vtorque_core.api.claims import CoreClaim, MemoryClaim, PoolClaim
from vtorque_core.api.host_topology import flat
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.base.names import JobAttempt
from vtorque_core.base.sizes import show_mib
from vtorque_core.config.site_config import Site
from vtorque_core.live import cores as live_cores
from vtorque_core.live.cores import ResizeResult, resize
from vtorque_core.plan.job_context import node_share
from vtorque_core.plan.placement import ledger, node_hardware
from vtorque_core.plan.placement.divide_cores import divide
from vtorque_core.plan.placement.ledger import InUse, leased_resources
from vtorque_core.plan.placement.model import Leases, NodeShare, NoFit
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader, JournalError, read, walk

NODE = NodeShare(flat((0, 1, 2, 3), 8192))
SHARED = dataclasses.replace(NODE, exclusive=False)


def start(paths, job, uid=1000):
    return Journal.start(paths, JobHeader(JobAttempt(job, 0, f"u{uid}", uid), "local"))


def place(*args, **more):
    return ledger.place(*args, **more)[0]


def vm(vcpus=1, ram=512, **more):
    return (CoreClaim("vcpu", vcpus, **more), MemoryClaim(ram), MemoryClaim(256, use="emulator"))


def leases(journal):
    return {(r.args["pool"], r.args["item"], r.guest) for r in read(journal.path).leases}


def test_job_gets_its_claims_and_they_are_journaled(paths):
    cards = PoolClaim("card", ("a", "b", "c"), 2)
    journal = start(paths, "1")
    got = place(journal, [(*vm(), cards), (*vm(), PoolClaim("card", ("c",)))], NODE, paths)
    assert [p.memory_mib for p in got] == [768, 768]
    assert [dict(p.leased) for p in got] == [{"card": ("a", "b")}, {"card": ("c",)}]
    assert leases(journal) == {
        ("node", "alone", None),
        ("share", "cpus", None),
        ("memory", "g0", 0),
        ("card", "a", 0),
        ("card", "b", 0),
        ("memory", "g1", 1),
        ("card", "c", 1),
    }


def test_leased_item_is_unavailable_until_released(paths):
    claim = [(PoolClaim("address", ("10.0.0.1", "10.0.0.2")),)]
    first, second, third = (start(paths, job) for job in "123")
    assert place(first, claim, NODE, paths)[0].leased == {"address": ("10.0.0.1",)}
    assert place(second, claim, NODE, paths)[0].leased == {"address": ("10.0.0.2",)}
    with pytest.raises(HostFault, match="in use by other jobs: address=1: "):
        place(third, claim, NODE, paths)
    assert leases(third) == set()
    first.released(next(r.seq for r in read(first.path).leases if r.args["pool"] == "address"))
    assert place(third, claim, NODE, paths)[0].leased == {"address": ("10.0.0.1",)}


def test_items_reserved_by_plugins_are_not_leased(paths):
    claim = [(PoolClaim("address", ("10.0.0.1", "10.0.0.2", "10.0.0.3")),)]
    gone = ("10.0.0.1", "10.0.0.3")
    away = [*(PoolClaim("address", (item,)) for item in gone), PoolClaim("card", ("a",))]
    got = place(start(paths, "1"), claim, NODE, paths, away=away)
    assert got[0].leased == {"address": ("10.0.0.2",)}
    with pytest.raises(HostFault, match="in use by other jobs: address=1: "):
        place(start(paths, "2"), claim, NODE, paths, away=away)


def test_claim_that_never_fits_the_node_is_refused(paths):
    journal = start(paths, "1")
    for claims, what in (
        ([vm(ram=9000)], r"ram=9000M: .*need 9256M .*limit: 8G"),
        ([vm(vcpus=5)], r"vcpus=5: .*limit: 4 CPUs"),
        ([vm(vcpus=2, exclusive=True)] * 3, r"vcpus=2: 6 exclusive CPUs .*limit: 4 CPUs"),
        ([(PoolClaim("card", ("a",), 2),)], r"card=2: .*limit: 1 on this node"),
        ([(PoolClaim("card", ("a",)),)] * 2, r"card=2: .*1 on this node, 0 free"),
        ([(PoolClaim("card", (), key="pci"),)], r"pci=1: .* need 1 of card .*request less"),
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
def test_memory_and_qemu_overhead_fit_share_and_node(share, most):
    share = dataclasses.replace(NODE, **share)
    if most:
        assert divide([vm(ram=most - 256)], share, Leases())[0].memory_mib == most
    with pytest.raises(NoFit, match=f"limit: {show_mib(most)}"):
        divide([vm(ram=most - 255 if most else 1)], share, Leases())


def test_memory_is_shared_by_jobs(paths):
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
    # A share that overlaps, as from batch systems with oversubscription:
    for cpus in ((2, 3), (1, 2)):
        with pytest.raises(HostFault, match="in use by other jobs: vcpus=1"):
            place(start(paths, str(cpus)), [guest], dataclasses.replace(NODE, cpus=cpus), paths)
    floating = [(CoreClaim("vcpu", 1),)]
    shared = dataclasses.replace(NODE, cpus=(2, 3))
    assert place(start(paths, "2"), floating, shared, paths)[0].cores["vcpu"] == (3,)


def test_floating_core_of_another_job_is_not_leased_exclusively(paths):
    place(start(paths, "1"), [vm()], dataclasses.replace(SHARED, cpus=(0, 1)), paths)
    got = place(start(paths, "2"), [vm(exclusive=True)], SHARED, paths)
    assert got[0].cores["vcpu"] == (2,)
    with pytest.raises(HostFault, match="in use by other jobs"):
        place(start(paths, "3"), [vm(2, exclusive=True)], SHARED, paths)


def test_shared_cores_may_overlap_but_guests_fit_the_share():
    share = dataclasses.replace(NODE, cpus=(2, 3))
    many = [[CoreClaim("vcpu", 2), CoreClaim("emulator", 1)]] * 4
    assert [p.cores for p in divide(many, share, Leases())] == [
        {"vcpu": (2, 3), "emulator": (2, 3)}
    ] * 4
    with pytest.raises(NoFit):
        divide([[CoreClaim("vcpu", 3)]], share, Leases())
    with pytest.raises(NoFit):
        divide([[CoreClaim("vcpu", 2)]], dataclasses.replace(NODE, cpu_count=1), Leases())


def test_ledger_chooses_cpus_for_a_count_without_ids(paths):
    share = dataclasses.replace(SHARED, cpu_count=2)
    one, two = (place(start(paths, str(j)), [vm(2)], share, paths)[0] for j in (1, 2))
    assert (one.cores["vcpu"], two.cores["vcpu"]) == ((0, 1), (2, 3))
    assert (one.share, two.share) == ((0, 1), (2, 3))
    more = place(start(paths, "3"), [vm(1)], dataclasses.replace(share, cpu_count=1), paths)[0]
    assert more.cores["vcpu"] == (0,)  # the batch system has given more than exists
    whole = dataclasses.replace(share, whole_node=True)
    assert divide([vm(2)], whole, Leases())[0].share == ()


@pytest.mark.parametrize("known", [{}, {"whole_node": True}, {"whole_user": True}])
def test_other_users_are_excluded_unless_the_batch_system_does(paths, monkeypatch, known):
    monkeypatch.setattr(node_hardware, "topology", lambda _: NODE.machine)
    share = node_share(BatchJob("1", "u1", "n", ("n",), b"", **known), Site())
    assert share.is_exclusive is not bool(known)
    place(start(paths, "2", uid=1001), [vm()], SHARED, paths)
    if known:
        place(start(paths, "1"), [vm()], share, paths)
        return
    with pytest.raises(HostFault, match="another user"):
        place(start(paths, "1"), [vm()], share, paths)


def test_reserved_cores_are_kept_from_jobs_without_ids():
    share = dataclasses.replace(NODE, reserve_cores=1)
    assert divide([vm()], share, Leases())[0].share == (1, 2, 3)
    assert divide([vm()], NODE, Leases())[0].share == ()
    with pytest.raises(NoFit, match=r"limit: 3 CPUs, set by \[node\] host_reserve_cores"):
        divide([vm(vcpus=4)], share, Leases())


def test_reserved_core_with_ids_can_be_shared_but_not_exclusive():
    own = dataclasses.replace(NODE, reserve_cores=1, cpus=(0, 1))
    assert divide([vm()], own, Leases())[0].cores["vcpu"] == (0, 1)
    assert divide([vm(exclusive=True)], own, Leases())[0].cores["vcpu"] == (1,)
    with pytest.raises(NoFit):
        divide([vm(2, exclusive=True)], own, Leases())


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
def test_node_without_known_ids_belongs_to_one_user(paths, first, second, other_user, fits):
    one = start(paths, "1")
    place(one, [vm()], first, paths)
    two = start(paths, "2", 2000 if other_user else 1000)
    if fits:
        place(two, [vm()], second, paths)
        return
    with pytest.raises(HostFault, match="job 1 of another user runs guests on this node"):
        place(two, [vm()], second, paths)
    assert leases(two) == set()
    one.delete()
    place(two, [vm()], second, paths)


def test_unreadable_journal_stops_placement(paths):
    """The resources in the journal are unknown, so nothing may be allocated."""
    bad = start(paths, "1")
    bad.path.write_bytes(b"garbage\n" + bad.path.read_bytes())
    with pytest.raises(JournalError, match=r"1\.0\.jsonl, line 1"):
        place(start(paths, "2"), [vm()], NODE, paths)
    bad.path.write_bytes(b"")
    place(start(paths, "3"), [vm()], NODE, paths)


# -- Changes of I/O cores while the job runs -------------------------------------------------------


def with_io(paths, job, cpus=(), least=1, most=3):
    """Return the journal of a started job with one shared vCPU and I/O cores."""
    io = CoreClaim("io", least, exclusive=True, at_most=most, key="iocm")
    journal = start(paths, job)
    place(journal, [(*vm(), io)], dataclasses.replace(SHARED, cpus=cpus), paths)
    return journal


def test_io_cores_grow_and_shrink_within_claim_and_share(paths):
    with_io(paths, "1", (0, 1, 2))
    steps = [(resize(paths, "1.0", 0, "io", n), n) for n in (2, 9, 1, 0)]
    assert [r for r, _ in steps] == [
        ResizeResult((0, 1), (2,)),
        ResizeResult((0, 1), (2,)),  # a CPU stays for the vCPU, which shares
        ResizeResult((0,), (1, 2)),
        ResizeResult((0,), (1, 2)),
    ]
    cores = {r.args["item"] for r in read(paths.journal / "1.0.jsonl").leases if r.args["use"]}
    assert cores == {"0"}


def test_added_cores_are_exclusive(paths):
    with_io(paths, "1", (0, 1, 2, 3))
    assert resize(paths, "1.0", 0, "io", 2).cores == (0, 1)
    overlap = dataclasses.replace(SHARED, cpus=(1,))
    with pytest.raises(HostFault, match="in use by other jobs"):
        place(start(paths, "2"), [vm(exclusive=True)], overlap, paths)
    place(start(paths, "3"), [vm()], dataclasses.replace(SHARED, cpus=(2,)), paths)
    assert resize(paths, "1.0", 0, "io", 3).cores == (0, 1, 3)


def test_pins_change_before_removed_and_after_added_cores_are_journaled(paths, monkeypatch):
    journal = with_io(paths, "1", (0, 1, 2))
    seen = []

    def pin(state, guest, use, now):
        on_disk = [r.args["item"] for r in read(journal.path).leases if r.args["use"] == "io"]
        seen.append((on_disk, now.cores, now.floating))

    monkeypatch.setattr(live_cores, "_pin", pin)
    for count in (2, 2, 1):
        resize(paths, "1.0", 0, "io", count)
    more = (["0", "1"], (0, 1), (2,))
    assert seen == [more, more, (["0", "1"], (0,), (1, 2))]  # also without a change: it repairs

    def fail(*_):
        raise HostFault("libvirtd is away")

    monkeypatch.setattr(live_cores, "_pin", fail)
    for count in (2, 1):
        with pytest.raises(HostFault, match="away"):
            resize(paths, "1.0", 0, "io", count)
        assert len([r for r in read(journal.path).leases if r.args["use"] == "io"]) == 2


def test_resize_of_an_unsupported_use_or_job_is_refused(paths):
    place(start(paths, "1"), [vm(exclusive=True)], SHARED, paths)
    with pytest.raises(Refused, match=r"guest 0 of job 1 has a fixed number of .* 'vcpu'"):
        resize(paths, "1.0", 0, "vcpu", 2)
    with pytest.raises(FileNotFoundError):
        resize(paths, "9.0", 0, "io", 2)


def test_ledger_pools_cannot_be_claimed():
    with pytest.raises(ValueError, match="memory is reserved for vTorque"):
        divide([(PoolClaim("memory", ("g0",)),)], NODE, Leases())


def test_concurrent_jobs_get_distinct_items(paths):
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


def test_suspended_job_releases_cpus_but_not_memory(paths):
    wanted = [vm(3, ram=3000, exclusive=True)]
    first, second, third = (start(paths, job) for job in ("1", "2", "3"))
    place(first, wanted, SHARED, paths)
    with pytest.raises(InUse):
        place(second, wanted, SHARED, paths)
    first.phase("run")
    first.phase("suspended")
    place(second, wanted, SHARED, paths)
    assert leased_resources(list(walk(paths))).mib == 2 * 3256
    second.phase("suspended")
    with pytest.raises(InUse):  # no memory
        place(third, wanted, SHARED, paths)
    second.close()
    second.path.unlink()
    first.phase("run")
    with pytest.raises(InUse):
        place(third, wanted, SHARED, paths)
