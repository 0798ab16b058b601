"""Change random lines of the code, one at a time, and check whether the quick tests fail.

``python bench/mutants.py COMMIT FIRST LAST`` checks COMMIT out into a new directory, applies
mutants FIRST to LAST-1 of the list that ``SEED`` makes of ``BASE``, and prints a row for each:
number, place, change, "detected" or "survived", and the first failing test. A mutant whose line is
missing in COMMIT is "gone". ``--list`` prints the mutants only.

The quick tests that import the mutant's module run first, then all tests of its package.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BASE = "7f618f39"
SEED = 37
COUNT = 60
PLACES = ("vtorque_core", *(f"plugins/{name}" for name in ("linux-guest", "slurm", "pbs", "local")),
          "plugins/survive")  # fmt: skip
LIMIT = 900  # seconds for the tests of one mutant; a mutant that takes longer is detected
REPO = Path(__file__).resolve().parents[1]
COMPARED = {ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
            ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed line: file, the line before and after, and which of equal lines it is."""

    path: str
    before: str
    after: str
    occurrence: int


def git(*words: str) -> str:
    """Return git's output in this repository."""
    return subprocess.run(
        ["git", "-C", str(REPO), *words], check=True, capture_output=True, text=True
    ).stdout


def changes(line: str, node: ast.AST) -> Iterator[str]:
    """Yield the line with one operator, constant or statement changed. Offsets are in bytes."""
    raw = line.encode()

    def part(inner: ast.expr | ast.stmt, text: str) -> str:
        assert inner.end_col_offset is not None
        return (raw[: inner.col_offset] + text.encode() + raw[inner.end_col_offset :]).decode()

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield part(node, f"({left} {COMPARED[type(node.ops[0])]} {right})")
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield part(node, f"({word.join(f'({ast.unparse(each)})' for each in node.values)})")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield part(node, f"bool({ast.unparse(node.operand)})")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield part(node, str(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield part(node, str(node.value + 1))
    elif isinstance(node, ast.Return) and node.value is not None:
        yield part(node, "return None")
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield part(node, "pass")


def mutants() -> list[Mutant]:
    """Return the mutants of BASE, always the same ones: one for each selected line."""
    drawn = random.Random(SEED)
    tracked = git("ls-tree", "-r", "--name-only", BASE, "--", *PLACES).splitlines()
    code = [name for name in tracked if name.endswith(".py") and "/tests/" not in name]
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for path in code:
        text = git("show", f"{BASE}:{path}")
        source = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if getattr(node, "lineno", 0) == 0 or node.lineno != node.end_lineno:  # type: ignore[attr-defined]
                continue
            number = node.lineno - 1  # type: ignore[attr-defined]
            line = source[number]
            for after in changes(line, node):
                same = source[:number].count(line)
                lines.setdefault((path, number), []).append(Mutant(path, line, after, same))
    return [drawn.choice(lines[key]) for key in drawn.sample(sorted(lines), COUNT)]


def tests_of(top: Path, mutant: Mutant) -> list[list[str]]:
    """Return the tests' files that import the mutant's module, then its package's directory."""
    parts = Path(mutant.path).parts
    plugin = parts[0] == "plugins"
    directory = f"plugins/{parts[1]}/tests" if plugin else f"tests/unit/{parts[1]}"
    module = ".".join(Path(*parts[2:] if plugin else parts).with_suffix("").parts)
    package, _, name = module.rpartition(".")
    naming = re.compile(
        rf"{re.escape(module)}\b|from {re.escape(package)} import [^#]*?\b{re.escape(name)}\b"
    )
    found = []
    for path in sorted(
        [*top.glob("tests/unit/**/test_*.py"), *top.glob("plugins/*/tests/**/test_*.py")]
    ):
        where = str(path.relative_to(top))
        if "/repository/" not in where and naming.search(path.read_text()):
            found.append(where)
    return [each for each in (found, [directory] if (top / directory).is_dir() else []) if each]


def run(top: Path, mutant: Mutant) -> tuple[str, str]:
    """Return the tests' verdict on the mutant, and the first failed test."""
    path = top / mutant.path
    lines = path.read_text().splitlines() if path.exists() else []
    at = [number for number, line in enumerate(lines) if line == mutant.before]
    if len(at) <= mutant.occurrence:
        return "gone", ""
    number = at[mutant.occurrence]
    path.write_text("\n".join([*lines[:number], mutant.after, *lines[number + 1 :], ""]))
    try:
        for tests in tests_of(top, mutant):
            if failed := failure(top, tests):
                return "detected", failed
    finally:
        path.write_text("\n".join([*lines, ""]))
    return "survived", ""


def failure(top: Path, tests: list[str]) -> str:
    """Run quick tests of a checkout until one fails; return its name, or an empty string."""
    packages = [str(top), str(top / "testing"), *map(str, top.glob("plugins/*"))]
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider",
            "-m", "not e2e and not full", *tests]  # fmt: skip
    environ = os.environ | {"PYTHONPATH": ":".join(packages)}
    try:
        done = subprocess.run(
            argv, cwd=top, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not within {LIMIT} s"
    if done.returncode in (0, 5):  # 5: none of them is a quick test
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit status {done.returncode}"


def main() -> None:
    """Run the mutants named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("commit", nargs="?", default=BASE)
    parser.add_argument("first", nargs="?", type=int, default=0)
    parser.add_argument("last", nargs="?", type=int, default=COUNT)
    arguments = parser.parse_args()
    found = mutants()
    if arguments.list:
        for number, each in enumerate(found):
            print(f"{number}\t{each.path}\t{each.before.strip()}\t{each.after.strip()}")
        return
    top = Path(tempfile.mkdtemp(prefix="mutants-"))
    git("worktree", "add", "-q", "--detach", str(top / "tree"), arguments.commit)
    try:
        for number in range(arguments.first, min(arguments.last, COUNT)):
            each = found[number]
            row = (str(number), each.path, each.after.strip(), *run(top / "tree", each))
            print("\t".join(row), flush=True)
    finally:
        git("worktree", "remove", "--force", str(top / "tree"))
        shutil.rmtree(top)


if __name__ == "__main__":
    main()
