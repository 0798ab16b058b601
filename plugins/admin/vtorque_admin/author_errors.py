"""Find errors in a plugin's source that loading does not detect, for ``vtorque plugins``."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api import hooks
from vtorque_core.live.site_config import Plugins

_OURS = {"vtorque_core", "vtorque_testing"}  # the test kit imports private modules
DEAR = 0.020  # most CPU seconds that importing a plugin may add to each vsub
_PUBLIC = re.compile(r"vtorque_core\.(api|live)(\.|$)")
_PRIVATE = re.compile(rb"vtorque_core(\.(?!api|live)| import)")  # fast check for candidates


def find_errors(plugins: Plugins, name: str) -> Iterator[str]:
    """Yield the errors in the source of a loaded plugin, with module and line."""
    modules = plugins.modules_of(name)
    packages = {module.__name__.partition(".")[0] for module in modules} - _OURS
    returned = plugins.each(hooks.vtorque_resources)
    known = {each.item for each in returned if each.plugin == name}
    for called, file in sorted(item for package in packages for item in _files(package)):
        text = file.read_bytes()
        if b"acquire" in text or _PRIVATE.search(text):
            for node in ast.walk(ast.parse(text)):
                what = _find_private_import(node) or _kind_unknown(node, called, known)
                if what:
                    yield f"{called}, line {getattr(node, 'lineno', 0)}: {what}"


def slow_import(plugins: Plugins, name: str) -> str:
    """Return a message if importing the plugin takes too long for ``vsub``; otherwise ""."""
    cost = plugins.costs.get(name, 0.0)
    if cost <= DEAR:
        return ""
    return (
        f"{plugins.distributions[name]}: {plugins.modules_of(name)[0].__name__}, line 1: importing "
        f"it costs each vsub {cost * 1e3:.0f} ms (limit: {DEAR * 1e3:.0f}): import late what vsub "
        "does not need"
    )


def _files(package: str) -> Iterator[tuple[str, Path]]:
    top = sys.modules[package]
    if top.__file__ and not hasattr(top, "__path__"):
        yield package, Path(top.__file__)
    for directory in map(Path, getattr(top, "__path__", ())):
        for path in directory.rglob("*.py"):
            parts = path.relative_to(directory).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


def _find_private_import(node: ast.AST) -> str:
    names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{each.name}" for each in node.names]
    for name in names:
        if name.startswith("vtorque_core.") and not _PUBLIC.match(name):
            return f"imports {name}, which is not public: use vtorque_core.api or vtorque_core.live"
    return ""


def _kind_unknown(node: ast.AST, called: str, known: set[type]) -> str:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
        return ""
    made = node.args[0]
    made = made.func if isinstance(made, ast.Call) else made  # Card(...)
    made = made.value if isinstance(made, ast.Attribute) else made  # Card.of(...)
    if node.func.attr != "acquire" or not isinstance(made, ast.Name):
        return ""
    kind = getattr(sys.modules.get(called), made.id, None)
    if not isinstance(kind, type) or kind in known or kind.__module__.startswith("vtorque_core."):
        return ""
    return (
        f"acquires {kind.__name__}, which vtorque_resources does not return, so that its records "
        "could not be released"
    )
