"""How scripts/docs has Sphinx build the site."""

import ast
import dataclasses
from typing import Any

from vtorque_core.base import record

project = "vTorque"
project_copyright = "the vTorque authors, Apache License 2.0"
html_title = "vTorque"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_copy_source = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["README.md", "changes/[0-9]*"]  # the first page; fragments
suppress_warnings = [
    "toc.not_included",  # what is in which folder: other pages lead there
]

_COMMANDS = {
    "vsub": ("submit a batch job that runs inside a virtual machine", 1),
    "vmgr": ("look at jobs inside virtual machines, and at their images", 1),
    "vtorque": ("set up and look after nodes for jobs inside virtual machines", 8),
}
man_pages = [(f"reference/{name}", name, what, "", no) for name, (what, no) in _COMMANDS.items()]
man_make_section_directory = True

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_use_type_comments = False  # there are none
smartquotes = False
python_use_unqualified_type_names = True


def setup(app: Any) -> None:
    """Show the fields of a record in its signature."""
    app.connect("autodoc-process-signature", _signature)


def _signature(_app: Any, what: str, _name: str, found: Any, *_: Any) -> tuple[str, None] | None:
    """Return a record's parameters: all records have one __init__, which takes anything."""
    if what != "class" or getattr(found, "__init__", None) is not vars(record)["__init__"]:
        return None
    fields = (field for field in dataclasses.fields(found) if field.init)
    return f"({', '.join(map(_parameter, fields))})", None


def _parameter(field: "dataclasses.Field[Any]") -> str:
    name = f"{field.name}: {field.type}"
    if field.default is not dataclasses.MISSING:
        return f"{name} = {_literal(field.default)}"
    return name if field.default_factory is dataclasses.MISSING else f"{name} = ..."


def _literal(value: object) -> str:
    try:
        ast.literal_eval(repr(value))
    except (SyntaxError, ValueError):
        return "..."
    return repr(value)
