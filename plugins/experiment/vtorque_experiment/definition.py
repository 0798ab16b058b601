"""Parse an experiment's file, validate it by the JSON schema, and return a Definition."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import Refusal, Refused, printable
from vtorque_experiment import files, schema

BUILT_IN = ("wall", "wait", "code")
"""Numbers of every point: run time and waiting time in seconds, and exit status."""
MAX_FILE = 1 << 20  # bytes of an experiment's file
Scalar = str | int | float | bool


@dataclass(frozen=True)
class NumberSource:
    """How to extract a number from a job: by ``pattern``, ``json``, ``metric`` or ``report``.

    ``file`` is the file in the point's directory that is searched for a pattern or JSON.
    """

    name: str
    pattern: str | None = None
    json: str | None = None
    metric: str | None = None
    report: str | None = None
    file: str = "stdout"
    which: str = "last"
    unit: str = ""
    better: str = ""


@dataclass(frozen=True)
class RunLimits:
    """Limits of a run.

    Attributes:
        jobs: maximum number of jobs in the batch system.
        hours: time limit; None: no limit.
        poll: seconds between two queries of the batch system.
        failures: failed points in a row after which the run stops.
    """

    jobs: int = 4
    hours: float | None = None
    poll: float = 30.0
    failures: int = 20


@dataclass(frozen=True)
class Definition:
    """The content of an experiment's file. ``matrix`` maps an axis (``vm.vcpus``) to its values."""

    title: str
    scripts: tuple[str, ...]
    repetitions: int
    seed: int | None
    exit_codes: tuple[int, ...]
    report: bool
    vm: Mapping[str, Scalar]
    batch: tuple[str, ...]
    env: Mapping[str, Scalar]
    matrix: Mapping[str, Sequence[Scalar]]
    exclude: tuple[Mapping[str, Scalar], ...]
    takes: tuple[NumberSource, ...]
    limits: RunLimits


def read(path: Path, repetitions: int | None = None) -> Definition:
    """Parse the user's experiment file; ``repetitions`` overrides the value in the file.

    Raises Refused with all errors of the file.
    """
    return _parse(path, lambda: _read_start(path), repetitions)


def read_copy(path: Path) -> Definition:
    """Parse the copy of an experiment file in the results directory.

    Raises Refused, also for a symbolic link.
    """
    return _parse(path, lambda: files.read(path.parent, path.name, most=MAX_FILE + 1))


def _read_start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE + 1)


def _parse(
    path: Path, content: Callable[[], bytes], repetitions: int | None = None
) -> Definition:  # fmt: skip
    name = printable(str(path))
    try:
        data = content()
        if len(data) > MAX_FILE:
            raise Refused(f"{name}: is longer than {MAX_FILE >> 20} MiB")
        values = tomllib.loads(data.decode())
    except OSError as error:
        raise Refused(f"{name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"{name}: is not TOML: {printable(str(error), 300)}") from None
    return parse_definition(values | ({"repetitions": repetitions} if repetitions else {}), name)


def parse_definition(values: Mapping[str, Any], name: str) -> Definition:
    """Convert the parsed values of the file ``name`` to a definition. Raises Refused."""
    wrong = [*schema.find_errors(values, name)][:20]
    if wrong:
        raise Refused(*wrong)
    found = _convert_values(values)
    wrong = [*_find_inconsistencies(found, values, name)]
    if wrong:
        raise Refused(*wrong)
    return found


def _convert_values(values: Mapping[str, Any]) -> Definition:
    matrix = values.get("matrix", {})
    axes: dict[str, Sequence[Scalar]] = {}
    for name in ("script", "bare"):
        if name in matrix:
            axes[name] = tuple(matrix[name])
    for table in ("vm", "batch", "env"):
        axes |= {f"{table}.{key}": tuple(each) for key, each in matrix.get(table, {}).items()}
    limits = values.get("limits", {})
    whole = {"jobs", "failures"} & limits.keys()
    scripts = matrix.get("script") or ([values["script"]] if "script" in values else [])
    return Definition(
        title=values.get("title", ""),
        scripts=tuple(scripts),
        repetitions=int(values.get("repetitions", 1)),
        seed=None if "seed" not in values else int(values["seed"]),
        exit_codes=tuple(map(int, values.get("exit_codes", (0,)))),
        report=values.get("report", False),
        vm=values.get("vm", {}),
        batch=tuple(values.get("batch", ())),
        env=values.get("env", {}),
        matrix=axes,
        exclude=tuple(values.get("exclude", ())),
        takes=tuple(NumberSource(name, **each) for name, each in values.get("take", {}).items()),
        limits=RunLimits(**limits | {each: int(limits[each]) for each in whole}),
    )


def _pattern_problem(pattern: str) -> tuple[str, str] | None:
    """Return an error in a pattern, and what to do; None if the pattern can find a number."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression: {error}", ""
    if groups:
        return None
    return "has no group for the number", "put the digits in a group: ([0-9.]+)"


def _bad_take(take: NumberSource, found: Definition, name: str) -> Iterator[Refusal]:
    if take.name in BUILT_IN:
        yield Refusal("is a number that every point has", key="take", value=take.name,
                      where=name, fix="choose another name")  # fmt: skip
    if take.report is not None and not found.report:
        yield Refusal("needs the job's report, which is not kept", key=f"take.{take.name}.report",
                      value=take.report, where=name, fix="add report = true")  # fmt: skip
    if take.file.startswith("/") or ".." in Path(take.file).parts:
        yield Refusal("is outside the point's directory", key=f"take.{take.name}.file",
                      value=take.file, where=name)  # fmt: skip
    if take.pattern is not None and (problem := _pattern_problem(take.pattern)):
        yield Refusal(problem[0], key=f"take.{take.name}.pattern", value=take.pattern,
                      where=name, fix=problem[1])  # fmt: skip
    if take.metric is not None and take.metric.split() != [take.metric]:
        yield Refusal("names of metrics have no spaces", key=f"take.{take.name}.metric",
                      value=take.metric, where=name)  # fmt: skip


def _find_inconsistencies(
    found: Definition, values: Mapping[str, Any], name: str
) -> Iterator[Refusal]:
    """Yield errors that the JSON schema cannot detect."""
    if not found.scripts:
        yield Refusal("the job script is missing", where=name, fix='add script = "job.sh"')
    if "script" in values and "script" in found.matrix:
        yield Refusal("is set twice", key="script", value=str(values["script"]), where=name,
                      fix="remove it, because matrix.script has the scripts")  # fmt: skip
    for take in found.takes:
        yield from _bad_take(take, found, name)
    for axis in (axis for each in found.exclude for axis in each):
        if axis not in found.matrix:
            yield Refusal("is not an axis of the matrix", key="exclude", value=axis, where=name,
                          fix=schema.suggest_name(axis, found.matrix))  # fmt: skip
    for option in found.batch:
        yield from _reject_vm("batch", option, name)
    for axis, listed in found.matrix.items():
        for each in listed if axis.startswith("batch.") else ():
            yield from _reject_vm(f"matrix.{axis}", str(each), name)
    yield from _find_duplicates(found, name)


def _reject_vm(key: str, option: str, name: str) -> Iterator[Refusal]:
    if "-vm" in option.split():
        yield Refusal("-vm is not an option of the batch system", key=key, value=option, where=name,
                      fix="write vm.KEY = VALUE; for bare metal matrix.bare = [true]")  # fmt: skip


def _find_duplicates(found: Definition, name: str) -> Iterator[Refusal]:
    for table, given in (("vm", found.vm), ("env", found.env)):
        for key, value in given.items():
            if f"{table}.{key}" in found.matrix:
                yield Refusal("is also set in the matrix", key=f"{table}.{key}", value=str(value),
                              where=name, fix="remove one of them")  # fmt: skip
    pairs = [*found.vm.items()]
    pairs += [(a[3:], v) for a, vs in found.matrix.items() if a.startswith("vm.") for v in vs]
    for key, value in pairs:
        if "," in str(value) or "\n" in str(value):
            yield Refusal("contains a comma or newline, which -vm does not allow",
                          key=f"vm.{key}", value=str(value), where=name)  # fmt: skip
    for key, value in found.env.items():
        if "\0" in str(value):
            yield Refusal("contains a NUL byte", key=f"env.{key}", value=str(value), where=name)
