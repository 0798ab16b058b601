"""What import-linter cannot say: plugins see the public API only, hooks are called one way only."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
PROJECTS = sorted(REPO.glob("plugins/*/pyproject.toml"))
PLUGINS = sorted(REPO.glob("plugins/*/vtorque_*/**/*.py"))
CORE = sorted(REPO.glob("vtorque_core/**/*.py"))
DEVICES = ("iocm", "passthrough", "pinning", "scam", "unclot", "vrdma")


@functools.cache
def imported(path):
    """Return every module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_a_plugin_imports_only_the_public_api():
    public = ("vtorque_core.api", "vtorque_core.live")
    others = [
        f"{path.relative_to(REPO)}: {name}"
        for path in PLUGINS
        for name in imported(path)
        if name.startswith("vtorque_core.") and not name.startswith(public)
    ]
    assert PLUGINS and others == []


def test_a_plugins_tests_have_config_policy_ledger_and_domains_of_the_kit():
    """As another author's have: what they need of these is in ``vtorque_testing``."""
    site, plan = "vtorque_core.site.", "vtorque_core.plan."
    within = (f"{site}config", f"{site}policy", f"{plan}placement.ledger", f"{plan}domain",
              "vtorque_core.cli.config", "vtorque_core.resources.domain")  # fmt: skip
    files = sorted(REPO.glob("plugins/*/tests/**/*.py"))
    others = [
        f"{p.relative_to(REPO)}: {n}" for p in files for n in imported(p) if n.startswith(within)
    ]
    assert files and others == []


COMMANDS_OF = {"vtorque-local": {"vtorque-images"}}  # what is run and not imported


@pytest.mark.parametrize("project", PROJECTS, ids=lambda p: p.parent.name)
def test_a_plugin_imports_only_plugins_that_it_depends_on(project):
    table = tomllib.loads(project.read_text())["project"]
    needed = {re.split("[<>=~!;[ ]", each)[0] for each in table["dependencies"]}
    mine = {table["name"], *needed}
    files = project.parent.glob("vtorque_*/**/*.py")
    found = {m.partition(".")[0] for path in files for m in imported(path)}
    theirs = {name.replace("_", "-") for name in found if name.startswith("vtorque_")}
    assert theirs <= mine | {"vtorque-core"}
    used = theirs | {"vtorque-core"} | COMMANDS_OF.get(table["name"], set())
    assert {name for name in needed if name.startswith("vtorque-")} <= used


def test_the_declaring_half_of_a_plugin_imports_nothing_that_acts():
    for path in REPO.glob("plugins/*/vtorque_*/plugin.py"):
        tree = ast.parse(path.read_text())
        top = [n for n in tree.body if isinstance(n, ast.ImportFrom | ast.Import)]
        names = {n.module for n in top if isinstance(n, ast.ImportFrom)}
        assert not {n for n in names if n and n.startswith("vtorque_core.api.guest_plan")}


def test_hooks_are_called_through_each_or_collect_only():
    """A plain ``pm.hook.x()`` loses whose result it is and lets one plugin stop the others."""
    calls = [
        f"{path.relative_to(REPO)}:{n.lineno}"
        for path in CORE
        if ".hook." in (text := path.read_text())
        for n in ast.walk(ast.parse(text))
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and isinstance(n.func.value, ast.Attribute)
        and n.func.value.attr == "hook"
    ]
    assert CORE and calls == []


def test_a_module_is_of_readable_size():
    sizes = {str(p.relative_to(REPO)): code_lines(p) for p in CORE + PLUGINS}
    assert {name: size for name, size in sizes.items() if size > 400} == {}


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
    assert sum(sizes.values()) < 1900, sizes  # 400 of them: PCI functions for two, shared memory
    assert max(sizes.values()) <= 500, sizes
