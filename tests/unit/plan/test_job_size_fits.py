"""Guests sized by the allocation of their job can be placed by the ledger on any node."""

import dataclasses
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from vtorque_core.api.claims import CoreClaim, MemoryClaim
from vtorque_core.api.host_topology import flat
from vtorque_core.api.vm_options import RAM, VCPUS
from vtorque_core.config.job_size import JobGrant
from vtorque_core.config.policy import check_options, needs, resolve
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml
from vtorque_core.plan.placement.divide_cores import divide
from vtorque_core.plan.placement.model import Leases, NodeShare
from vtorque_core.plan.placement.topology import parse
from vtorque_iocm import plugin as iocm
from vtorque_iocm.node import Settings as IocmSettings
from vtorque_pinning import plugin as pinning
from vtorque_scam import plugin as scam
from vtorque_testing.planned import load_with_core
from vtorque_unclot import plugin as unclot

DATA = Path(__file__).parents[3] / "testing/vtorque_testing/machines"
MACHINES = [
    flat((0,), 2000),
    flat(range(8), 16001),
    *(parse(path.read_text()) for path in sorted(DATA.glob("*.xml"))),
]
LEAST = 64  # MiB of RAM
OPTIONS = {
    "vcpu_pinning": "true",
    "iocm": "true",
    "scam": "true",
    "unclot": "true",
    "fs_type": "ramdisk",
}
DISK = 300
PLUGINS = load_with_core("devices", pinning, iocm, scam, unclot)


def claims(job, site, index):
    """Return the claims of the core and the four plugins for a guest of a fully equipped node."""
    yield CoreClaim("vcpu", job[VCPUS])
    yield MemoryClaim(job[RAM], use="guest")
    yield MemoryClaim(site.node.qemu_overhead, use="emulator")
    if job.values["fs_type"] == "ramdisk":
        yield MemoryClaim(DISK, use="ramdisk")
    if job.values["vcpu_pinning"]:
        yield CoreClaim("vcpu", job[VCPUS], exclusive=True)
        yield CoreClaim("emulator", 1)
    if job.values["scam"]:
        yield CoreClaim("vcpu", job[VCPUS], whole_cores=True)
    if job.values["iocm"]:
        yield CoreClaim("io", 1, True, IocmSettings().max_cores)
    if job.values["unclot"] and index == 0:
        yield MemoryClaim(job[unclot.SHMEM], use="unclot")


@st.composite
def shares(draw):
    """Return a batch system's share of a node: whole cores if it reports ids, or a number."""
    machine = draw(st.sampled_from(MACHINES))
    found = NodeShare(
        machine,
        reserve_cores=draw(st.integers(0, 3)),
        reserve_mib=draw(st.integers(0, 900)),
        whole_node=draw(st.booleans()),
    )
    if draw(st.booleans()):
        cores = draw(st.lists(st.sampled_from(machine.cores), min_size=1, unique=True))
        cpus = tuple(sorted(cpu for core in cores for cpu in core))
        found = dataclasses.replace(found, cpus=cpus, cpu_count=len(cpus))
    elif draw(st.booleans()):
        count = draw(st.integers(1, 2 * len(machine.cpus)))
        found = dataclasses.replace(found, cpu_count=count)
    mem = draw(st.none() | st.integers(1, 2 * machine.mem_mib))
    return dataclasses.replace(found, mem_mib=mem)


def least(job, site, share):
    """Return whether the share is enough for guests of one vCPU and little RAM."""
    small = dataclasses.replace(job, values={**job.values, "vcpus": 1, "ram": LEAST})
    small = dataclasses.replace(small, of_job=frozenset({"vcpus", "ram"}))
    need, granted = needs(small, site, PLUGINS, DISK), share.granted
    own = any(small.values[key] for key in ("vcpu_pinning", "scam"))
    spare = site.node.host_reserve_cores if own else 0
    cpus = need.cpus - spare + granted.reserved * bool(own or small.values["iocm"])
    return cpus <= granted.cpus and need.mib <= granted.mib


@settings(deadline=None)
@given(share=shares(), count=st.integers(1, 4), on=st.sets(st.sampled_from(sorted(OPTIONS))))
def test_every_share_that_meets_the_minimum_can_be_placed(share, count, on):
    text = f"[node]\nhost_reserve_cores = {share.reserve_cores}\n"
    site = build(parse_toml(text.encode(), Path("/etc/x.toml")), PLUGINS)
    pairs = [("vms_per_node", str(count)), *((key, OPTIONS[key]) for key in sorted(on))]
    wanted = check_options(Request(tuple(pairs)), site, PLUGINS)
    granted = share.granted
    job, _ = resolve(wanted, site, PLUGINS, granted, disk=DISK)
    if granted.cpus is None or granted.mib is None or not least(job, site, share):
        return
    if {"scam", "iocm"} <= on:
        return  # scam cannot tell the batch system of the idle siblings of I/O cores
    placements = divide([list(claims(job, site, n)) for n in range(count)], share, Leases())
    assert len(placements) == count
    if not on:
        assert granted.cpus - count * job[VCPUS] < count, "granted CPUs are not used"


def test_unlimited_memory_is_divided_by_cpus():
    machine = flat(range(8), 16000)

    def of(**share):
        return NodeShare(machine, reserve_cores=2, reserve_mib=1000, **share).granted

    assert of() == JobGrant(None, None), "a grant is computed for an unlimited share"
    assert of(cpu_count=4) == JobGrant(4, 7500)
    assert of(cpu_count=8) == JobGrant(6, 15000), "the host's two CPUs are granted"
    assert of(cpu_count=16) == JobGrant(6, 15000)
    assert of(cpus=(0, 1, 2, 3)) == JobGrant(4, 7500, reserved=2)
    assert of(whole_node=True) == JobGrant(6, 15000)
    assert of(whole_node=True, cpu_count=1) == JobGrant(1, 15000)
    assert of(mem_mib=4096) == JobGrant(None, 4096)
    assert of(cpu_count=4, mem_mib=16000) == JobGrant(4, 15000), "the host's memory is granted"


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_jobs_that_share_a_node_share_its_memory(counts):
    """The shares of as many jobs as the node has CPUs must not exceed the node's memory."""
    machine = flat(range(8), 16001)
    while sum(counts) > 8:
        counts.pop()
    shares = [NodeShare(machine, reserve_mib=77, cpu_count=count) for count in counts]
    assert sum(share.granted.mib for share in shares) <= 16001 - 77
