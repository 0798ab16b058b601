"""Prometheus' text format, version 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from vtorque_telemetry.api import Sample
from vtorque_telemetry.labels import escape

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


_KEPT = 20_000  # maximum number of cached label texts


class LabelTexts:
    """A cache of the texts of label mappings. Its keys are the mappings' ``id()``."""

    def __init__(self, render: Callable[[Mapping[str, str]], str]) -> None:
        self._render = render
        self._known: dict[int, tuple[Mapping[str, str], str]] = {}

    def __call__(self, labels: Mapping[str, str]) -> str:
        """Return the text of these labels."""
        known = self._known.get(id(labels))
        if known is None or known[0] is not labels:
            if len(self._known) >= _KEPT:
                self._known.clear()
            known = self._known[id(labels)] = labels, self._render(labels)
        return known[1]


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{k}="{escape(v)}"' for k, v in labels.items())


_texts = LabelTexts(_labels)


def text(samples: Iterable[Sample]) -> bytes:
    """Format the samples, grouped by name, with help and type but without times."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.name, []).append(sample)
    lines = []
    for name, group in groups.items():
        help_text = group[0].help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {group[0].kind}"]
        lines += [f"{name}{{{_texts(sample.labels)}}} {sample.value!r}" for sample in group]
    return "".join(f"{line}\n" for line in lines).encode()
