"""The manager: pinning for guests, faults, and its process in a real journal."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from patience import eventually
from processes import alive
from vtorque_core.api import Busy, HostFault, JobAttempt, Paths, Refused
from vtorque_core.live import node_process
from vtorque_core.live.cores import GuestCores, ResizeResult
from vtorque_core.node.end.teardown import teardown
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader, arguments
from vtorque_iocm import manager, node, threads
from vtorque_iocm.manager import ManagerLoop
from vtorque_iocm.node import ManagerProcess
from vtorque_iocm.wanted_cores import CoresRule
from vtorque_testing.planned import load_with_core

GUEST = GuestCores("1.0", 0, "vt-1", "u-1", "test:///default", (0,), 1, 3)


class LedgerDouble:
    """A double of the ledger and libvirt, with guests whose load is set by the test."""

    def __init__(self, monkeypatch):
        self.guests = {(GUEST.job, 0): GUEST}
        self.load = 0.0
        self.calls = []
        self.moved = 0
        self.fault = None
        self.room = 3
        self.now = 100.0
        self.spent = 0.0
        self.pinned = []
        self.vhost = ["vhost"]
        here = Path("/proc", str(os.getpid()))
        for name in ("guests_with_cores", "resize"):
            monkeypatch.setattr(manager.cores, name, getattr(self, name))
        monkeypatch.setattr(manager, "process_of", lambda *_: here)
        monkeypatch.setattr(manager.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(threads, "transferred_bytes", self.transferred_bytes)
        monkeypatch.setattr(threads, "thread_times", lambda *_: {"1": int(self.spent * 1e9)})
        monkeypatch.setattr(threads, "vhost_threads", lambda _: list(self.vhost))
        monkeypatch.setattr(threads, "pin", lambda tids, cpus: self.pinned.append((tids, cpus)))

    def guests_with_cores(self, _paths, use):
        assert use == "io"
        if isinstance(self.fault, ValueError):
            raise self.fault
        return list(self.guests.values())

    def transferred_bytes(self, *_):
        self.moved += 1
        return self.moved

    def resize(self, _paths, job, guest, use, count, wait):
        assert (use, wait < 1) == ("io", True)
        self.calls.append((job, count))
        if self.fault:
            raise self.fault
        cores = tuple(range(max(1, min(count, self.room))))
        self.guests[job, guest] = replace(self.guests[job, guest], cores=cores)
        return ResizeResult(cores, ())

    def run(self, loop, seconds, load):
        for _ in range(seconds):
            self.now += 1
            self.spent += load
            loop.poll()
            loop.tick()


@pytest.fixture
def host(monkeypatch):
    return LedgerDouble(monkeypatch)


@pytest.fixture
def loop(tmp_path):
    return ManagerLoop(Paths(tmp_path / "state", tmp_path / "run"), 1.0, 0.8)


def counts(host):
    return [count for _, count in host.calls]


def test_manager_pins_threads_and_follows_the_load(host, loop):
    host.run(loop, 5, 0.1)
    assert counts(host) == [1]
    host.run(loop, 5, 1.9)
    assert counts(host) == [1, 3]
    host.run(loop, 15, 0.1)
    assert counts(host) == [1, 3, 1]
    assert (["vhost"], (0, 1, 2)) in host.pinned
    assert host.pinned[-2] == (["vhost"], (0,))
    assert host.pinned[-1] == ([Path("/proc/0")], (0,))


def test_unavailable_core_is_requested_again_only_later(host, loop):
    host.room = 2
    host.run(loop, 3, 0.1)
    host.run(loop, 4, 2.3)
    assert counts(host) == [1, 3]
    host.run(loop, CoresRule.down, 2.3)
    assert counts(host) == [1, 3, 3]


def test_no_load_is_measured_without_io(host, loop):
    host.transferred_bytes = lambda *_: 7
    threads.transferred_bytes = host.transferred_bytes
    host.run(loop, 10, 2.5)
    assert counts(host) == [1]


@pytest.mark.parametrize(
    "fault",
    [Busy("locked"), FileNotFoundError("1.0.jsonl"), Refused("no"), HostFault("away"), KeyError(1)],
)
def test_fault_of_one_guest_does_not_stop_the_manager(host, loop, fault):
    host.guests["2.0", 0] = replace(GUEST, job="2.0")
    host.run(loop, 3, 0.1)
    host.fault = fault
    host.run(loop, 6, 2.0)
    assert {job for job, _ in host.calls} == {"1.0", "2.0"}
    host.fault, host.calls = None, []
    host.run(loop, 4, 2.0)
    assert host.calls[0] == ("1.0", 1)  # pinned again first
    assert ("1.0", 3) in host.calls
    assert ("2.0", 3) in host.calls


def test_unreadable_journal_changes_nothing(host, loop):
    host.run(loop, 3, 0.1)
    host.fault = ValueError("line 7")
    loop.poll()
    assert list(loop.watched) == [("1.0", 0)]


def test_cores_changed_by_an_interrupted_resize_are_pinned_again(host, loop):
    host.run(loop, 3, 0.1)
    host.guests["1.0", 0] = replace(GUEST, cores=(0, 1))  # it was killed during a resize, or failed
    host.run(loop, 1, 0.1)
    assert counts(host) == [1, 2]


def test_ended_vhost_thread_is_not_pinned(host, loop):
    """Another process may have its number: threads are listed just before."""
    host.run(loop, 3, 0.1)
    host.vhost, host.pinned = ["new"], []
    host.run(loop, 4, 1.9)
    assert counts(host) == [1, 3]
    assert [tids for tids, _ in host.pinned] == [["new"], [Path("/proc/0")]]


def test_guest_with_a_fixed_number_of_cores_has_its_vhost_pinned(host, loop):
    host.guests = {("1.0", 0): replace(GUEST, least=0, most=0)}
    host.run(loop, 20, 3.0)
    assert host.calls == []
    assert (["vhost"], (0,)) in host.pinned


def test_ended_guest_is_forgotten(host, loop, monkeypatch):
    host.run(loop, 2, 0.1)
    monkeypatch.setattr(manager, "process_of", lambda *_: None)
    host.run(loop, 5, 3.0)
    host.guests = {}
    host.run(loop, 1, 0)
    assert loop.watched == {}
    assert counts(host) == [1]


# -- The process -----------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path):
    paths = Paths(tmp_path / "state", tmp_path / "run")
    paths.run.mkdir()
    return paths


@pytest.fixture
def job(paths):
    """Return a function that starts a job which acquires the manager."""
    journals = []

    def begin(number, interval=1.0, busy=0.8):
        header = JobHeader(
            JobAttempt(str(number), 0, "u", 1000), "local", {"iocm": "vtorque-iocm 1"}
        )
        with Journal.start(paths, header) as journal:
            journals.append(journal.path)
            manager = ManagerProcess.for_node(paths, interval, busy)
            journal.acquire(manager, plugin="iocm", phase="post-boot")
        return journal.path

    yield begin
    for path in journals:
        end(path, paths)
    assert holder(paths) is None


def end(path, paths):
    plugins = load_with_core("iocm", node)
    assert teardown(path, paths, plugins).clean


def holder(paths):
    """Return the manager's pid."""
    try:
        with (paths.run / "iocm-manager.lock").open("rb+") as lock:
            return ManagerProcess.for_node(paths)._holder(lock.fileno())
    except FileNotFoundError:
        return None


def test_one_manager_runs_from_the_first_job_to_the_last(job, paths):
    first = job(1)
    pid = holder(paths)
    second = job(2, interval=0.5, busy=0.5)
    assert holder(paths) == pid is not None
    end(first, paths)
    assert holder(paths) == pid
    end(second, paths)
    eventually(lambda: not alive(pid))
    assert not (paths.run / "iocm-manager.lock").exists()


def test_next_job_restarts_a_killed_manager(job, paths):
    first = job(1)
    pid = holder(paths)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not alive(pid))
    second = job(2)
    again = holder(paths)
    assert again not in (None, pid)
    end(first, paths)
    assert holder(paths) == again
    end(second, paths)
    assert holder(paths) is None


def test_killed_manager_leaves_nothing_after_its_last_job(job, paths):
    only = job(1)
    os.kill(holder(paths), signal.SIGKILL)
    end(only, paths)
    assert list(paths.run.glob("iocm*")) == []


def test_manager_sleeps_without_guests_and_its_log_is_private(job, paths):
    job(1)
    pid = holder(paths)

    def sleeps():
        before = Path(f"/proc/{pid}/schedstat").read_text().split()[2]
        time.sleep(0.5)
        return Path(f"/proc/{pid}/schedstat").read_text().split()[2] == before

    eventually(sleeps)
    log = paths.state / "iocm.log"
    assert log.stat().st_mode & 0o077 == 0
    assert node_process.LOG_BYTES <= 1 << 20


def test_manager_is_identified_by_its_lock(paths):
    resource = ManagerProcess.for_node(paths, 2.0, 0.5)
    assert resource.argv[-4:] == (str(paths.state), str(paths.run), "2.0", "0.5")
    assert arguments(resource) == arguments(ManagerProcess.for_node(paths, 1.0, 0.8))
