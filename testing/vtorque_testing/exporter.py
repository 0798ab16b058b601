"""Contract that every exporter of samples passes (``vtorque1.telemetry``).

Example::

    class TestMine(ExporterContract):
        @pytest.fixture
        def harness(self):
            return MyHarness()

Requires ``vtorque-telemetry``, as the exporter itself does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import pytest

from vtorque_core.api import HostFault
from vtorque_telemetry.api import Sample, Sink
from vtorque_testing.far_end import ends, until

_LIMIT = 2.0  # seconds for a write to an end that does not answer
AWKWARD = 'a "b" \\c, d=e {f} é'


class ExporterHarness(Protocol):
    """The exporter, and a double of what its samples go to.

    If samples arrive after ``write()`` has returned, set ``asynchronous = True``: the contract then
    waits for them, a minute at most.
    """

    def open(self) -> Sink:
        """Return the open exporter."""
        ...

    def received(self) -> Sequence[tuple[str, float, Mapping[str, str]]]:
        """Return what has arrived: names, values and labels as they were, in order."""
        ...

    def silent(self) -> contextlib.AbstractContextManager[None]:
        """Have the far end not answer."""
        ...


def sample(name: str = "vtorque_cpu_seconds_total", value: float = 1.5, **more: str) -> Sample:
    """Return a sample as the sampler makes it; ``more``: labels."""
    labels = {"job": "42.srv", "user": "ada", "node": "n1", "guest": "0", **more}
    return Sample(name, value, labels, "counter" if "_total" in name else "gauge", 1.7e9, "help")


class ExporterContract:
    """Subclass it, name it ``Test...``, and override the fixture ``harness``."""

    @pytest.fixture
    def harness(self) -> ExporterHarness:
        """Return the harness of the exporter under test."""
        raise NotImplementedError("override the fixture harness() in the subclass")

    def test_samples_arrive(self, harness: ExporterHarness) -> None:
        """Names, values and labels, those of several jobs."""
        sink = harness.open()
        sent = [sample(), sample("vtorque_guest_memory_bytes", 2.0**40, job="43.srv")]
        _write(sink, *sent)
        _until(harness, *sent)
        sink.close()

    def test_any_value_arrives_as_it_is(self, harness: ExporterHarness) -> None:
        """Small and large ones, and zero."""
        sink = harness.open()
        for number, value in enumerate((0.0, 1e-9, 2.0**53, 0.1)):
            one = sample("vtorque_guest_memory_bytes", value, guest=str(number))
            _write(sink, one)
            _until(harness, one)
        sink.close()

    def test_any_label_arrives_as_it_is(self, harness: ExporterHarness) -> None:
        """Quotes, commas and what else a format may use itself."""
        sink = harness.open()
        one = sample(device=AWKWARD)
        _write(sink, one)
        _until(harness, one)
        sink.close()

    def test_each_sample_arrives_once(self, harness: ExporterHarness) -> None:
        """Not the last ones with it."""
        sink = harness.open()
        for value in (1.0, 2.0, 3.0):
            _write(sink, sample(value=value))
            _until(harness, sample(value=value))
        values = [value for _, value, _ in harness.received()]
        assert len(values) == len(set(values)), f"some twice: {values}"
        sink.close()

    def test_nothing_to_send_and_jobs_that_it_does_not_know_are_no_errors(
        self, harness: ExporterHarness
    ) -> None:
        """A node without jobs has no samples; one job ends before its first."""
        sink = harness.open()
        _write(sink)
        sink.end(["99.srv"])
        one = sample()
        _write(sink, one)
        _until(harness, one)
        sink.end(["42.srv"])
        sink.close()

    def test_a_far_end_that_does_not_answer_ends_the_write_by_its_deadline(
        self, harness: ExporterHarness
    ) -> None:
        """With OSError or HostFault, which are told once; and the next one arrives."""
        sink = harness.open()
        with harness.silent():
            error = ends(lambda: sink.write([sample(value=7.0)], time.monotonic() + _LIMIT))
            assert error is None or isinstance(error, OSError | HostFault), repr(error)
            told = [value for _, value, _ in harness.received()]
            assert error is not None or 7.0 in told, "nothing arrived and nothing was raised"
        one = sample(value=8.0)
        _write(sink, one)
        _until(harness, one)
        sink.close()

    def test_closing_twice_is_right(self, harness: ExporterHarness) -> None:
        """Also what was never written to."""
        sink = harness.open()
        sink.close()
        sink.close()


def _write(sink: Sink, *samples: Sample) -> None:
    sink.write(samples, time.monotonic() + 60)


def _until(harness: ExporterHarness, *samples: Sample) -> None:
    wanted = [(each.name, each.value, dict(each.labels)) for each in samples]

    def there() -> bool:
        found = [(name, value, dict(labels)) for name, value, labels in harness.received()]
        return all(each in found for each in wanted)

    until(harness, there, lambda: f"sent: {wanted}; received: {list(harness.received())}")
