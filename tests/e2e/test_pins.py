"""Leases become pins: QEMU's threads run on the leased CPUs, also after a resize.

The guests are boot sectors that spin: real QEMU under libvirt's system daemon, no kernel.
"""

import os
import pwd
from dataclasses import replace
from functools import partial

import pytest

import running_jobs
from consoles import recorder
from patience import eventually
from vtorque_core.api.claims import Claim, CoreClaim, MemoryClaim
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.libvirt_domain import Disk, IoThreads
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.base import hypervisor, names
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.live import cores
from vtorque_core.node.end.teardown import teardown
from vtorque_core.plan.domain.merge import Contributed, merge
from vtorque_core.plan.domain.render import DomainSpec, render
from vtorque_core.plan.placement.ledger import place
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader
from vtorque_core.resources.domain import Domain

pytestmark = pytest.mark.e2e

URI = "qemu:///system"
SPIN = b"\xeb\xfe".ljust(510, b"\0") + b"\x55\xaa"  # jmp to itself


@pytest.fixture
def start(clean, scratch):
    """Return a function that starts a job of spinning guests with these claims."""
    paths = Paths(scratch / "state", scratch / "run")
    share = running_jobs.two_cpus()
    qemu = pwd.getpwnam("libvirt-qemu").pw_uid
    journals = []

    def begin(*guests: list[Claim]):
        journal = Journal.start(paths, JobHeader(JobAttempt("pins", 0, "u", 1000), "local"))
        journals.append(journal.path)
        placements, _ = place(journal, guests, share, paths)
        for index, at in enumerate(placements):
            plan = guest(index, scratch, at)
            for directory in (plan.state_dir, plan.run_dir):
                directory.mkdir(mode=0o755)
            disk = plan.state_dir / "disk"
            disk.write_bytes(SPIN.ljust(1 << 20, b"\0"))
            os.chown(disk, qemu, -1)
            elements = (Disk("root", str(disk), "raw", boot=1), IoThreads(2))
            merged = merge(Contributed("t", "t 1", e) for e in elements)
            xml = render(DomainSpec(plan, "tcg"), merged)
            domain = Domain(plan.name, plan.uuid, URI, partial(hypervisor.create_domain, URI, xml))
            journal.acquire(recorder(plan), plugin="core", phase="pre-boot", guest=index)
            journal.acquire(domain, plugin="core", phase="boot", guest=index)
        journal.close()
        return paths

    yield begin
    for path in journals:
        # Beside other machines, libvirtd may not answer in time. The reaper tries again, too.
        assert any(teardown(path, paths, Plugins()).clean for _ in range(3))
    hypervisor.close()


def guest(index, top, placement):
    plan = GuestPlan(
        job=JobAttempt("pins", 0, "ada", 1000, "n1"), index=index, rank=index, guests_per_node=2,
        name=f"vt-pins.0-n1-{index}", uuid="", hostname="v", vcpus=1, ram_mib=32,
        image=Image("m", "linux", "micro", "x86_64", "0" * 64),
        user=JobUser("u", 1000, 1000, (("u", 1000),), "/home/u", "/bin/sh"),
        request=JobRequest({}), addresses=(), peers=(), state_dir=top / f"g{index}",
        run_dir=top / f"r{index}", secret=b"x" * 32, placement=placement,
    )  # fmt: skip
    return replace(plan, uuid=names.guest_uuid(plan.name))


def threads(index):
    return running_jobs.threads(f"vt-pins.0-n1-{index}")


def test_two_guests_run_on_different_cores(start):
    own = [CoreClaim("vcpu", 1, exclusive=True), MemoryClaim(32, use="guest")]
    start(own, own)
    for index in (0, 1):
        assert running_jobs.table("vcpupin", f"vt-pins.0-n1-{index}") == [["0", str(index)]]
        eventually(lambda i=index: threads(i)["CPU 0/TCG"] == str(i))  # after it has run


def test_io_cores_grow_and_shrink_under_a_running_guest(start):
    paths = start([CoreClaim("io", 1, exclusive=True, at_most=2), MemoryClaim(32)])
    (found,) = cores.guests_with_cores(paths, "io")
    assert (found.cores, found.least, found.most) == ((0,), 1, 2)
    seen = []
    for count in (1, 2, 1):
        now = cores.resize(paths, found.job, 0, "io", count)
        pins = running_jobs.table("iothreadinfo", found.name)
        at = threads(0)
        assert {pin[1] for pin in pins} == {at["IO iothread1"]} == {at["emulator"]}
        seen.append((now.cores, now.floating, at["IO iothread1"], at["CPU 0/TCG"]))
    assert seen == [
        ((0,), (1,), "0", "1"),  # no change, yet the floating threads are pinned again
        ((0, 1), (), "0-1", "1"),  # it claimed none, so no record says where it floats
        ((0,), (1,), "0", "1"),
    ]
