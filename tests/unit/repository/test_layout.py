"""What import-linter cannot say: plugins see the public API only, hooks are called one way only."""

import ast
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PLUGINS = sorted(REPO.glob("plugins/*/vtorque_*/**/*.py"))
CORE = sorted(REPO.glob("vtorque_core/**/*.py"))
DEVICES = ("iocm", "passthrough", "pinning", "scam", "unclot", "vrdma")


def imported(path):
    """Yield every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", PLUGINS, ids=lambda p: p.name)
def test_a_plugin_imports_only_the_public_api(path):
    core = {m for m in imported(path) if m.startswith("vtorque_core")}
    public = ("vtorque_core.api", "vtorque_core.batch", "vtorque_core.testing")
    assert {m for m in core if not m.startswith(public)} <= {"vtorque_core"}


def test_the_declaring_half_of_a_plugin_imports_nothing_that_acts():
    for path in REPO.glob("plugins/*/vtorque_*/plugin.py"):
        tree = ast.parse(path.read_text())
        top = [n for n in tree.body if isinstance(n, ast.ImportFrom | ast.Import)]
        names = {n.module for n in top if isinstance(n, ast.ImportFrom)}
        assert not {n for n in names if n and n.startswith("vtorque_core.api_node")}


@pytest.mark.parametrize("path", CORE, ids=lambda p: p.name)
def test_hooks_are_called_through_each_or_collect_only(path):
    """A plain ``pm.hook.x()`` loses whose result it is and lets one plugin stop the others."""
    calls = [
        n
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and isinstance(n.func.value, ast.Attribute)
        and n.func.value.attr == "hook"
    ]
    assert not calls


@pytest.mark.parametrize("path", CORE + PLUGINS, ids=lambda p: p.name)
def test_a_module_is_of_readable_size(path):
    assert len(path.read_text().splitlines()) <= 400


def code_lines(path):
    """Return how many lines of a file are code, as cloc counts: no blank, comment or docstring."""
    text = path.read_text()
    said = set()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
                node
            ):
                said |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" for n, line in lines if n not in said)


def test_the_device_plugins_are_small():
    """They are the model for others' plugins: read any in five minutes."""
    sizes = {
        name: sum(
            code_lines(path)
            for path in (REPO / "plugins" / name).glob("vtorque_*/**/*")
            if path.is_file() and "__pycache__" not in path.parts
        )
        for name in DEVICES
    }
    assert all(sizes.values()), sizes
    assert sum(sizes.values()) < 1500, sizes
    assert max(sizes.values()) <= 500, sizes
