"""Before a teardown forks, the threads that talked to libvirtd are gone."""

import threading
import time

from patience import LONG, with_more_time
from vtorque_core import (
    hypervisor,  # noqa: F401 - imported, so that there may be such threads
    teardown,
)


def test_the_teardown_waits_for_threads_that_end(monkeypatch):
    def attempt(limit):
        monkeypatch.setattr(teardown, "_THREADS_END", limit)  # conftest.py has it at 0 under xdist
        thread = threading.Thread(target=time.sleep, args=(0.1,))
        thread.start()
        teardown._drop_connections()  # takes all the time if xdist has a thread too
        assert not thread.is_alive()

    with_more_time(attempt, 1, 5, 20)


def test_it_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(teardown, "_THREADS_END", 0.05)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    begun = time.monotonic()
    teardown._drop_connections()
    assert time.monotonic() - begun < LONG
    stop.set()
    thread.join()
