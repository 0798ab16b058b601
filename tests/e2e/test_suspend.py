"""Jobs suspended and resumed with real guests, by their owner and like by a batch system."""

import os
import random
import re
import shutil
import signal
import time
import zlib
from pathlib import Path

import pytest

import hooks_by_hand
from hooks_by_hand import Hooks, as_before

pytestmark = pytest.mark.e2e

COUNTS = """#!/bin/sh
i=0
while [ $i -lt {} ]; do i=$((i + 1)); echo $i; echo $i >> counted; sleep 0.1; done
date +%s > ended
exit 7
"""


class Counting:
    """A job that counts in its guest, on the node."""

    def __init__(self, node, to, *args):
        self.node, self.to = node, to
        self.id = node.submit(COUNTS.format(to), "-vm", "ram=256M", *args)
        self.await_more(0)

    @property
    def counted(self):
        file = self.node.home / "counted"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def await_more(self, than):
        return self.node.wait_for(lambda: self.counted > than, what="more output of the job")

    def suspend(self, **more):
        return self.node.as_user("vmgr", "suspend", self.id, **more)

    def resume(self, **more):
        return self.node.as_user("vmgr", "resume", self.id, **more)

    def domains(self):
        return [n for n in self.node.footprint()["domains"] if f"-{self.id.split('.')[0]}." in n]

    def is_paused(self):
        states = [self.virsh("domstate", name) for name in self.domains()]
        return bool(states) and set(states) == {"paused"}

    def virsh(self, *words):
        return self.node.root("/usr/bin/virsh", *words).stdout.decode().strip()

    def await_paused(self):
        self.node.wait_for(self.is_paused, what="paused guests")

    def await_running(self):
        self.node.wait_for(lambda: not self.is_paused(), what="running guests")

    def ended(self):
        """Return the job's output, once it has ended."""
        self.node.wait_for((self.node.home / "ended").exists, what="the script's end")
        self.node.wait_for(lambda: self.node.state_of(self.id) is None, what="the job's end")
        clock = int((self.node.home / "ended").read_text())
        late = (self.node.home / "ended").stat().st_mtime - clock
        assert -1 <= late <= 2, "the guest's clock is wrong (date prints whole seconds)"
        return (self.node.home / "out").read_text().split()


def watchers(node):
    pattern = f"vtorque_survive.watcher .*{node.run_dir} "
    return node.root("/usr/bin/pgrep", "-f", pattern, check=False).stdout


def lines(to):
    return [str(number) for number in range(1, to + 1)]


def test_owner_alone_suspends_and_resumes_a_job(guest):
    job = Counting(guest, 40)
    other = job.suspend(user="vte2e2", check=False)
    assert other.returncode != 0 and b"belongs to another user" in other.stderr
    (fifo,) = (guest.run_dir / "jobs").glob(f"{job.id}.*/suspend.fifo")
    denied = guest.as_user("/bin/sh", "-c", f"echo suspend > {fifo}", user="vte2e2", check=False)
    assert b"Permission denied" in denied.stderr
    assert not job.is_paused()
    job.suspend()
    assert job.is_paused()
    before = job.counted
    time.sleep(1.5)  # its clock is stopped, too
    assert job.counted == before
    job.suspend()  # again: no effect
    assert job.is_paused()
    job.resume()
    job.await_more(before)
    assert job.ended() == lines(40)


@pytest.mark.full
def test_job_stopped_with_its_shell_is_suspended_even_if_the_watcher_is_killed(guest):
    job = Counting(guest, 30)
    os.kill(job.node.job_shell(job.id), signal.SIGSTOP)
    job.await_paused()
    refused = job.resume(check=False)
    assert b"the job's processes are stopped" in refused.stderr and refused.returncode != 0
    guest.root("/usr/bin/pkill", "-9", "-f", "vtorque_survive.watcher")
    before = job.counted
    os.kill(job.node.job_shell(job.id), signal.SIGCONT)
    assert job.is_paused()  # no process has checked
    gone = job.resume(check=False)
    assert gone.returncode != 0 and b"ask your administrator" in gone.stderr
    guest.root("vmgr", "resume", job.id)  # root's resume starts it again
    job.await_more(before)
    assert job.ended() == lines(30)
    lock = guest.run_dir / "survive.lock"  # that lock, too, is removed with the last job
    guest.wait_for(lambda: not lock.exists() and not watchers(guest), what="the watcher's end")


def walltime(job):
    job.node.wait_for(lambda: job.node.state_of(job.id) is None, what="the job's end")
    return (job.node.home / "err").read_text()


@pytest.mark.full
def test_walltime_ends_a_job_suspended_by_its_owner(guest):
    job = Counting(guest, 1000, "-l", "walltime=12")
    job.suspend()
    assert "walltime exceeded limit 00:00:12" in walltime(job)


@pytest.mark.full
def test_walltime_ends_a_job_whose_shell_is_stopped(guest):
    """Some batch systems count on, and send TERM and KILL to a stopped job."""
    job = Counting(guest, 1000, "-l", "walltime=12")
    os.kill(job.node.job_shell(job.id), signal.SIGSTOP)
    job.await_paused()
    walltime(job)


@pytest.mark.full
def test_job_suspended_while_libvirtd_was_killed_can_be_resumed(guest):
    """A resume fails and names libvirtd, and takes effect when libvirtd answers again.

    Then the job is suspended again and canceled, and leaves nothing.
    """
    job = Counting(guest, 1000)
    job.suspend()
    before = job.counted
    hooks_by_hand.kill_libvirtd()
    try:
        failed = job.resume(check=False)
        assert failed.returncode != 0 and b"libvirtd does not answer" in failed.stderr
        assert job.counted == before
    finally:
        hooks_by_hand.start_libvirtd(guest)
    job.await_more(before)
    job.suspend()
    guest.as_user("vmgr", "cancel", job.id)
    guest.wait_for(lambda: guest.state_of(job.id) is None, what="the job's end")


@pytest.fixture
def paused(clean, request):
    """Return a paused job, known to no batch system, and the node's footprint before it."""
    before = clean.footprint()
    job = Hooks(clean, f"{zlib.crc32(request.node.name.encode())}.faults")
    assert job.run("prologue")[0] == 0
    clean.root("vmgr", "suspend", job.job_id)
    yield job, before
    hooks_by_hand.start_libvirtd(clean)


@pytest.mark.full
def test_suspended_job_that_ends_without_libvirtd_is_reaped_later(paused):
    job, before = paused
    hooks_by_hand.kill_libvirtd()
    code, _, err = job.run("epilogue")
    assert code == 1 and "could not be removed from this node yet" in err
    hooks_by_hand.start_libvirtd(job.node)
    job.release("reap")
    as_before(job.node, before, "libvirtd killed while it stood still")


@pytest.mark.full
def test_suspended_job_is_released_after_a_reboot(paused, tmp_path):
    """All processes are gone, and everything in memory; the reaper removes the rest."""
    job, before = paused
    node = job.node
    tables = node.footprint()["tables"] - before["tables"]
    node.root("vtorque", "local", "stop", "--config", str(node.config))
    hooks_by_hand.kill_libvirtd()
    for line in node.root("/usr/bin/pgrep", "-a", "-f", f"{node.run_dir}/").stdout.splitlines():
        os.kill(int(line.split()[0]), signal.SIGKILL)
    for path in Path("/run/libvirt/qemu").glob(f"vt-{job.job_id}.*"):
        path.unlink()
    for table in tables:
        node.root("/usr/sbin/nft", "delete", "table", *table.split())
    shutil.rmtree(node.run_dir)
    hooks_by_hand.start_libvirtd(node)
    hooks_by_hand.start_service(node)
    other = tmp_path / "boot_id"
    other.write_text("00000000-0000-0000-0000-000000000000\n")
    booted = f"mount --bind {other} /proc/sys/kernel/random/boot_id && exec"
    reap = " ".join(node.command("vtorque", "reap", "--config", str(node.config)))
    node.root("/usr/bin/unshare", "--mount", "/bin/sh", "-c", f"{booted} {reap}")
    as_before(node, before, "a reboot while it stood still")
    assert node.job("#!/bin/sh\nexit 5\n").code == 5


@pytest.mark.full
@pytest.mark.parametrize("how", ["owner", "batch"])
def test_job_is_suspended_five_times_at_random(guest, how):
    """A job of a minute, two guests."""
    job = Counting(guest, 400, "-vm", "vms_per_node=2")
    for _ in range(5):
        time.sleep(random.uniform(0.2, 3.0))  # noqa: S311
        if how == "owner":
            job.suspend()
        else:
            os.kill(job.node.job_shell(job.id), signal.SIGSTOP)
        job.await_paused()
        before = job.counted
        time.sleep(random.uniform(0.2, 3.0))  # noqa: S311
        assert job.counted == before
        if how == "owner":
            job.resume()
        else:
            os.kill(job.node.job_shell(job.id), signal.SIGCONT)
        job.await_running()
    assert job.ended() == lines(400)
    log = guest.as_user("vmgr", "logs", job.id).stdout.decode()
    assert len(re.findall("(paused|suspended): ", log)) == len(re.findall("resumed: ", log)) == 5
