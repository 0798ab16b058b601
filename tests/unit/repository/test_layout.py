"""Rules that import-linter cannot check: imports of plugins, and calls of hooks."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

from vtorque_core.api.strategies import import_object

REPO = Path(__file__).resolve().parents[3]
PROJECTS = sorted(REPO.glob("plugins/*/pyproject.toml"))
PLUGINS = sorted(REPO.glob("plugins/*/vtorque_*/**/*.py"))
CORE = sorted(REPO.glob("vtorque_core/**/*.py"))
PUBLIC = ("vtorque_core.api", "vtorque_core.live")
DEVICES = ("iocm", "passthrough", "pinning", "scam", "unclot", "vrdma")


@functools.cache
def statements(path):
    """Return a module and all statements in it: a tenth of what :func:`ast.walk` goes through."""
    found = [ast.parse(path.read_text())]
    for node in found:
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(node, part, ())
    return found


def deferred_names(path):
    """Return the names ``module:object`` that a plugin passes to Command or ``deferred``."""
    return re.findall(r'"(vtorque_\w+(?:\.\w+)*:\w+)"', path.read_text())


@functools.cache
def imported(path):
    """Return every module that a file imports, at any place, or names for a later import."""
    found = {name.partition(":")[0] for name in deferred_names(path)}
    for node in statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def imported_of_core(path):
    """Return the core's modules outside of ``PUBLIC`` that a file imports."""
    if not re.search(r"vtorque_core(\.(?!api\b|live\b)| import)", path.read_text()):
        return set()
    return {
        name
        for name in imported(path)
        if name.startswith("vtorque_core.") and not name.startswith(PUBLIC)
    }


def test_plugin_imports_only_the_public_api():
    others = [
        f"{path.relative_to(REPO)}: {name}" for path in PLUGINS for name in imported_of_core(path)
    ]
    assert PLUGINS and others == []


def test_deferred_names_are_callable_objects():
    """The type checker does not see them."""
    names = {name for path in PLUGINS for name in deferred_names(path)}
    assert len(names) > 50
    assert [name for name in sorted(names) if not callable(import_object(name))] == []


# Modules of the core that plugins' tests import: other authors do not have them.
CORES_OWN = {
    # Programs of users and root, in separate processes.
    "cli.reap": {"images"},
    "cli.vmgr.main": {"archive", "report"},
    "node.start.prologue": {"joblog"},
    # Jobs that the node journals and releases at steps where no complete job stops.
    "node.end.teardown.release_job": {"images"},
    "node.end.teardown.teardown": {"iocm"},
    "records.journal.Journal": {"images", "iocm", "survive"},
    "records.log": {"joblog"},
    "records.reading.ARRIVES": {"survive"},
    "records.reading.JobHeader": {"images", "iocm"},
    "records.reading.arguments": {"iocm", "unclot"},
    "records.reading.read": {"survive"},
    "node.shell.proof": {"linux-guest"},
    "node.shell.around_script": {"login"},
    "resources.disk.Overlay": {"osv", "survive"},
    "resources.lease.ImageUse": {"images"},
    "resources.lease.Lease": {"survive"},
    "resources.netfilter": {"images"},
    "resources.starter.BootStarter": {"osv"},
    # The other side: parsers of the core for the plugin's output.
    "base.names.safe_name": {"pbs"},
    "images.pool.select": {"images"},
    "images.sidecar.MAX_CMDLINE": {"images"},
    "images.sidecar.parse_sidecar": {"images"},
    "plan.guests": {"images"},
    "config.request.Request": {"local"},
    # Discovery of installed plugins.
    "config.load.load": {"login"},
    "config.plugins": {"joblog", "telemetry"},
    "config.plugins.Plugins": {"mpi"},
    # Tests with doubles of libvirt, ssh, holders of locks and root.
    "base.hypervisor": {"survive"},
    "base.locks.job_lock": {"images"},
    "base.names": {"joblog"},
    "base.run_tool": {"cluster"},
    "base.trust": {"images", "oci"},
}


def test_plugin_tests_import_only_the_public_api_or_named_exceptions():
    """Like another author's: ``vtorque_core.api`` and ``.live``, and ``vtorque_testing``."""
    found = {}
    for path in REPO.glob("plugins/*/tests/**/*.py"):
        names = imported_of_core(path)
        whole = {n for n in names if not any(other.startswith(f"{n}.") for other in names)}
        for name in whole:
            plugin = path.relative_to(REPO / "plugins").parts[0]
            found.setdefault(name.removeprefix("vtorque_core."), set()).add(plugin)
    assert found == CORES_OWN


COMMANDS_OF = {"vtorque-local": {"vtorque-images"}}  # run, but not imported


@pytest.mark.parametrize("project", PROJECTS, ids=lambda p: p.parent.name)
def test_plugin_imports_only_plugins_that_it_depends_on(project):
    table = tomllib.loads(project.read_text())["project"]
    needed = {re.split("[<>=~!;[ ]", each)[0] for each in table["dependencies"]}
    mine = {table["name"], *needed}
    files = project.parent.glob("vtorque_*/**/*.py")
    found = {m.partition(".")[0] for path in files for m in imported(path)}
    theirs = {name.replace("_", "-") for name in found if name.startswith("vtorque_")}
    assert theirs <= mine | {"vtorque-core"}
    used = theirs | {"vtorque-core"} | COMMANDS_OF.get(table["name"], set())
    assert {name for name in needed if name.startswith("vtorque-")} <= used


def test_declaring_module_of_a_plugin_imports_no_guest_plan():
    for path in REPO.glob("plugins/*/vtorque_*/plugin.py"):
        tree = ast.parse(path.read_text())
        top = [n for n in tree.body if isinstance(n, ast.ImportFrom | ast.Import)]
        names = {n.module for n in top if isinstance(n, ast.ImportFrom)}
        assert not {n for n in names if n and n.startswith("vtorque_core.api.guest_plan")}


def test_core_passes_hookspecs_not_names_to_each_and_collect():
    """With the function of api/hooks.py mypy checks a call; with a name it checks nothing."""
    calls = [
        f"{path.relative_to(REPO)}:{n.lineno}"
        for path in CORE
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr in ("each", "collect")
        and n.args
        and isinstance(n.args[0], ast.Constant)
    ]
    assert calls == []


def test_hooks_are_called_through_each_or_collect_only():
    """A plain ``pm.hook.x()`` does not name the plugin and lets one plugin stop the others."""
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


def test_module_has_at_most_400_lines_of_code():
    long = [p for p in CORE + PLUGINS if p.read_text().count("\n") > 400]
    sizes = {str(p.relative_to(REPO)): code_lines(p) for p in long}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > 400} == {}


def code_lines(path):
    """Return how many lines of a file are code, as cloc counts: no blank, comment or docstring."""
    text = path.read_text()
    said = set()
    if path.suffix == ".py" and '"""' in text:
        for node in statements(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
                node
            ):
                said |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" for n, line in lines if n not in said)


def test_device_plugins_are_small():
    """Device plugins are examples for authors, who should read one in five minutes."""
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
