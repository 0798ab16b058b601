"""Extract numbers from a job's output, JSON, metrics or report."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vtorque_core.api import name_errors, printable
from vtorque_experiment.definition import NumberSource
from vtorque_experiment.place import read_tail
from vtorque_experiment.wrapper import METRICS

MAX_READ = 64 << 20  # bytes that are read from the end of a file
REPORT = "report.json"
_WHICH: Mapping[str, Callable[[Sequence[float]], float]] = {
    "first": lambda found: found[0],
    "last": lambda found: found[-1],
    "min": min,
    "max": max,
    "sum": sum,
    "mean": statistics.fmean,
}


class MissingNumber(Exception):
    """A number is missing; the message says what was searched for, and where."""


def number(take: NumberSource, point: Path) -> float:
    """Extract a number from the files in a point's directory. Raises MissingNumber."""
    if take.pattern is not None:
        text = _text(point, take.file)
        found = [*_matches(take.pattern, text)]
        what = f"the pattern {take.pattern!r} in {take.file}"
        if any(True for _ in re.finditer(take.pattern, text, re.MULTILINE)):
            what = f"a number in what {what} finds: put its digits in a group, (...)"
        elif last := text.strip().rpartition("\n")[2]:
            what = f"{what}; its last line: {last}"
    elif take.metric is not None:
        found = [*_metrics(take.metric, _text(point, METRICS))]
        what = f"the metric {take.metric} in $VTORQUE_METRICS"
    else:
        file, path = (take.file, take.json) if take.json is not None else (REPORT, take.report)
        found = [*_numbers(_value_at(_json(point, file), path or ""))]
        what = f"a number at {path} in {file}"
    found = [each for each in found if math.isfinite(each)]
    if not found:
        raise MissingNumber(f"{take.name}: missing: {printable(what, 300)}")
    return _WHICH[take.which](found)


def _matches(pattern: str, text: str) -> Iterator[float]:
    for match in re.finditer(pattern, text, re.MULTILINE):
        try:
            yield float((match[1] or "").replace("_", ""))
        except ValueError:
            continue


def _metrics(name: str, text: str) -> Iterator[float]:
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            try:
                yield float(words[1])
            except ValueError:
                continue


def _text(point: Path, name: str) -> str:
    with name_errors(printable(name), fault=MissingNumber):
        return read_tail(point, name, MAX_READ)


def _json(point: Path, name: str) -> Any:
    text = _text(point, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    for line in reversed(text.splitlines()):  # programs often print their JSON last
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            continue
    raise MissingNumber(f"{printable(name)}: is not valid JSON")


def _value_at(value: Any, path: str) -> Any:
    for word in filter(None, path.split(".")):
        if isinstance(value, dict):
            value = value.get(word)
        elif isinstance(value, list) and word.isdecimal() and int(word) < len(value):
            value = value[int(word)]
        else:
            return None
    return value


def _numbers(value: Any) -> Iterator[float]:
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, bool) or not isinstance(each, int | float):
            continue
        try:
            yield float(each)
        except OverflowError:
            continue
