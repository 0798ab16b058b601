"""``--fail-if``: a condition on the numbers of each combination, in a small language.

    median(wall) > 1.1 * baseline
    p95(rate) < 100 or count(rate) < 6

The language has constants, ``+ - * /``, ``< <= > >= == !=``, ``and``, ``or``, ``not``, and
functions such as ``median``, whose argument is the name of a number (``wall``). ``baseline`` is the
value of the same function, here ``median(wall)``, for the baseline combination or for the older
experiment (``vmgr experiment compare``). Anything else is refused. :func:`ast.parse` parses the
text without running it.
"""

from __future__ import annotations

import ast
import math
import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from vtorque_core.api import Refused, printable

MAX_TEXT = 400  # characters; a longer text is a mistake
BASELINE = "baseline"
_FUNCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "count": len,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "p05": lambda values: _percentile(values, 0.05),
    "p95": lambda values: _percentile(values, 0.95),
    "stdev": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
    "sum": math.fsum,
}
_ARITHMETIC: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_COMPARISONS: Mapping[type, Callable[[float, float], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
Values = Mapping[str, Sequence[float]]


class Condition:
    """A parsed condition; ``text`` is its source."""

    def __init__(self, text: str) -> None:
        """Parse a condition. Raises Refused if it is invalid or too long."""
        self.text = text
        if len(text) > MAX_TEXT:
            self._refuse("is too long", f"{MAX_TEXT} characters")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self._refuse("is not a valid condition", 'like "median(wall) > 1.1 * baseline"')
        self._check(self._tree, logical=True)

    @property
    def names(self) -> set[str]:
        """Names of the numbers that the condition uses."""
        return {name for _, name in self._calls(self._tree)}

    @property
    def has_baseline(self) -> bool:
        """True if the condition compares with a baseline."""
        return any(isinstance(n, ast.Name) and n.id == BASELINE for n in ast.walk(self._tree))

    def holds(self, values: Values, baseline: Values | None) -> bool:
        """Evaluate the condition. Raises Refused for a division by 0 or missing values."""
        return bool(self._logical(self._tree, values, baseline))

    def _refuse(self, problem: str, limit: str) -> None:
        raise Refused(
            problem,
            key="--fail-if",
            value=printable(self.text, 120),
            limit=limit,
            fix='see section "In CI" of doc/experiment.md',
        )

    def _check(self, node: ast.AST, *, logical: bool) -> None:
        """Raise Refused for an expression that is not in the language.

        ``logical``: the node must be a comparison, or a combination of comparisons.
        """
        words = ", ".join(sorted(_FUNCTIONS))
        if logical:
            if isinstance(node, ast.BoolOp):
                for each in node.values:
                    self._check(each, logical=True)
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                self._check(node.operand, logical=True)
            elif isinstance(node, ast.Compare) and len(node.ops) == 1:
                if type(node.ops[0]) not in _COMPARISONS:
                    self._refuse("contains an unknown comparison", "< <= > >= == !=")
                self._check(node.left, logical=False)
                self._check(node.comparators[0], logical=False)
                self._check_baseline(node)
            else:
                self._refuse("is not a comparison", "one of < <= > >= == != with and, or, not")
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            self._check(node.left, logical=False)
            self._check(node.right, logical=False)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self._check(node.operand, logical=False)
        elif isinstance(node, ast.Call):
            if _call(node) is None:
                self._refuse("contains an unknown function", f"{words} of one number: median(wall)")
        elif not (isinstance(node, ast.Name) and node.id == BASELINE) and not _is_number(node):
            self._refuse(
                "contains an unsupported element", f"numbers, + - * /, {BASELINE}, {words}"
            )

    def _check_baseline(self, node: ast.Compare) -> None:
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == BASELINE]
        if names and len(set(self._calls(node))) != 1:
            self._refuse(
                f"needs exactly one function that {BASELINE} refers to",
                "one function, such as median(wall)",
            )

    def _calls(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        for each in ast.walk(node):
            found = _call(each) if isinstance(each, ast.Call) else None
            if found is not None:
                yield found

    def _logical(self, node: ast.AST, values: Values, baseline: Values | None) -> bool:
        if isinstance(node, ast.BoolOp):
            found = (self._logical(each, values, baseline) for each in node.values)
            return all(found) if isinstance(node.op, ast.And) else any(found)
        if isinstance(node, ast.UnaryOp):
            return not self._logical(node.operand, values, baseline)
        assert isinstance(node, ast.Compare)  # noqa: S101 - ensured by _check
        (of,) = {*self._calls(node)} if len({*self._calls(node)}) == 1 else {("", "")}
        left = self._number(node.left, values, baseline, of)
        right = self._number(node.comparators[0], values, baseline, of)
        return _COMPARISONS[type(node.ops[0])](left, right)

    def _number(
        self, node: ast.AST, values: Values, baseline: Values | None, of: tuple[str, str]
    ) -> float:
        if isinstance(node, ast.Constant):
            return float(node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.UnaryOp):
            return -self._number(node.operand, values, baseline, of)
        if isinstance(node, ast.BinOp):
            left = self._number(node.left, values, baseline, of)
            right = self._number(node.right, values, baseline, of)
            try:
                return _ARITHMETIC[type(node.op)](left, right)
            except (ZeroDivisionError, OverflowError) as error:
                raise Refused(f"--fail-if {printable(self.text)}: {error}") from None
        if isinstance(node, ast.Call):
            return self._evaluate_function(*(_call(node) or of), values)
        if baseline is None:
            raise Refused(
                "needs a baseline",
                key="--fail-if",
                value=printable(self.text, 120),
                fix="compare two experiments, or add --baseline AXIS=VALUE",
            )
        return self._evaluate_function(*of, baseline)

    def _evaluate_function(self, function: str, name: str, values: Values) -> float:
        there = values.get(name, ())
        if not there and function != "count":
            raise Refused(
                f"uses {printable(name)}, which has no values",
                key="--fail-if",
                value=printable(self.text, 120),
                fix=f"known: {', '.join(sorted(values)) or 'none'}",
            )
        return float(_FUNCTIONS[function](there))


def _call(node: ast.Call) -> tuple[str, str] | None:
    if (
        isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        and len(node.args) == 1 and isinstance(node.args[0], ast.Name)
    ):  # fmt: skip
        return node.func.id, node.args[0].id
    return None


def _is_number(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, int | float)
        and not isinstance(node.value, bool) and abs(node.value) < 1e300
    )  # fmt: skip


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
