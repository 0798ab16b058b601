"""Contract that every sink of job logs passes (``vtorque1.joblog``).

Example::

    class TestMine(SinkContract):
        @pytest.fixture
        def harness(self):
            return MyHarness()

Requires the distribution ``vtorque-joblog``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import pytest

from vtorque_core.api import HostFault
from vtorque_testing.far_end import call_with_timeout, wait_for_data


class SinkHarness(Protocol):
    """The sink under test, and a double of the receiver of its records.

    If records arrive after ``handle()`` has returned, set ``asynchronous = True``. The contract
    then waits up to one minute for them.
    """

    def open(self) -> logging.Handler:
        """Return a new, open sink."""
        ...

    def received_records(self) -> Sequence[tuple[str, str]]:
        """Return job and message of each record that the receiver got, in order."""
        ...

    def silence(self) -> contextlib.AbstractContextManager[None]:
        """Make the receiver unresponsive while the context is active."""
        ...


def record(message: str, job: str = "42.srv", **more: Any) -> logging.LogRecord:
    """Return a log record as sinks receive it; ``more`` adds keys to the attribute ``entry``."""
    entry = {
        "t": 1.7e9, "level": "INFO", "logger": "vtorque_core.node", "plugin": "core",
        "phase": "boot", "guest": None, "node": "n1", "job": job, "message": message, **more,
    }  # fmt: skip
    own = {key: entry[key] for key in ("job", "node", "guest", "phase", "plugin")}
    own |= {"name": entry["logger"], "levelno": logging.INFO, "levelname": "INFO"}
    own |= {"msg": message, "args": None, "created": entry["t"], "uid": 1000, "key": f"{job}.0"}
    return logging.makeLogRecord(own | {"entry": entry})


class SinkContract:
    """Tests of a sink. Subclass as ``Test...`` and override the fixture ``harness``."""

    @pytest.fixture
    def harness(self) -> SinkHarness:
        """Return the harness of the sink under test."""
        raise NotImplementedError("override the fixture harness() in the subclass")

    def test_record_arrives_with_its_job(self, harness: SinkHarness) -> None:
        """A record must arrive with the id of its job."""
        handler = harness.open()
        handler.handle(record("guest 0 is ready"))
        _wait_for_records(harness, [("42.srv", "guest 0 is ready")])
        handler.close()

    def test_records_arrive_once_and_in_order(self, harness: SinkHarness) -> None:
        """Records of several jobs must arrive exactly once and in order."""
        handler = harness.open()
        sent = [(f"{40 + n % 3}.srv", f"line {n}") for n in range(20)]
        for job, message in sent:
            handler.handle(record(message, job))
        _wait_for_records(harness, sent)
        handler.close()

    def test_any_text_arrives_unchanged_as_one_record(self, harness: SinkHarness) -> None:
        """Any message must arrive unchanged as one record.

        The test's message contains quotes, percent signs and braces, and has more than 3,000
        characters. The lines in the record's key ``detail`` must not become separate records.
        """
        handler = harness.open()
        awkward = 'a "b" %s %(name)s {c} <d> \\n é ' + "x" * 3000
        handler.handle(record(awkward, detail=["first line", "second line"]))
        handler.handle(record("the next"))
        _wait_for_records(harness, [("42.srv", awkward), ("42.srv", "the next")])
        handler.close()

    def test_unresponsive_receiver_raises(self, harness: SinkHarness) -> None:
        """The sink must raise OSError or HostFault if the receiver does not answer.

        vTorque then sends the record again. If the sink ignores the error, the record is lost.
        """
        with harness.silence():
            handler = harness.open()
            error = call_with_timeout(lambda: handler.handle(record("lost?")))
            assert isinstance(error, OSError | HostFault), f"it raised {error!r}"
            handler.close()
        handler = harness.open()
        handler.handle(record("again"))
        wait_for_data(
            harness,
            lambda: ("42.srv", "again") in harness.received_records(),
            lambda: f"sent: the record 'again'; received: {list(harness.received_records())}",
        )
        handler.close()

    def test_closing_twice_is_allowed(self, harness: SinkHarness) -> None:
        """A sink may be closed twice, even if it has never received a record."""
        handler = harness.open()
        handler.close()
        handler.close()


def _wait_for_records(harness: SinkHarness, wanted: Sequence[tuple[str, str]]) -> None:
    wait_for_data(
        harness,
        lambda: len(harness.received_records()) >= len(wanted),
        lambda: f"sent: {list(wanted)}; received: {list(harness.received_records())}",
    )
    assert list(harness.received_records()) == list(wanted)
