"""Placement on recorded machines: NUMA nodes, SMT, huge pages, caches, devices, refusals."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtorque_core.api.claims import CacheClaim, CoreClaim, MemoryClaim, PoolClaim, RamClaim
from vtorque_core.api.host_topology import NumaNode, Topology, flat, parse_cpus, show_cpus
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.plan.placement.divide_cores import divide
from vtorque_core.plan.placement.model import Leases, NodeShare, NoFit
from vtorque_core.plan.placement.topology import parse, with_default_group

DATA = Path(__file__).parents[3] / "testing/vtorque_testing/machines"
MACHINES = {path.stem: parse(path.read_text()) for path in sorted(DATA.glob("*.xml"))}
XEON, EPYC, ARM = (MACHINES[name] for name in ("xeon-2x32-smt", "epyc-4-numa", "arm-4x32"))


def node(machine, **share):
    return NodeShare(machine, **share)


def guest(vcpus=4, ram=4096, *, own=True, more=(), **core):
    return (
        CoreClaim("vcpu", vcpus),
        MemoryClaim(ram, use="guest"),
        *([CoreClaim("vcpu", vcpus, exclusive=True, key="vcpu_pinning", **core)] if own else []),
        *more,
    )


def placed(machine, *guests, taken=None, **share):
    return divide(guests, node(machine, **share), taken or Leases())


# -- the recorded files -----------------------------------------------------------------------


def test_recorded_machines_are_read():
    assert [len(m.nodes) for m in (XEON, EPYC, ARM)] == [2, 4, 4]
    assert [len(m.cores) for m in (XEON, EPYC, ARM)] == [64, 64, 127]  # one CPU is offline
    assert XEON.siblings(70) == (6, 70)
    assert XEON.nodes_of((0, 95)) == (0,)
    assert XEON.nodes[0].pages == {2048: 16384}
    assert XEON.nodes[0].mem_mib == (192 - 32) * 1024  # without the huge pages
    assert ARM.nodes[0].pages == {524288: 4}
    assert XEON.caches[0].steps == 11
    assert ARM.caches[0].steps == 0
    assert [(b.bandwidth_step, b.bandwidth_least) for b in XEON.caches] == [(10, 10)] * 2
    assert (EPYC.caches[0].steps, EPYC.caches[0].bandwidth_step) == (15, 0)


def test_cache_of_the_resctrl_default_group_is_not_leased():
    schemata = "    MB:0=100;1=100\n    L3:0=00f;1=fff\nL3CODE:0=fff\nL2:0=3;1=3\n"
    assert [bank.steps for bank in with_default_group(XEON, schemata).caches] == [8, 0]
    assert [bank.steps for bank in with_default_group(XEON, "L3:0=0;1=1\n").caches] == [11, 11]
    assert with_default_group(XEON, "") == XEON
    with pytest.raises(ValueError, match="invalid literal"):
        with_default_group(XEON, "L3:0=xyz\n")


def test_invalid_capabilities_are_a_host_fault():
    assert parse("<capabilities><host/></capabilities>") == Topology()
    for bad in ("", "<x", "<c><host><topology><cells><cell/></cells></topology></host></c>"):
        with pytest.raises(HostFault, match="virsh capabilities"):
            parse(bad)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_are_read_back(cpus):
    assert parse_cpus(show_cpus(tuple(cpus))) == tuple(sorted(cpus))


# -- one guest --------------------------------------------------------------------------------


def test_smt_siblings_stay_together_and_are_visible_in_the_guest():
    (got,) = placed(XEON, guest(4))
    assert got.cores["vcpu"] == (0, 64, 1, 65)
    assert (got.threads, got.nodes, got.numa) == (2, (0,), "preferred")
    assert dict(got.memory) == {0: 4096}
    (odd,) = placed(XEON, guest(3))
    assert (odd.cores["vcpu"], odd.threads) == ((0, 64, 1), 1)
    assert placed(ARM, guest(4))[0].threads == 1


def test_emulator_runs_off_the_vcpus():
    (got,) = placed(XEON, guest(4), cpus=(*range(8), *range(64, 72)))
    assert set(got.cores["emulator"]) == {2, 3, 4, 5, 6, 7, *range(66, 72)}
    (tight,) = placed(XEON, guest(2), cpus=(0, 64))
    assert tight.cores["emulator"] == (0, 64)
    with pytest.raises(
        NoFit, match=r"vcpu_pinning=2: 2 exclusive and 1 shared CPUs \(3 in total\).*2 CPUs"
    ):
        placed(XEON, guest(2, more=[CoreClaim("emulator", 1)]), cpus=(0, 64))


def test_whole_cores_leave_no_sibling_to_other_guests():
    (got,) = placed(XEON, guest(3, whole_cores=True))
    assert got.cores["vcpu"] == (0, 64, 1)
    assert got.idle == (65,)
    assert 65 not in got.cores["emulator"]
    with pytest.raises(NoFit, match="too few free whole cores"):
        placed(XEON, guest(2, whole_cores=True), cpus=(0, 1, 2))
    with pytest.raises(NoFit, match="CPUs including SMT siblings: the job has fewer"):
        placed(XEON, guest(3, whole_cores=True), cpu_count=3)


def test_mapping_keeps_its_order():
    (got,) = placed(XEON, guest(3, cpus=(33, 97, 40)))
    assert got.cores["vcpu"] == (33, 97, 40)
    assert got.nodes == (1,)
    assert dict(got.memory) == {1: 4096}


def test_whole_cores_of_a_mapping_leave_no_sibling_to_other_guests():
    whole = [CoreClaim("vcpu", 3, whole_cores=True)]
    (got,) = placed(XEON, guest(3, cpus=(33, 97, 40), more=whole))
    assert (got.cores["vcpu"], got.idle) == ((33, 97, 40), (104,))
    assert 104 not in got.cores["emulator"]
    with pytest.raises(
        NoFit, match=r"CPU 104, SMT sibling of a requested CPU, is not granted to the job"
    ):
        placed(XEON, guest(3, cpus=(33, 97, 40), more=whole), cpus=(33, 97, 40, 41))
    with pytest.raises(NoFit, match="CPUs including SMT siblings: the job has fewer"):
        placed(XEON, guest(3, cpus=(33, 97, 40), more=whole), cpu_count=3)
    with pytest.raises(NoFit, match=r"CPU 104, SMT sibling of a.* CPU, is requested for 2 guests"):
        placed(XEON, guest(3, cpus=(33, 97, 40), more=whole), guest(1, cpus=(104,)))


@pytest.mark.parametrize(
    ("claims", "share", "why"),
    [
        (guest(1, cpus=(500,)), {}, r"vcpu_pinning=500: CPU 500 is not on this node"),
        (
            guest(2, cpus=(5, 64)),
            {"reserve_cores": 2},
            r"vcpu_pinning=5,64: CPU 64 is reserved for the host \(limit: CPUs 1,2,"
            r".* host_reserve_cores",
        ),
        (
            guest(1, cpus=(0,)),
            {"reserve_cores": 2, "cpus": (0, 1)},
            r"CPU 0 is reserved for the host .*\[node\] host_reserve_cores",
        ),
        (
            guest(1, cpus=(9,)),
            {"cpus": (1, 2)},
            r"CPU 9 is not granted to the job \(limit: CPUs 1,2, set",
        ),
        (guest(129), {}, r"vcpu_pinning=129: 129 exclusive CPUs.*limit: 128 CPUs"),
        (guest(8), {"cpu_count": 4}, r"limit: 4 CPUs, set by the job's allocation"),
        (guest(1, 400000), {}, r"ram=400000M: .*limit: 320G"),
        (
            guest(1, more=[MemoryClaim(1 << 20, key="unclot_shmem")]),
            {},
            r"unclot_shmem=1T: .*need 1028G .*limit: 320G\); ask for less unclot_shmem",
        ),
        (
            guest(1, 200000, more=[RamClaim(numa="strict", key="numa")]),
            {},
            r"numa=strict: a guest of 1 CPUs and 200000M must fit on one NUMA node",
        ),
        (
            guest(
                1,
                34000,
                more=[
                    RamClaim(page_kib=2048, key="hugepages"),
                    RamClaim(numa="strict", key="numa"),
                ],
            ),
            {},
            r"numa=strict: .* 64 exclusive CPUs or 160G \(32G in huge pages\) on a NUMA node",
        ),
        (
            guest(1, 2048, more=[RamClaim(page_kib=1048576, key="hugepages")]),
            {},
            r"hugepages=2G: .*huge pages of 1048576 KiB \(limit: 0M of 0M free, set by vm.nr_huge",
        ),
        (guest(1, more=[CacheClaim(1 << 20, key="scam")]), {}, r"scam=.*limit: 11 steps of 4096"),
        (
            guest(1, own=False, more=[CacheClaim(1, key="scam")]),
            {},
            "the guest's cores are shared",
        ),
    ],
)
def test_claim_that_does_not_fit_names_value_and_limit(claims, share, why):
    with pytest.raises(NoFit, match=why):
        placed(XEON, claims, **share)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            [CoreClaim("io", 3, at_most=2, key="iocm")],
            r"iocm=3: the minimum of 3 .* maximum of 2 .limit: 1 to 2",
        ),
        ([CoreClaim("io", 0, key="iocm")], "iocm=0: a guest needs at least one core"),
        (
            [CoreClaim("vcpu", 4, cpus=(1, 2), key="pins")],
            r"pins=1,2: .*has 2 CPUs \(2 different\)",
        ),
        (
            [CoreClaim("vcpu", 4, cpus=(1, 2, 2, 3), key="pins")],
            r"has 4 CPUs \(3 different\) for 4 vCPUs",
        ),
        ([RamClaim(numa="strict"), RamClaim(numa="preferred", key="numa")], "numa=preferred: numa"),
        ([RamClaim(page_kib=1048576)], "ram=4097M: .*not a whole number of huge pages"),
    ],
)
def test_contradicting_claims_are_refused(more, why):
    with pytest.raises(Refused, match=why):
        placed(XEON, guest(4, 4097, more=more))


def test_node_with_one_numa_node_has_no_numatune():
    got = divide([guest(1, 64)], NodeShare(flat((0, 1), 1000)), Leases())[0]
    assert (got.numa, got.nodes) == (None, ())
    assert placed(XEON, guest(), numa=None)[0].numa is None


def test_memory_and_huge_pages_are_the_nodes_own():
    pages = RamClaim(page_kib=2048)
    first, second = placed(XEON, *[guest(2, 30000, more=[pages])] * 2)
    assert (dict(first.paged), dict(second.paged)) == ({0: 30000}, {1: 30000})
    assert (first.page_kib, first.memory) == (2048, {})
    with pytest.raises(NoFit, match="limit: 64G of 64G free"):
        placed(XEON, *[guest(2, 30000, more=[pages])] * 3)
    taken = Leases(pages={(0, 2048): 10000})
    assert dict(placed(XEON, guest(2, 30000, more=[pages]), taken=taken)[0].paged) == {1: 30000}
    taken = Leases(mib=150000, mib_on={0: 150000})
    assert placed(XEON, guest(2, 20000), taken=taken)[0].nodes == (1,)


def test_cache_is_leased_from_caches_of_the_guests_cores():
    claim = CacheClaim(5000, key="scam")
    (got,) = placed(EPYC, guest(4, more=[claim]))
    assert got.caches == ((3, 0, 6144),)
    assert got.leased["cache"] == ("group-0", "L3-0/0", "L3-0/1", "L3-0/2")
    both = placed(XEON, *[guest(2, more=[claim])] * 2, cpus=(0, 1, 2, 3))
    assert [p.leased["cache"] for p in both] == [
        ("group-0", "L3-0/0", "L3-0/1"),
        ("group-1", "L3-0/2", "L3-0/3"),
    ]
    with pytest.raises(NoFit, match="this node cannot divide caches"):
        placed(ARM, guest(4, more=[claim]))


def test_guest_is_placed_near_its_device_if_free():
    cards = PoolClaim("gpu", ("a", "b"), near={"a": 0, "b": 1})
    taken = Leases({"gpu": frozenset({"a"})})
    assert placed(XEON, guest(more=[cards]), taken=taken)[0].nodes == (1,)
    one, two = placed(XEON, *[guest(more=[cards])] * 2)
    assert [(p.nodes, p.leased["gpu"]) for p in (one, two)] == [((0,), ("a",)), ((1,), ("b",))]
    far = placed(XEON, guest(more=[cards]), taken=taken, cpus=tuple(range(8)))
    assert (far[0].nodes, far[0].leased["gpu"]) == ((0,), ("b",))


def test_advice_on_numa_nodes_is_a_wish():
    def near(*nodes):
        return guest(more=[RamClaim(near=nodes, advisor="me")])

    assert placed(EPYC, near(2))[0].nodes == (2,)
    assert placed(EPYC, near(3, 1))[0].nodes == (1,)
    assert placed(EPYC, near(77))[0].nodes == (0,)
    assert placed(EPYC, near(2), cpus=EPYC.nodes[3].cpus)[0].nodes == (3,)
    assert [p.nodes for p in placed(EPYC, near(2), near(2))] == [(2,), (0,)]  # distinct ones first
    card = PoolClaim("gpu", ("a",), near={"a": 1})
    both = guest(more=[RamClaim(near=(2,)), card, PoolClaim("vf", ("b",), near={"b": 1})])
    assert placed(EPYC, both)[0].nodes == (1,)  # two preferences against one


def test_pools_of_a_family_share_their_items():
    vf = PoolClaim("pci/vrdma", ("a", "b"), near={"a": 0, "b": 1})
    card = PoolClaim("pci", ("b", "c"))
    (got,) = placed(XEON, guest(more=[vf, card]), taken=Leases({"pci": frozenset({"a"})}))
    assert got.leased == {"pci/vrdma": ("b",), "pci": ("c",)}
    assert got.nodes == (1,)
    with pytest.raises(NoFit, match=r"pci=1: .*limit: 2 on this node, 0 free"):
        placed(XEON, guest(more=[vf, vf, card]), taken=Leases({"pci/other": frozenset({"c"})}))
    with pytest.raises(ValueError, match="reserved for vTorque"):
        placed(XEON, guest(more=[PoolClaim("core/mine", ("1",))]))


# -- several guests ---------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", [name for name in MACHINES if name != "one-socket"])
def test_guests_of_a_job_use_distinct_numa_nodes_first(name, own):
    machine = MACHINES[name]
    count = len(machine.nodes)
    got = placed(machine, *[guest(4, 4096, own=own)] * count * 2)
    nodes = [p.nodes for p in got]
    assert sorted(nodes[:count]) == [(n.id,) for n in machine.nodes] == sorted(nodes[count:])
    for p in got:
        assert machine.nodes_of(p.cores["vcpu"]) == p.nodes
        assert set(p.memory) == set(p.nodes)


def test_guests_with_shared_cpus_float_on_their_numa_node():
    share = (*range(8), *range(32, 40))
    one, two = placed(XEON, *[guest(8, own=False)] * 2, cpus=share)
    assert (one.cores["vcpu"], two.cores["vcpu"]) == (tuple(range(8)), tuple(range(32, 40)))
    (wide,) = placed(XEON, guest(12, own=False), cpus=share)
    assert (wide.cores["vcpu"], wide.numa) == (share, None)


def test_guest_over_several_numa_nodes_has_matching_cells():
    (got,) = placed(EPYC, guest(48, 8000))
    assert got.nodes == (0, 1)
    assert [(n, len(v), mib) for n, v, mib in got.cells] == [(0, 32, 4000), (1, 16, 4000)]


# -- against exhaustive search ----------------------------------------------------------------


def machine_of(sizes):
    """Return a machine of NUMA nodes with (CPUs, MiB), pairs of CPUs being siblings."""
    ids = itertools.count()
    nodes, cores = [], []
    for number, (cpus, mib) in enumerate(sizes):
        mine = tuple(next(ids) for _ in range(cpus))
        nodes.append(NumaNode(number, mine, mib))
        cores += [mine[i : i + 2] for i in range(0, cpus, 2)]
    return Topology(tuple(nodes), tuple(cores))


def fewest_crossing(sizes, guests):
    """Return how few guests must cross nodes, trying every assignment."""
    best = len(guests)
    for homes in itertools.product([None, *range(len(sizes))], repeat=len(guests)):
        fits = all(
            sum(g[dim] for g, h in zip(guests, homes, strict=True) if h == n) <= size[dim]
            for n, size in enumerate(sizes)
            for dim in range(len(size))
        )
        if fits:
            best = min(best, homes.count(None))
    return best


sizes_strategy = st.lists(
    st.tuples(st.integers(1, 8), st.integers(1, 10).map(lambda n: n * 100)),
    min_size=1, max_size=3,
)  # fmt: skip
guests_strategy = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 8).map(lambda n: n * 100)),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(max_examples=3 * settings().max_examples, deadline=None, database=None)
@given(sizes=sizes_strategy, guests=guests_strategy)
def test_guests_cross_numa_nodes_as_rarely_as_exhaustive_search(sizes, guests):
    machine = machine_of(sizes)
    asked = [guest(vcpus, mib) for vcpus, mib in guests]
    possible = all(sum(g[d] for g in guests) <= sum(s[d] for s in sizes) for d in (0, 1))
    if not possible:
        with pytest.raises(NoFit):
            placed(machine, *asked)
        return
    got = placed(machine, *asked)
    cores = [c for p in got for c in p.cores["vcpu"]]
    assert len(set(cores)) == len(cores) == sum(g[0] for g in guests)
    for number, size in enumerate(sizes):
        assert sum(p.memory.get(number, 0) for p in got) <= size[1]
    assert [sum(p.memory.values()) for p in got] == [g[1] for g in guests]
    crossing = [p for p in got if len({*machine.nodes_of(p.cores["vcpu"]), *p.memory}) > 1]
    assert len(crossing) <= fewest_crossing(sizes, guests)
    strict = [(*g, RamClaim(numa="strict")) for g in asked]
    if fewest_crossing(sizes, guests):
        with pytest.raises(NoFit, match="one NUMA node"):
            placed(machine, *strict)
    else:
        assert not crossing
        placed(machine, *strict)


mixed_strategy = st.lists(
    st.tuples(
        st.integers(1, 6), st.integers(1, 8).map(lambda n: n * 100), st.booleans(), st.booleans()
    ),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(max_examples=2 * settings().max_examples, deadline=None, database=None)
@given(sizes=sizes_strategy, guests=mixed_strategy)
def test_mixed_guests_cross_numa_nodes_as_rarely_as_exhaustive_search(sizes, guests):
    """Some have their own CPUs, some share; some have their memory in huge pages."""
    machine = machine_of(sizes)
    pages = {100 * 1024: 5}  # of 100 MiB, on each node
    nodes = tuple(dataclasses.replace(node, pages=pages) for node in machine.nodes)
    machine = dataclasses.replace(machine, nodes=nodes)
    asked = [
        guest(vcpus, mib, own=alone, more=[RamClaim(page_kib=100 * 1024)] if huge else ())
        for vcpus, mib, alone, huge in guests
    ]
    needs = [(vcpus, 0 if huge else mib, mib if huge else 0) for vcpus, mib, _, huge in guests]
    rooms = [(*size, 500) for size in sizes]
    try:
        got = placed(machine, *asked)
    except NoFit:
        assert fewest_crossing(rooms, needs)  # otherwise all fit, each on one NUMA node
        return
    crossing = [p for p in got if len({*p.nodes, *p.memory, *p.paged}) > 1]
    assert len(crossing) <= fewest_crossing(rooms, needs)


@settings(max_examples=2 * settings().max_examples, deadline=None, database=None)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    broken=st.sets(st.integers(0, 15), max_size=6),
)
def test_cores_are_split_only_for_remaining_vcpus(counts, broken):
    """No guest has a part of a core if whole cores would have sufficed."""
    machine = machine_of([(16, 1000)])
    taken = Leases({"core": frozenset(map(str, broken))}, shares=dict.fromkeys(broken, 1))
    try:
        got = placed(machine, *[guest(n, 10) for n in counts], taken=taken)
    except NoFit:
        assert sum(counts) > 16 - len(broken)
        return
    free_cores = sum(1 for core in machine.cores if not set(core) & broken)
    pairs = sum(set(core) <= set(p.cores["vcpu"]) for p in got for core in machine.cores)
    assert pairs >= min(free_cores, sum(n // 2 for n in counts))


def test_search_is_bounded():
    """Sixty-four guests that nearly fill a machine, some of which must cross."""
    sizes = [1 + (n * 7) % 5 for n in range(40)]
    got = placed(EPYC, *[guest(n, 1000 + 37 * n) for n in sizes])
    assert len(got) == len(sizes)
    assert sum(len(p.nodes) > 1 for p in got) <= 3


def test_planned_share_never_exceeds_that_of_the_batch_system():
    for count in (4, 5, 9, 40, 128):
        share = node(XEON, cpu_count=count)
        got = divide([guest(2, own=False), guest(2)], share, Leases())
        assert {*got[0].share} == {*got[1].share} or got[0].share == ()
        assert len(got[0].share or XEON.cpus) == count


def test_reserve_uses_whole_cores_first():
    assert node(XEON, reserve_cores=3).reserved == (0, 64, 1)
    assert dataclasses.replace(node(ARM), reserve_cores=2).reserved == (0, 1)
