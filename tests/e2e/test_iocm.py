"""vtorque-iocm with real guests: I/O threads run on I/O cores, whose number follows the load."""

import dataclasses
import os
import pwd
import signal
from pathlib import Path

import pytest

import running_jobs
from consoles import recorder
from running_jobs import end, started
from vtorque_core.api import vcpu_threads
from vtorque_core.api.claims import CoreClaim, MemoryClaim
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.libvirt_domain import Disk, IoThreads
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.base import hypervisor, names
from vtorque_core.base.errors import EXIT_REFUSED, EXIT_USAGE, HostFault
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
from vtorque_iocm import node as iocm_node
from vtorque_iocm.node import ManagerProcess

pytestmark = pytest.mark.e2e

URI = "qemu:///system"


def managers(state):
    """Return the pids of the I/O managers with this state directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"vtorque_iocm.manager" in words and str(state).encode() in words:
            found.append(int(process.name))
    return found


@pytest.fixture
def manager(guest):
    """Return a function that returns the pid of the node's manager; none may be left."""
    assert managers(guest.state) == []
    yield lambda: next(iter(managers(guest.state)), None)
    assert managers(guest.state) == []


def test_io_threads_run_on_io_cores_and_a_killed_manager_leaves_nothing(manager, guest):
    """The manager of the first job is killed; the next job has another one."""
    keys = "iocm=true,iocm_min_cores=1,iocm_max_cores=1,ram=128M"
    job = started(guest, "-vm", keys)
    (domain,) = running_jobs.domains(job)
    at = running_jobs.threads(domain)
    pins = [row[1] for row in running_jobs.table("iothreadinfo", domain)]
    assert pins == ["0"] == [at[name] for name in at if name.startswith("IO iothread")]
    assert running_jobs.table("emulatorpin", domain)[-1][-1] == "0" == at["emulator"]
    assert running_jobs.table("vcpupin", domain) == [["0", "1"]]
    assert at["CPU 0/TCG"] == "1"
    pid = manager()
    guest.wait_for(lambda: os.sched_getaffinity(pid) == {0}, what="the manager's own core")
    log = guest.state / "iocm.log"
    guest.wait_for(log.exists, what="its log")
    guest.wait_for(lambda: f"{job}.0 guest 0: cores (0,)" in log.read_text(), what="its first line")
    assert log.stat().st_mode & 0o077 == 0
    os.kill(pid, signal.SIGKILL)
    end(guest, job)
    assert not manager()
    assert not list(guest.run_dir.glob("iocm*"))
    second = started(guest, "-vm", keys)
    assert manager() not in (None, pid)
    end(guest, second)
    assert not manager()


@pytest.mark.full
def test_invalid_or_unsupported_options_are_refused(manager, guest, config):
    for keys, said in (
        ("iocm=true,iocm_min_cores=3,iocm_max_cores=2", b"iocm_min_cores=3: is more than"),
        ("iocm_min_cores=2", b"iocm_min_cores=2: needs iocm=true"),
    ):
        done = guest.job("true\n", "-vm", keys).done
        assert (done.returncode, said in done.stderr) == (EXIT_USAGE, True), done.stderr
    over = guest.job("true\n", "-vm", "iocm=true,iocm_max_cores=5,ram=128M")
    assert over.code == EXIT_REFUSED
    assert (
        b"iocm_max_cores=5: is more than allowed (limit: 4, set by [plugin.iocm] max_cores)"
        in over.err
    )
    many = guest.job("true\n", "-vm", "iocm=true,iocm_min_cores=2,ram=128M")
    assert many.code == EXIT_REFUSED
    assert b"iocm_min_cores=" in many.err
    assert b"more than the job can have on this node (limit: 2 CPUs)" in many.err
    config("plugin.iocm", 'nodes = "io[0-9]+"')
    lack = guest.job("true\n", "-vm", "iocm=true,ram=128M")
    assert lack.code == EXIT_REFUSED
    assert b"iocm=true: node " in lack.err
    assert b"has no I/O cores" in lack.err
    running_jobs.runs_without(guest, config, "iocm", "iocm=true")


# -- Moving under load -----------------------------------------------------------------------------

# A boot sector that only reads its disk: INT 13h, function 42h, 64 sectors at a time.
READ = bytes.fromhex(
    "31c0 8ed8"  # again: xor ax, ax; mov ds, ax
    "b280 be107c b442 cd13"  # mov dl, 80h; mov si, packet; mov ah, 42h; int 13h
    "ebf1"  # jmp again
    "90"
    "1000 4000 0000 0010 0000000000000000"  # packet: 64 sectors from 0 to 1000:0000
)
assert len(READ) == 32


@pytest.fixture
def reading(clean, scratch):
    """Start a guest that reads its disk, with 1 to 2 I/O cores, and the manager that watches it.

    Not through vsub: on a node of two CPUs the guest's vCPU would use the second. Here nothing
    claims it, as if the job had a third.
    """
    paths = Paths(scratch / "state", scratch / "run")
    share = running_jobs.two_cpus()
    journal = Journal.start(paths, JobHeader(JobAttempt("iocm", 0, "u", 1000), "local"))
    claims = [CoreClaim("io", 1, exclusive=True, at_most=2), MemoryClaim(32)]
    (at,), _ = place(journal, [claims], share, paths)
    plan = guest_plan(scratch, at)
    for directory in (plan.state_dir, plan.run_dir):
        directory.mkdir(mode=0o755)
    disk = plan.state_dir / "disk"
    disk.write_bytes((READ.ljust(510, b"\0") + b"\x55\xaa").ljust(1 << 20, b"\0"))
    os.chown(disk, pwd.getpwnam("libvirt-qemu").pw_uid, -1)
    elements = (Disk("root", str(disk), "raw", boot=1), IoThreads(2))
    xml = render(DomainSpec(plan, "tcg"), merge(Contributed("t", "t 1", e) for e in elements))
    domain = Domain(plan.name, plan.uuid, URI, lambda: hypervisor.create_domain(URI, xml))
    journal.acquire(recorder(plan), plugin="core", phase="a", guest=0)
    journal.acquire(domain, plugin="core", phase="b", guest=0)
    manager = ManagerProcess.for_node(paths, 0.2, 0.1)
    journal.acquire(manager, plugin="iocm", phase="post-boot")
    journal.close()
    yield paths, plan.name
    plugins = Plugins()
    plugins.register("iocm", iocm_node, "vtorque-iocm 1")
    report = teardown(journal.path, paths, plugins)
    assert report.clean, report.lines()
    assert managers(paths.state) == []
    hypervisor.close()


def guest_plan(top, placement):
    plan = GuestPlan(
        job=JobAttempt("iocm", 0, "ada", 1000, "n1"), index=0, rank=0, guests_per_node=1,
        name="vt-iocm.0-n1-0", uuid="", hostname="v", vcpus=1, ram_mib=32,
        image=Image("m", "linux", "micro", "x86_64", "0" * 64),
        user=JobUser("u", 1000, 1000, (("u", 1000),), "/home/u", "/bin/sh"),
        request=JobRequest({}), addresses=(), peers=(), state_dir=top / "g0",
        run_dir=top / "r0", secret=b"x" * 32, placement=placement,
    )  # fmt: skip
    return dataclasses.replace(plan, uuid=names.guest_uuid(plan.name))


def pinned(name):
    """Return the CPUs of the iothreads and the emulator, once virsh and the kernel agree."""
    at = running_jobs.threads(name)
    said = {row[1] for row in running_jobs.table("iothreadinfo", name)}
    said |= {
        at["emulator"],
        *(cpus for thread, cpus in at.items() if thread.startswith("IO iothread")),
    }
    return said.pop() if len(said) == 1 else ""


def test_pins_move_with_the_load(clean, reading):
    paths, name = reading
    clean.wait_for(lambda: pinned(name) == "0-1", what="two I/O cores under load")
    assert len(cores.guests_with_cores(paths, "io")[0].cores) == 2
    running_jobs.virsh("suspend", name)
    clean.wait_for(lambda: pinned(name) == "0", what="one I/O core without load")
    running_jobs.virsh("resume", name)
    clean.wait_for(lambda: pinned(name) == "0-1", what="two I/O cores again")
    changes = [line for line in (paths.state / "iocm.log").read_text().splitlines() if "->" in line]
    assert len(changes) == 3, changes


def test_guest_that_stalls_its_qemu_does_not_block_the_node_lock(clean, reading):
    """Root in a guest can stall QEMU: its reset of a device waits for the user's share daemon."""
    paths, name = reading
    clean.wait_for(lambda: pinned(name) == "0-1", what="two I/O cores under load")
    qemu = int(vcpu_threads.process_of(name, names.guest_uuid(name)).name)
    os.kill(qemu, signal.SIGSTOP)
    try:
        # The second call sees that the first still waits for QEMU, and does not wait itself.
        for said in ("no answer from libvirtd within", "QEMU does not answer libvirt"):
            with pytest.raises(HostFault, match=said):
                cores.resize(paths, "iocm.0", 0, "io", 1)
        assert len(cores.guests_with_cores(paths, "io")[0].cores) == 2  # still leased
    finally:
        os.kill(qemu, signal.SIGCONT)
    clean.wait_for(lambda: pinned(name) == "0-1", what="two I/O cores again")
