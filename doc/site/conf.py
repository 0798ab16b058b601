"""How scripts/docs has Sphinx build the site."""

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
napoleon_use_ivar = True  # an attribute in a docstring is not described a second time
autodoc_class_signature = "mixed"
autodoc_use_type_comments = False  # the code has no type comments
smartquotes = False
python_use_unqualified_type_names = True
