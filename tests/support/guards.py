"""Find the guards of a module and remove them one by one, to test that attacks need them.

A guard is a statement that refuses input: ``raise``, a call of ``_bad``, or a refusal that is
returned or stored as ``problem``.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

_REFUSING = frozenset({"refuse", "refused", "Refusal", "unknown_key"})


@dataclass(frozen=True)
class Guard:
    """A statement that refuses input: its place and its text."""

    module: ModuleType
    function: str  # of the module, or Class.method
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}.{self.function}: {self.text[:60]}"


def guards(module: ModuleType, only: Collection[str] = ()) -> list[Guard]:
    """Return the guards in a module's functions; ``only``: in the named functions."""
    found = []
    for name, node in _functions(ast.parse(inspect.getsource(module))):
        if only and name not in only:
            continue
        found += [
            Guard(module, name, each.lineno, ast.unparse(each))
            for each in ast.walk(node)
            if _refuses(each)
        ]
    assert found, f"no guard in {module.__name__}"
    return found


@contextlib.contextmanager
def without(guard: Guard) -> Iterator[None]:
    """Run the block with the guard's statement removed from its function."""
    tree = _Without(guard.line).visit(ast.parse(inspect.getsource(guard.module)))
    code = compile(ast.fix_missing_locations(tree), "without a guard", "exec")
    live: object = guard.module
    for part in guard.function.split("."):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part)
        live = inspect.getattr_static(live, part)
    live = inspect.unwrap(getattr(live, "__func__", live))  # type: ignore[arg-type]
    assert isinstance(live, FunctionType)
    whole, live.__code__ = live.__code__, code
    try:
        yield
    finally:
        live.__code__ = whole


class _Without(ast.NodeTransformer):
    def __init__(self, line: int) -> None:
        self._line = line

    def visit(self, node: ast.AST) -> ast.AST:
        if _refuses(node) and getattr(node, "lineno", 0) == self._line:
            if isinstance(node, ast.Assign):
                node.value = ast.Constant(None)
                return node
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


def _refuses(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Expr | ast.Return | ast.Assign) or node.value is None:
        return False
    parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    called = [each.func for each in parts if isinstance(each, ast.Call)]
    return any(isinstance(each, ast.Name) and each.id in _REFUSING for each in called)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for below in node.body:
                if isinstance(below, ast.FunctionDef):
                    yield f"{node.name}.{below.name}", below
