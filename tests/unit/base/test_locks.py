"""Locks of jobs and of the node between processes: prologue, epilogues, killed holders."""

import errno
import fcntl
import os
import time

import pytest

from acme_card import AcmeCard, in_other_process, loaded
from patience import LONG
from vtorque_core.api.children import Child
from vtorque_core.base import locks
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import Busy, job_lock, node_lock, take_lock
from vtorque_core.node.end.teardown import release_job, teardown
from vtorque_core.records.reading import journals


def test_concurrent_epilogues_release_once(paths, start, tmp_path):
    journal = start()
    for number in range(5):
        journal.take(AcmeCard(str(tmp_path / f"card{number}")))
    pids = [in_other_process(lambda: release(paths)) for _ in range(3)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    assert journals(paths) == [] and not list(tmp_path.glob("card*"))
    assert list((paths.run / "locks").iterdir()) == []


def release(paths):
    reports = release_job(paths, "42.srv", plugins_for=lambda _: loaded())
    assert all(report.clean for report in reports)


def test_epilogue_waits_for_the_prologue_until_its_deadline(paths, start):
    journal = start()
    (read_end, write_end), (wait, go) = os.pipe(), os.pipe()

    def prologue():
        with job_lock(paths, "42.srv"):
            os.write(write_end, b"x")
            os.read(wait, 1)
            time.sleep(0.3)

    pid = in_other_process(prologue)
    os.read(read_end, 1)
    with pytest.raises(Busy, match=f"pid {pid}"):
        teardown(journal.path, paths, loaded(), deadline=0.05)
    os.write(go, b"x")
    assert teardown(journal.path, paths, loaded(), deadline=LONG).clean
    os.waitpid(pid, 0)
    for descriptor in (read_end, write_end, wait, go):
        os.close(descriptor)


def test_lock_ends_with_a_killed_holder(paths):
    def hold():
        with job_lock(paths, "1"), node_lock(paths):
            os.kill(os.getpid(), 9)

    os.waitpid(in_other_process(hold), 0)
    with job_lock(paths, "1", 0), node_lock(paths, 0):
        pass


def test_forked_child_does_not_keep_locks_of_its_parent(paths):
    with node_lock(paths):
        child = Child(lambda: time.sleep(3 * LONG), 3 * LONG)
    with node_lock(paths, LONG):
        pass
    os.kill(child.pid, 9)
    assert "exited with status -9" in child.wait()


def test_waiter_for_a_removed_lock_file_acquires_the_new_file(paths):
    """A waiter for the removed file must not believe that it holds the lock of the new one."""
    (read_end, write_end), (wait, go) = os.pipe(), os.pipe()
    path = paths.job_lock("1")

    def second():
        locks.close_inherited()  # those inherited from here
        with job_lock(paths, "1", LONG):
            assert path.exists()
            os.write(write_end, b"x")
            os.read(wait, 1)

    with job_lock(paths, "1"):
        pid = in_other_process(second)
        time.sleep(0.1)
    os.read(read_end, 1)
    with pytest.raises(Busy), job_lock(paths, "1", 0):
        pass
    os.write(go, b"x")
    os.waitpid(pid, 0)
    for descriptor in (read_end, write_end, wait, go):
        os.close(descriptor)


def test_lock_whose_file_cannot_be_written_is_released(tmp_path, monkeypatch):
    """Otherwise a second attempt, once the disk has room, would be blocked by the first."""
    path = tmp_path / "lock"

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(HostFault, match="No space left on device"):
            take_lock(path, 0)
    os.close(take_lock(path, 0))


def test_holder_of_names_the_process_that_holds_a_posix_lock(tmp_path):
    path = tmp_path / "daemon.lock"
    path.touch()
    assert locks.holder_of(path) is None

    def hold(ready, wait):
        file = path.open("rb+")
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(ready, b"1")
        os.read(wait, 1)

    (held, ready), (wait, go) = os.pipe(), os.pipe()
    pid = in_other_process(lambda: hold(ready, wait))
    os.read(held, 1)
    assert locks.holder_of(path) == pid
    os.write(go, b"1")
    os.waitpid(pid, 0)
    assert locks.holder_of(path) is None
    with pytest.raises(FileNotFoundError):
        locks.holder_of(tmp_path / "none.lock")


def test_child_that_is_forked_beside_the_node_lock_can_acquire_it_later(paths):
    def work():
        with node_lock(paths, LONG):
            pass

    with node_lock(paths):
        child = Child(work, LONG)
    assert child.wait() == ""
