"""Leases become pins: what the ledger gives is where QEMU's threads run, also after a resize.

The guests are boot sectors that spin: real QEMU under libvirt's system daemon, no kernel.
"""

import os
import pwd
from dataclasses import replace

import pytest

import running
from patience import eventually
from vtorque_core import api_ledger, host, hypervisor, names
from vtorque_core.api import JobRequest
from vtorque_core.api_claims import Claim, CoreClaim, MemoryClaim
from vtorque_core.api_domain import Disk, IoThreads
from vtorque_core.api_node import GuestPlan, Image, JobUser
from vtorque_core.domain.merge import Contributed, merge
from vtorque_core.domain.render import DomainSpec, render
from vtorque_core.journal import JobHeader, Journal
from vtorque_core.ledger import NodeShare, place
from vtorque_core.names import Paths
from vtorque_core.plugins import Plugins
from vtorque_core.resources import Domain
from vtorque_core.teardown import teardown

pytestmark = pytest.mark.e2e

URI = "qemu:///system"
SPIN = b"\xeb\xfe".ljust(510, b"\0") + b"\x55\xaa"  # jmp to itself


@pytest.fixture
def start(clean, tmp_path_factory):
    """Return a function that starts a job of spinning guests with these claims."""
    top = tmp_path_factory.mktemp("pins")
    for directory in (*top.parents[:2], top):
        directory.chmod(0o755)
    paths = Paths(top / "state", top / "run")
    machine = host.topology(URI)
    if len(machine.cpus) < 2:
        pytest.fail("this test needs two CPUs")
    share = NodeShare(machine.cpus[:2], machine.mem_mib, cpus=machine.cpus[:2], topology=machine)
    qemu = pwd.getpwnam("libvirt-qemu").pw_uid
    journals = []

    def begin(*guests: list[Claim]):
        journal = Journal.start(paths, JobHeader("pins", 0, "u", 1000, "local"))
        journals.append(journal.path)
        for index, at in enumerate(place(journal, guests, share, paths)):
            plan = guest(index, top, at)
            plan.state_dir.mkdir(mode=0o755)
            disk = plan.state_dir / "disk"
            disk.write_bytes(SPIN.ljust(1 << 20, b"\0"))
            os.chown(disk, qemu, -1)
            elements = (Disk("root", str(disk), "raw", boot=1), IoThreads(2))
            merged = merge(Contributed("t", "t 1", e) for e in elements)
            xml = render(DomainSpec(plan, "tcg"), merged)
            domain = Domain(plan.name, plan.uuid, URI, xml=xml)
            journal.acquire(domain, plugin="core", phase="boot", guest=index)
        journal.close()
        return paths

    yield begin
    for path in journals:
        assert teardown(path, paths, Plugins()).clean
    hypervisor.close()


def guest(index, top, placement):
    plan = GuestPlan(
        job_id="pins", attempt=0, node="n1", index=index, rank=index, guests_per_node=2,
        name=f"vt-pins.0-n1-{index}", uuid="", hostname="v", vcpus=1, ram_mib=32,
        image=Image("m", "linux", "micro", "x86_64", "0" * 64),
        user=JobUser("u", 1000, 1000, (("u", 1000),), "/home/u", "/bin/sh"),
        request=JobRequest({}), addresses=(), peers=(), state_dir=top / f"g{index}",
        run_dir=top / f"r{index}", secret=b"x" * 32, placement=placement,
    )  # fmt: skip
    return replace(plan, uuid=names.guest_uuid(plan.name))


def threads(index):
    return running.threads(f"vt-pins.0-n1-{index}")


def test_two_guests_run_on_different_cores(start):
    own = [CoreClaim("vcpu", 1, exclusive=True), MemoryClaim(32, use="guest")]
    start(own, own)
    for index in (0, 1):
        assert running.table("vcpupin", f"vt-pins.0-n1-{index}") == [["0", str(index)]]
        eventually(lambda i=index: threads(i)["CPU 0/TCG"] == str(i))  # when it has run


def test_io_cores_grow_and_shrink_under_a_running_guest(start):
    paths = start([CoreClaim("io", 1, exclusive=True, at_most=2), MemoryClaim(32)])
    (found,) = api_ledger.guests_with(paths, "io")
    assert (found.cores, found.least, found.most) == ((0,), 1, 2)
    seen = []
    for count in (1, 2, 1):
        now = api_ledger.resize(paths, found.job, 0, "io", count)
        pins = running.table("iothreadinfo", found.name)
        at = threads(0)
        assert {pin[1] for pin in pins} == {at["IO iothread1"]} == {at["emulator"]}
        seen.append((now.cores, now.floating, at["IO iothread1"], at["CPU 0/TCG"]))
    assert seen == [
        ((0,), (1,), "0", "1"),  # no change, yet what floats is pinned anew
        ((0, 1), (), "0-1", "1"),  # it claimed none, so nothing says where it floats
        ((0,), (1,), "0", "1"),
    ]
