"""Prometheus' text format, version 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

from collections.abc import Iterable

from vtorque_core.api_telemetry import Sample
from vtorque_telemetry.measure import escape

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(samples: Iterable[Sample]) -> bytes:
    """Return the samples by name, each with its help and type. Without times: they are new."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.name, []).append(sample)
    lines = []
    for name, group in groups.items():
        help_text = group[0].help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {group[0].kind}"]
        for sample in group:
            labels = ",".join(f'{k}="{escape(v)}"' for k, v in sample.labels.items())
            lines.append(f"{name}{{{labels}}} {sample.value!r}")
    return "".join(f"{line}\n" for line in lines).encode()
