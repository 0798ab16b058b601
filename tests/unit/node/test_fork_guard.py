"""A teardown closes connections to libvirtd and waits for their threads before it forks."""

import threading
import time

from acme_card import loaded, starter
from patience import LONG, with_more_time
from vtorque_core.api import children
from vtorque_core.base import hypervisor
from vtorque_core.base.names import Paths
from vtorque_core.node.end import teardown


class ConnectionDouble:
    """A double of libvirt's connection that can only be closed."""

    closed = False

    def close(self):
        self.closed = True


def test_no_child_is_forked_while_a_connection_is_open(tmp_path, monkeypatch):
    """A teardown must close all connections to libvirt before each fork."""
    paths = Paths(tmp_path / "state", tmp_path / "run")
    journal = starter(paths)()
    connection = ConnectionDouble()
    monkeypatch.setitem(hypervisor._connections, "acme:///system", connection)
    seen = []
    fork = children.os.fork

    def forks():
        seen.append((connection.closed, dict(hypervisor._connections)))
        return fork()

    monkeypatch.setattr(children.os, "fork", forks)
    assert teardown.teardown(journal.path, paths, loaded()).clean
    assert seen  # at least the last call of the plugin
    assert {repr(each) for each in seen} == {"(True, {})"}


def test_teardown_waits_for_threads_that_end(monkeypatch):
    def attempt(limit):
        monkeypatch.setattr(teardown, "_THREADS_END", limit)  # conftest.py has it at 0 under xdist
        thread = threading.Thread(target=time.sleep, args=(0.1,))
        thread.start()
        teardown._drop_connections()  # takes all the time if xdist has a thread too
        assert not thread.is_alive()

    with_more_time(attempt, 1, 5, 20)


def test_wait_for_threads_is_bounded(monkeypatch):
    monkeypatch.setattr(teardown, "_THREADS_END", 0.05)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(LONG,))
    thread.start()
    teardown._drop_connections()
    assert thread.is_alive()
    stop.set()
    thread.join()
