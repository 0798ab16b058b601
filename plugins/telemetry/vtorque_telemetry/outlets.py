"""One thread per sink, so that a hanging sink does not delay other sinks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence

from vtorque_telemetry.api import Sample, SampleSink

log = logging.getLogger("telemetry")
_FLUSH = 0.5  # seconds in which all sinks together must close


class ExporterThread:
    """A sink with its thread. Only the newest samples wait for the sink; older ones are lost."""

    def __init__(self, name: str, sink: SampleSink, deadline: float) -> None:
        self.name = name
        self.lost = 0
        self._sink = sink
        self._deadline = deadline
        self._changed = threading.Condition()
        self._samples: Sequence[Sample] | None = None
        self._ended: set[str] = set()
        self._closing = False
        self._since = 0.0  # monotonic time when the sink was last called; 0: no call is running
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def give(self, samples: Sequence[Sample], ended: Collection[str]) -> None:
        """Queue the samples of one moment and the ids of ended jobs. Never blocks."""
        with self._changed:
            if self._samples is not None:
                self.lost += len(self._samples)
            hangs = self._since and time.monotonic() - self._since > self._deadline
            if hangs:
                self._log_once(f"no answer for {self._deadline:g} s; samples are being lost")
            self._samples = samples
            self._ended |= set(ended)
            self._changed.notify()

    def close(self, until: float) -> None:
        """Close the sink. If it has not closed at the monotonic time ``until``, abandon it."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._since = 0.0
                self._changed.wait_for(lambda: self._samples is not None or self._closing)
                samples, self._samples = self._samples, None
                ended, self._ended = self._ended, set()
                closing = self._closing
                self._since = begun = time.monotonic()
            try:
                if ended:
                    self._sink.end(ended)
                if samples is not None:
                    self._sink.write(samples, begun + self._deadline)
                if closing:
                    self._sink.close()
            except Exception as error:  # possibly third-party code
                self._log_once(f"{type(error).__name__}: {error}")
            else:
                if samples is not None and self._trouble:
                    log.info("exporter %s works again; %d samples were lost", self.name, self.lost)
                    self._trouble = ""
            if closing:
                return

    def _log_once(self, trouble: str) -> None:
        if not self._trouble:
            log.warning("exporter %s: %s", self.name, trouble[:500])
        self._trouble = trouble


def close_all(outlets: Collection[ExporterThread]) -> None:
    """Close all exporters within :data:`_FLUSH` seconds."""
    until = time.monotonic() + _FLUSH
    for outlet in outlets:
        outlet.close(until)
