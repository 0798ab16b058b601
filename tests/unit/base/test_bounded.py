"""Calls of code that may hang."""

import threading

import pytest

from vtorque_core.base.hypervisor import Overdue, run_bounded
from vtorque_core.records import log


def test_bounded_returns_the_result_or_raises_the_error():
    assert run_bounded(lambda: 7, 60.0) == 7
    with pytest.raises(KeyError):
        run_bounded(lambda: {}["missing"], 60.0)


def test_bounded_raises_overdue_for_work_that_hangs():
    ended = threading.Event()
    with pytest.raises(Overdue):
        run_bounded(ended.wait, 0.0)
    ended.set()


def test_bounded_keeps_the_guest_of_log_lines():
    with log.log_context(guest=3):
        assert run_bounded(log._guest.get, 60.0) == 3
