"""Contract that every sink of job logs passes (``vtorque1.joblog``).

Example::

    class TestMine(SinkContract):
        @pytest.fixture
        def harness(self):
            return MyHarness()

Requires ``vtorque-joblog``, as the sink itself does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import pytest

from vtorque_core.api import HostFault
from vtorque_testing.far_end import ends, until


class SinkHarness(Protocol):
    """The sink, and a double of what its records go to.

    If records arrive after ``handle()`` has returned, set ``asynchronous = True``: the contract
    then waits for them, a minute at most.
    """

    def open(self) -> logging.Handler:
        """Return the open sink."""
        ...

    def received(self) -> Sequence[tuple[str, str]]:
        """Return job and message of each record that has arrived, in order."""
        ...

    def silent(self) -> contextlib.AbstractContextManager[None]:
        """Have the far end not answer."""
        ...


def record(message: str, job: str = "42.srv", **more: Any) -> logging.LogRecord:
    """Return a record as a sink gets it; ``more``: keys of the entry."""
    entry = {
        "t": 1.7e9, "level": "INFO", "logger": "vtorque_core.node", "plugin": "core",
        "phase": "boot", "guest": None, "node": "n1", "job": job, "message": message, **more,
    }  # fmt: skip
    own = {key: entry[key] for key in ("job", "node", "guest", "phase", "plugin")}
    own |= {"name": entry["logger"], "levelno": logging.INFO, "levelname": "INFO"}
    own |= {"msg": message, "args": None, "created": entry["t"], "uid": 1000, "key": f"{job}.0"}
    return logging.makeLogRecord(own | {"entry": entry})


class SinkContract:
    """Subclass it, name it ``Test...``, and override the fixture ``harness``."""

    @pytest.fixture
    def harness(self) -> SinkHarness:
        """Return the harness of the sink under test."""
        raise NotImplementedError("override the fixture harness() in the subclass")

    def test_a_record_arrives(self, harness: SinkHarness) -> None:
        """With its job."""
        handler = harness.open()
        handler.handle(record("guest 0 is ready"))
        _until(harness, [("42.srv", "guest 0 is ready")])
        handler.close()

    def test_each_arrives_once_and_in_order(self, harness: SinkHarness) -> None:
        """Of several jobs."""
        handler = harness.open()
        sent = [(f"{40 + n % 3}.srv", f"line {n}") for n in range(20)]
        for job, message in sent:
            handler.handle(record(message, job))
        _until(harness, sent)
        handler.close()

    def test_any_text_is_one_record_as_it_is(self, harness: SinkHarness) -> None:
        """Quotes, percent signs, what looks like another record; details are no records either."""
        handler = harness.open()
        awkward = 'a "b" %s %(name)s {c} <d> \\n é ' + "x" * 3000
        handler.handle(record(awkward, detail=["first line", "second line"]))
        handler.handle(record("the next"))
        _until(harness, [("42.srv", awkward), ("42.srv", "the next")])
        handler.close()

    def test_a_far_end_that_does_not_answer_is_told(self, harness: SinkHarness) -> None:
        """With OSError or HostFault: then the record comes again. What is swallowed is lost."""
        with harness.silent():
            handler = harness.open()
            error = ends(lambda: handler.handle(record("lost?")))
            assert isinstance(error, OSError | HostFault), f"it raised {error!r}"
            handler.close()
        handler = harness.open()
        handler.handle(record("again"))
        until(
            harness,
            lambda: ("42.srv", "again") in harness.received(),
            lambda: f"sent: the record 'again'; received: {list(harness.received())}",
        )
        handler.close()

    def test_closing_twice_is_right(self, harness: SinkHarness) -> None:
        """Also what was never written to."""
        handler = harness.open()
        handler.close()
        handler.close()


def _until(harness: SinkHarness, wanted: Sequence[tuple[str, str]]) -> None:
    until(
        harness,
        lambda: len(harness.received()) >= len(wanted),
        lambda: f"sent: {list(wanted)}; received: {list(harness.received())}",
    )
    assert list(harness.received()) == list(wanted)
