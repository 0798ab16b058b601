"""Evaluate ``--fail-if`` conditions, with one JUnit test case per combination."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vtorque_core.api import Refused, printable
from vtorque_experiment import figures
from vtorque_experiment.compare import Pair
from vtorque_experiment.condition import Condition, Values
from vtorque_experiment.junit import TestResult
from vtorque_experiment.matrix import count_text
from vtorque_experiment.results import Results


@dataclass(frozen=True)
class Verdicts:
    """The result of the ``--fail-if`` conditions: a JUnit test case for each combination of values.

    A test case fails if a condition holds. ``asked`` is true if the user gave a condition.
    """

    cases: Sequence[TestResult]
    asked: bool


def judge_results(results: Results, conditions: Sequence[str]) -> Verdicts:
    """Evaluate conditions on an experiment. Raises Refused for an invalid condition."""
    read = [*map(Condition, conditions)]
    if any(condition.has_baseline for condition in read):
        raise Refused(
            "--fail-if: there is no baseline: use vmgr experiment compare, with two experiments "
            "or with --baseline"
        )
    table = results.table()
    cases = []
    for cell in range(len(results.cells)):
        values = {name: table.get((cell, name), []) for name in results.names}
        failed = results.count_failed(cell)
        error = count_text(failed, "failed point") if failed and not read else ""
        cases.append(_case(results.label(cell), read, values, None, error))
    return Verdicts(cases, bool(read))


def judge_pairs(pairs: Sequence[Pair], conditions: Sequence[str]) -> Verdicts:
    """Evaluate conditions on a comparison. Raises Refused for an invalid condition."""
    read = [*map(Condition, conditions)]
    cases = []
    for cell in dict.fromkeys(pair.cell for pair in pairs):
        those = [pair for pair in pairs if pair.cell == cell]
        values = {pair.name: pair.values for pair in those}
        cases.append(_case(cell, read, values, {p.name: p.base_values for p in those}, ""))
    return Verdicts(cases, bool(read))


def _case(
    name: str, conditions: Sequence[Condition], values: Values, base: Values | None, error: str
) -> TestResult:
    wall = values.get("wall", ())
    failures = []
    for condition in conditions:
        try:
            if condition.holds(values, base):
                failures.append(
                    f"{condition.text} holds: {', '.join(_describe_values(condition, values))}"
                )
        except Refused as problem:
            error = str(problem)
    return TestResult(printable(name, 300), sum(wall), "; ".join(failures), error)


def _describe_values(condition: Condition, values: Values) -> Iterator[str]:
    for name in sorted(condition.names):
        shown = ", ".join(figures.format_numbers(*list(values.get(name, ()))[:8]))
        yield f"{name} is {shown}{' ...' if len(values.get(name, ())) > 8 else ''}"
