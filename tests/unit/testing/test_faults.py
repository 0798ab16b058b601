"""SIGKILL at every step of a start and of a teardown: afterwards the node is as before.

A child process acquires one of each kind (real files, an overlay, a daemon, a node-wide manager,
a plugin's device) and is killed at step N, for every N, by the journal's test seam. A teardown in
another process must then leave the same tree, and no process. Torn records and killed teardowns
are tested, too. The list of steps is not written here.
"""

import dataclasses
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from patience import eventually
from vtorque_core.api.acquired import Resource
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.claims import CoreClaim, MemoryClaim, PoolClaim
from vtorque_core.api.daemon_process import DaemonProcess
from vtorque_core.api.host_topology import flat
from vtorque_core.api.job_files import File, Tree
from vtorque_core.api.values import hookimpl
from vtorque_core.base import errors, locks
from vtorque_core.base.locks import job_lock
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site
from vtorque_core.node.end.reap import reap
from vtorque_core.node.end.teardown import release_job
from vtorque_core.plan.placement.ledger import place
from vtorque_core.plan.placement.model import NodeShare
from vtorque_core.records.journal import Journal, step
from vtorque_core.records.reading import JobHeader, journals
from vtorque_core.resources.disk import DiskCopy, Overlay
from vtorque_testing.faults import run_in_child

pytestmark = pytest.mark.e2e

SHARE = NodeShare(flat((0, 1), 4096))


@dataclasses.dataclass(frozen=True)
class Shell(Resource):
    """A plugin's device, made in two steps so that it can be found half made."""

    kind = "acme-shell"
    path: str

    def create(self):
        Path(self.path).mkdir()
        step("within create acme-shell")
        Path(self.path, "loaded").write_text("1")

    def release(self):
        Path(self.path, "loaded").unlink(missing_ok=True)
        if Path(self.path).exists():
            Path(self.path).rmdir()


@dataclasses.dataclass(frozen=True)
class FaultyManager(Shell):
    """The same for the whole node."""

    kind = "acme-manager"
    scope = "node"


class FaultyPlugin:
    """The plugin's node module."""

    @hookimpl
    def vtorque_resources(self):
        yield Shell
        yield FaultyManager


def loaded(_state=None):
    plugins = Plugins()
    plugins.register("acme", FaultyPlugin(), "vtorque-acme 1.0.0")
    return plugins


@dataclasses.dataclass
class DirectoryNode:
    """A node in a directory."""

    top: Path
    paths: Paths
    guests: int = 1

    def job(self, job_id="1"):
        """Start a job that acquires everything, like a prologue."""
        with job_lock(self.paths, job_id):
            header = JobHeader(
                JobAttempt(job_id, 0, "u", 1000), "local", {"acme": "vtorque-acme 1.0.0"}
            )
            journal = Journal.start(self.paths, header)
            claims = [
                (CoreClaim("vcpu", 1, exclusive=True), MemoryClaim(64), PoolClaim("card", ("a",))),
                (MemoryClaim(64),),
            ]
            place(journal, claims[: self.guests if job_id == "1" else 0], SHARE, self.paths)
            for resource, guest in self.resources(job_id):
                journal.phase("pre-boot", guest)
                journal.acquire(resource, plugin="acme", phase="pre-boot", guest=guest)

    def resources(self, job_id):
        top = self.top / f"job{job_id}"
        yield FaultyManager(str(self.top / "manager")), None
        yield Tree(str(top)), None
        for guest in range(self.guests):
            here = top / f"g{guest}"
            yield Tree(str(here)), guest
            yield File(str(here / "seed"), content=b"x" * 100), guest
            yield Overlay(str(here / "root"), str(self.top / "image"), "raw"), guest
            yield DiskCopy(str(here / "copy"), str(self.top / "image"), "raw"), guest
            yield DaemonProcess(("sleep", "1000"), str(here / "lock")), guest
            yield Shell(str(self.top / f"shell{job_id}-{guest}")), guest

    def release(self, job_id="1"):
        for report in release_job(self.paths, job_id, plugins_for=loaded, deadline=20):
            assert report.clean, report.lines()

    def observe(self):
        """Return all existing files except those kept of ended jobs: names, types, contents."""
        found = {}
        for path in sorted(self.top.rglob("*")):
            if "kept" in path.relative_to(self.top).parts:
                continue
            mode = path.lstat().st_mode
            content = path.read_bytes() if stat.S_ISREG(mode) and path.name != "image" else b""
            found[str(path.relative_to(self.top))] = (stat.S_IFMT(mode), content)
        return found

    def daemons(self):
        """Return running processes whose lock is below this node."""
        found, top = [], str(self.top)
        for pid in os.listdir("/proc"):  # noqa: PTH208 - asked for hundreds of times
            if not pid.isdecimal() or int(pid) == os.getpid():
                continue
            try:
                fds = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
                if any(top in os.readlink(f"/proc/{pid}/fd/{fd}") for fd in fds):  # noqa: PTH115
                    found.append(Path("/proc", pid, "cmdline").read_bytes())
            except OSError:
                continue
        return found


@pytest.fixture
def node(tmp_path):
    top = tmp_path / "node"
    top.mkdir()
    node = DirectoryNode(top, Paths(top / "state", top / "run"))
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "raw", str(top / "image"), "1M"], check=True, timeout=180
    )
    # Directories and the node's lock, which the first job of a node makes and leaves.
    for directory in (node.paths.journal, node.paths.run / "locks"):
        directory.mkdir(mode=0o700, parents=True)
    with locks.node_lock(node.paths):
        pass
    return node


def killed_at(work, number):
    """Run ``work`` in a process that is killed at step ``number``; return the step's name.

    None if it ended before that step.
    """
    run = run_in_child(work, number)
    assert not run.error, run
    return run.steps[-1] if run.killed else None


def in_another_process(work):
    assert killed_at(work, None) is None


def same(node, before, where):
    after = node.observe()
    for tree in (before, after):  # the lock's content is the last holder's pid
        tree.pop("run/node.lock", None)
    assert after == before, where
    eventually(lambda: not node.daemons())  # the kernel kills some with their killed parent


# A record has four steps: every 17th step covers each of them in turn.
STRIDES = [17, pytest.param(1, marks=pytest.mark.full)]


@pytest.mark.parametrize("stride", STRIDES)
def test_start_killed_at_any_step_is_released(node, stride):
    before = node.observe()
    steps = run_in_child(node.job).steps
    in_another_process(node.release)
    same(node, before, "not killed")
    for number in range(1, len(steps) + 1, stride):
        name = killed_at(node.job, number)
        assert name == steps[number - 1]
        in_another_process(node.release)
        same(node, before, f"killed at step {number}: {name}")
    kinds = {"file", "tree", "overlay", "disk-copy", "process", "lease", "acme-shell"}
    kinds |= {"acme-manager"}
    assert {name.removeprefix("before record ") for name in steps} >= kinds
    assert "within create acme-shell" in steps
    assert len(steps) > 35


@pytest.mark.parametrize("stride", STRIDES)
def test_teardown_killed_at_any_step_is_completed(node, stride):
    before = node.observe()
    steps = 1 - stride
    while True:
        in_another_process(node.job)
        assert len(node.daemons()) == 1
        name = killed_at(node.release, steps + stride)
        if name is None:
            break
        steps += stride
        in_another_process(node.release)
        same(node, before, f"killed at step {steps}: {name}")
    same(node, before, "not killed")
    assert steps > 30


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.full)])
def test_other_job_is_untouched_by_a_kill_at_any_step(node, stride):
    """Both use the node-wide manager."""
    before = node.observe()
    in_another_process(lambda: node.job("2"))
    with_other = node.observe()
    number = 0
    while True:
        number += stride
        name = killed_at(node.job, number)
        in_another_process(node.release)
        after = node.observe()
        for tree in (with_other, after):
            tree.pop("run/node.lock", None)
        assert after == with_other, name
        assert len(node.daemons()) == 1
        if name is None:
            break
    in_another_process(lambda: node.release("2"))
    same(node, before, "at the end")


def test_torn_record_is_released(node):
    """Killed during a write: the last record, cut at any byte, never had an effect."""
    before = node.observe()
    assert killed_at(node.job, 26) is not None
    path = journals(node.paths)[0]
    whole = path.read_bytes()
    state = node.observe()
    record = Shell(str(node.top / "torn"))
    with Journal.open(node.paths, path) as journal:
        journal.acquire(record, plugin="acme", phase="x")
    full = path.read_bytes().rpartition(b'{"op": "created"')[0]
    record.release()
    assert {k: v for k, v in node.observe().items() if "jsonl" not in k} == {
        k: v for k, v in state.items() if "jsonl" not in k
    }
    for cut in (len(whole) + 1, len(whole) + 40, len(full) - 1):
        path.write_bytes(full[:cut])
        with Journal.open(node.paths, path):
            assert path.read_bytes() == whole
    path.write_bytes(full[:-10])
    in_another_process(node.release)
    same(node, before, "torn")


def test_reaper_releases_a_killed_job(node):
    before = node.observe()
    for number in (5, 20, 35):
        assert killed_at(node.job, number) is not None
        results = reap(
            dataclasses.replace(Site(), paths=node.paths),
            lambda ids: dict.fromkeys(ids, JobState.GONE),
            loaded,
        )
        assert [r.action for r in results] == ["released"]
        same(node, before, f"killed at step {number}")


def test_teardown_on_a_full_disk_is_completed(node, monkeypatch):
    """Nothing can be recorded, yet everything is released."""
    before = node.observe()
    in_another_process(node.job)

    def full(self, lines, *, sync):
        raise errors.HostFault("No space left on device")

    monkeypatch.setattr(Journal, "_write", full)
    in_another_process(node.release)
    same(node, before, "full disk")


@pytest.mark.parametrize("moments", [2, pytest.param(10, marks=pytest.mark.full)])
def test_job_killed_at_random_moments_is_released(node, moments):
    """The same without the seam: at random moments, at any point of the process."""
    node.guests = 2
    before = node.observe()
    begun = time.monotonic()
    in_another_process(node.job)
    length = time.monotonic() - begun
    in_another_process(node.release)
    for moment in range(moments):
        pid = os.fork()
        if pid == 0:
            try:
                node.job()
            finally:
                os._exit(0)
        time.sleep(length * (moment + 0.5) / moments)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        in_another_process(node.release)
        same(node, before, f"killed after {moment}/{moments} of the start")
