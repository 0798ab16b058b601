"""Contract that every exporter of samples passes (``vtorque1.telemetry``).

Example::

    class TestMine(ExporterContract):
        @pytest.fixture
        def harness(self):
            return MyHarness()

Requires the distribution ``vtorque-telemetry``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import pytest

from vtorque_core.api import HostFault
from vtorque_telemetry.api import Sample, SampleSink
from vtorque_testing.far_end import call_with_timeout, wait_for_data

_LIMIT = 2.0  # seconds for a write to a receiver that does not answer
AWKWARD = 'a "b" \\c, d=e {f} é'


class ExporterHarness(Protocol):
    """The exporter under test, and a double of the receiver of its samples.

    If samples arrive after ``write()`` has returned, set ``asynchronous = True``. The contract then
    waits up to one minute for them.
    """

    def open(self) -> SampleSink:
        """Return a new, open exporter."""
        ...

    def received_samples(self) -> Sequence[tuple[str, float, Mapping[str, str]]]:
        """Return name, value and labels of each sample that the receiver got, in order."""
        ...

    def silence(self) -> contextlib.AbstractContextManager[None]:
        """Make the receiver unresponsive while the context is active."""
        ...


def sample(name: str = "vtorque_cpu_seconds_total", value: float = 1.5, **more: str) -> Sample:
    """Return a sample with the usual labels and those in ``more``."""
    labels = {"job": "42.srv", "user": "ada", "node": "n1", "guest": "0", **more}
    return Sample(name, value, labels, "counter" if "_total" in name else "gauge", 1.7e9, "help")


class ExporterContract:
    """Tests of an exporter. Subclass as ``Test...`` and override the fixture ``harness``."""

    @pytest.fixture
    def harness(self) -> ExporterHarness:
        """Return the harness of the exporter under test."""
        raise NotImplementedError("override the fixture harness() in the subclass")

    def test_samples_arrive(self, harness: ExporterHarness) -> None:
        """Samples of several jobs must arrive with their names, values and labels."""
        sink = harness.open()
        sent = [sample(), sample("vtorque_guest_memory_bytes", 2.0**40, job="43.srv")]
        _write(sink, *sent)
        _wait_for_samples(harness, *sent)
        sink.close()

    def test_any_value_arrives_unchanged(self, harness: ExporterHarness) -> None:
        """Zero, small and large values must arrive unchanged."""
        sink = harness.open()
        for number, value in enumerate((0.0, 1e-9, 2.0**53, 0.1)):
            one = sample("vtorque_guest_memory_bytes", value, guest=str(number))
            _write(sink, one)
            _wait_for_samples(harness, one)
        sink.close()

    def test_any_label_arrives_unchanged(self, harness: ExporterHarness) -> None:
        """Labels with quotes, commas and other special characters must arrive unchanged."""
        sink = harness.open()
        one = sample(device=AWKWARD)
        _write(sink, one)
        _wait_for_samples(harness, one)
        sink.close()

    def test_each_sample_arrives_once(self, harness: ExporterHarness) -> None:
        """A write must not send the samples of earlier writes again."""
        sink = harness.open()
        for value in (1.0, 2.0, 3.0):
            _write(sink, sample(value=value))
            _wait_for_samples(harness, sample(value=value))
        values = [value for _, value, _ in harness.received_samples()]
        assert len(values) == len(set(values)), f"samples were sent twice: {values}"
        sink.close()

    def test_empty_samples_and_unknown_jobs_are_accepted(self, harness: ExporterHarness) -> None:
        """``write()`` without samples and ``end()`` of an unknown job must not raise.

        A node without jobs has no samples, and a job may end before its first sample.
        """
        sink = harness.open()
        _write(sink)
        sink.end(["99.srv"])
        one = sample()
        _write(sink, one)
        _wait_for_samples(harness, one)
        sink.end(["42.srv"])
        sink.close()

    def test_unresponsive_receiver_ends_the_write_by_its_deadline(
        self, harness: ExporterHarness
    ) -> None:
        """If the receiver does not answer, ``write()`` must return or raise by its deadline.

        ``write()`` may raise only OSError or HostFault. A sample must not be lost without an error.
        The next sample must arrive once the receiver answers again.
        """
        sink = harness.open()
        with harness.silence():
            error = call_with_timeout(
                lambda: sink.write([sample(value=7.0)], time.monotonic() + _LIMIT)
            )
            assert error is None or isinstance(error, OSError | HostFault), repr(error)
            told = [value for _, value, _ in harness.received_samples()]
            assert error is not None or 7.0 in told, "no sample arrived, and no error was raised"
        one = sample(value=8.0)
        _write(sink, one)
        _wait_for_samples(harness, one)
        sink.close()

    def test_closing_twice_is_allowed(self, harness: ExporterHarness) -> None:
        """An exporter may be closed twice, even if it has never received a sample."""
        sink = harness.open()
        sink.close()
        sink.close()


def _write(sink: SampleSink, *samples: Sample) -> None:
    sink.write(samples, time.monotonic() + 60)


def _wait_for_samples(harness: ExporterHarness, *samples: Sample) -> None:
    wanted = [(each.name, each.value, dict(each.labels)) for each in samples]

    def there() -> bool:
        found = [(name, value, dict(labels)) for name, value, labels in harness.received_samples()]
        return all(each in found for each in wanted)

    wait_for_data(
        harness, there, lambda: f"sent: {wanted}; received: {list(harness.received_samples())}"
    )
