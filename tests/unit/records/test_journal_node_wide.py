"""A killed node-wide process is started again by the next job, and ends with the last."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from vtorque_core.api.daemon_process import DaemonProcess
from vtorque_core.api.values import hookimpl
from vtorque_core.base.locks import lock_holder
from vtorque_core.base.names import JobAttempt
from vtorque_core.config.plugins import Plugins
from vtorque_core.live import changes
from vtorque_core.node.end.teardown import teardown
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader


@dataclass(frozen=True)
class NodeWideManager(DaemonProcess):
    kind = "acme-manager"
    scope = "node"


class NodeWidePlugin:
    @hookimpl
    def vtorque_resources(self):
        yield NodeWideManager


@pytest.fixture
def manager(tmp_path):
    return NodeWideManager(("sleep", "1000"), str(tmp_path / "lock"))


def start(paths, manager, job):
    with Journal.start(
        paths, JobHeader(JobAttempt(job, 0, "u", 1000), "local", {"acme": "a 1"})
    ) as journal:
        journal.acquire(manager, plugin="acme", phase="post-boot")
    return journal.path


def end(paths, journal):
    plugins = Plugins()
    plugins.register("acme", NodeWidePlugin(), "a 1")
    assert teardown(journal, paths, plugins).clean


def holder(manager):
    if not Path(manager.lock).exists():
        return None
    with Path(manager.lock).open("rb+") as lock:
        return lock_holder(lock.fileno())


def test_killed_node_wide_process_is_restarted_by_the_next_job(paths, manager):
    first = start(paths, manager, "1")
    pid = holder(manager)
    assert not manager.is_lost()
    second = start(paths, manager, "2")
    assert holder(manager) == pid
    os.kill(pid, signal.SIGKILL)
    while not manager.is_lost():
        pass
    third = start(paths, manager, "3")
    again = holder(manager)
    assert again not in (None, pid)
    for journal in (first, third):
        end(paths, journal)
        assert holder(manager) == again
    end(paths, second)
    assert holder(manager) is None
    assert manager.is_lost()


def test_manager_is_woken_by_a_change_of_a_journal(paths, manager):
    paths.journal.mkdir(parents=True)
    events = changes.events()
    changes.watch(events, paths.journal)
    try:
        with pytest.raises(BlockingIOError):
            os.read(events, 4096)
        journal = start(paths, manager, "1")
        assert os.read(events, 4096)
        end(paths, journal)
        assert os.read(events, 4096)
        paths.journal.rmdir()
        with pytest.raises(OSError, match="cannot watch"):
            changes.watch(events, paths.journal)
    finally:
        os.close(events)
