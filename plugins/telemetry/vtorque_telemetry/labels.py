"""The series of a guest or a job: names, kinds and labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vtorque_telemetry.api import Sample
from vtorque_telemetry.metrics import Kind, Own, Values, help_of, kind_of

_LABEL = 200  # characters


@dataclass(frozen=True, slots=True)
class Series:
    """A series without its values. ``text`` is its name in series.jsonl."""

    name: str
    labels: Mapping[str, str]
    kind: Kind
    help: str
    text: str


class Labels:
    """The labels that all series of one guest, or of a whole job, have in common.

    ``base`` contains these labels, such as job and node. :meth:`series` adds further labels.
    """

    def __init__(self, base: Mapping[str, str]) -> None:
        self.base = {name: label_value(value) for name, value in base.items()}
        self._known: dict[tuple[str, Own], Series] = {}

    def series(self, name: str, own: Own) -> Series:
        """Return a series by name and additional labels, which never replace the base labels."""
        known = self._known.get((name, own))
        if known is None:
            labels = {**{k: label_value(v) for k, v in own}, **self.base}
            inner = ",".join(f'{k}="{escape(label_value(v))}"' for k, v in own)
            text = f"{name}{{{inner}}}" if inner else name
            known = Series(name, labels, kind_of(name), help_of(name), text)
            self._known[name, own] = known
        return known

    def samples(self, values: Values, at: float) -> Iterator[Sample]:
        """Yield the values as samples."""
        for (name, own), value in values.items():
            s = self.series(name, own)
            yield Sample(s.name, value, s.labels, s.kind, at, s.help)

    def texts(self, values: Values) -> dict[str, float]:
        """Return the values by their names in series.jsonl."""
        return {self.series(name, own).text: round(v, 6) for (name, own), v in values.items()}


def label_value(text: str) -> str:
    """Return a label's value, truncated, with unprintable characters replaced."""
    return "".join(c if c.isprintable() else "?" for c in text[:_LABEL])


def escape(text: str) -> str:
    """Escape a label's value for Prometheus' text format."""
    return re.sub(r'(["\\])', r"\\\1", text).replace("\n", "\\n")
