"""Spare guests and the ledger: no job waits for their memory, and it is counted once."""

import dataclasses

import pytest

from vtorque_core.api.claims import CoreClaim, MemoryClaim, PoolClaim
from vtorque_core.api.host_topology import flat
from vtorque_core.base.errors import Refused
from vtorque_core.base.names import JobAttempt
from vtorque_core.plan.placement.ledger import InUse, leased_resources, place
from vtorque_core.plan.placement.model import NodeShare
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader, idle_spares, walk
from vtorque_core.resources.lease import SpareUse

NODE = NodeShare(flat((0, 1, 2, 3), 4096))
SHARED = dataclasses.replace(NODE, exclusive=False)


def spare(paths, number, mib=1024):
    header = JobHeader(JobAttempt(f"spare-{number}", 0, "root", 0), "warm", spare="warm")
    journal = Journal.start(paths, header)
    claims = [(CoreClaim("vcpu", 1), MemoryClaim(mib), PoolClaim("qemu-uid", (str(number),)))]
    place(journal, claims, SHARED, paths)
    return journal


def job(paths, number, mib, uid=1000):
    journal = Journal.start(paths, JobHeader(JobAttempt(number, 0, "u", uid), "local"))
    _, gone = place(journal, [(CoreClaim("vcpu", 1), MemoryClaim(mib))], NODE, paths)
    return journal, gone


def held(paths):
    return leased_resources(list(walk(paths))).mib


def test_job_that_fits_beside_spare_guests_ends_none(paths):
    spare(paths, 1)
    assert job(paths, "1", 3072)[1] == []


def test_oldest_spare_guests_end_until_the_job_fits(paths):
    for number in (3, 1, 2):
        spare(paths, number)
    assert job(paths, "1", 2048)[1] == ["spare-3.0"]
    assert job(paths, "2", 1024)[1] == ["spare-3.0", "spare-1.0"]  # the first one has not ended yet


def test_job_that_does_not_fit_without_spare_guests_ends_none(paths):
    spare(paths, 1)
    job(paths, "1", 2048)
    with pytest.raises(InUse, match="in use by other jobs"):
        job(paths, "2", 3072)
    with pytest.raises(Refused):
        job(paths, "3", 5000)


def test_spare_guest_ends_no_other_spare_guest(paths):
    job(paths, "1", 3072)
    spare(paths, 1)
    with pytest.raises(InUse):
        spare(paths, 2)


def test_memory_of_a_claimed_spare_guest_counts_once(paths):
    spare(paths, 7)
    journal, _ = job(paths, "1", 1024)
    assert held(paths) == 2048
    journal.acquire(SpareUse("spare-7.0"), plugin="core", phase="plan", guest=0)
    assert held(paths) == 1024
    assert idle_spares(list(walk(paths))) == []
    assert leased_resources(list(walk(paths))).items["qemu-uid"] == {"7"}
    assert job(paths, "2", 3072)[1] == []


def test_spare_guest_holds_neither_the_node_nor_cpus(paths):
    spare(paths, 1)
    job(paths, "1", 512)
    spare(paths, 2)
    assert set(leased_resources(idle_spares(list(walk(paths)))).shares) == set()
