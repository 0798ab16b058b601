"""Claims of amounts: never more than the total over all jobs of a node, refused in their unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api.claims import AmountClaim, CoreClaim, MemoryClaim, PoolClaim
from vtorque_core.api.host_topology import flat
from vtorque_core.base.errors import Refused
from vtorque_core.base.names import JobAttempt
from vtorque_core.plan.placement.divide_cores import divide
from vtorque_core.plan.placement.ledger import InUse, leased_resources, place
from vtorque_core.plan.placement.model import Leases, NodeShare, NoFit
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader, read, walk

NODE = NodeShare(flat((0, 1, 2, 3), 8192), exclusive=False)
VM = (CoreClaim("vcpu", 1), MemoryClaim(64))


def scratch(mib, total=4096):
    where = "[plugin.scratch] size"
    return AmountClaim("scratch", mib, total, unit="MiB", key="scratch", where=where)


def start(paths, job):
    return Journal.start(paths, JobHeader(JobAttempt(job, 0, "u", 1000), "local"))


def test_amounts_are_leased_until_they_are_used_up(paths):
    first = start(paths, "1")
    (one, two), _ = place(first, [(*VM, scratch(1024)), (*VM, scratch(2048))], NODE, paths)
    assert (one.amounts, two.amounts) == ({"scratch": 1024}, {"scratch": 2048})
    assert leased_resources(list(walk(paths))).amounts == {"scratch": 3072}
    second = start(paths, "2")
    said = (
        r"in use by other jobs: scratch=2G: the guests of this node need 2G of scratch "
        r"\(limit: 1G free of 4G on this node, set by \[plugin.scratch\] size\)"
    )
    with pytest.raises(InUse, match=said):
        place(second, [(*VM, scratch(2048))], NODE, paths)
    (got,), _ = place(second, [(*VM, scratch(1024))], NODE, paths)
    assert got.amounts == {"scratch": 1024}
    for lease in read(first.path).leases:
        first.released(lease.seq)
    assert leased_resources(list(walk(paths))).amounts == {"scratch": 1024}


def test_amount_that_never_fits_is_refused(paths):
    never = "request less: this never fits this node$"
    with pytest.raises(Refused, match=rf"scratch=5G: .*limit: 4G free of 4G on this node.*{never}"):
        place(start(paths, "1"), [(*VM, scratch(5120))], NODE, paths)
    cards = PoolClaim("card", ("a", "b"), count=3)
    with pytest.raises(Refused, match=rf"limit: 2 on this node, 2 free\); {never}"):
        place(start(paths, "2"), [(*VM, cards)], NODE, paths)
    place(start(paths, "3"), [(*VM, scratch(4000))], NODE, paths)
    with pytest.raises(InUse, match="or wait until other jobs have ended"):
        place(start(paths, "4"), [(*VM, scratch(4000))], NODE, paths)


def test_refusal_names_other_units_and_claims_without_a_key():
    claim = AmountClaim("tokens", 3, 2, unit="tokens")
    said = r"tokens=3 tokens: .* need 3 tokens of tokens \(limit: 2 tokens free of 2 tokens on"
    with pytest.raises(NoFit, match=said):
        divide([(*VM, claim)], NODE, Leases())


def test_zero_amount_is_no_lease_and_negative_or_memory_raises():
    assert divide([(*VM, scratch(0))], NODE, Leases())[0].amounts == {}
    with pytest.raises(ValueError, match="has a negative amount"):
        divide([(*VM, scratch(-1))], NODE, Leases())
    with pytest.raises(ValueError, match="memory is reserved for vTorque"):
        divide([(*VM, AmountClaim("memory", 1, 1))], NODE, Leases())


def test_amounts_do_not_count_as_memory_or_items(paths):
    place(start(paths, "1"), [(*VM, scratch(100))], NODE, paths)
    taken = leased_resources(list(walk(paths)))
    assert taken.mib == 64 and "scratch" not in taken.items
    place(start(paths, "2"), [(*VM, PoolClaim("scratch", ("a",)))], NODE, paths)


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=3), max_size=8))
def test_sum_of_amounts_never_exceeds_the_total(jobs):
    held = 0
    for wishes in jobs:
        try:
            claims = [(*VM, scratch(mib, 100)) for mib in wishes]
            got = divide(claims, NODE, Leases(amounts={"scratch": held}))
        except NoFit:
            assert held + sum(wishes) > 100
            continue
        held += sum(each.amounts.get("scratch", 0) for each in got)
        assert held <= 100
