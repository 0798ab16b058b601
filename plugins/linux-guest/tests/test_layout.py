"""Each folder of the plugin has a README of its contents; its packages are independent."""

import ast
from pathlib import Path

import vtorque_linux_guest

ROOT = Path(vtorque_linux_guest.__file__).parent
FOLDERS = ("agent", "boot", "guest", "image", "job")
BELOW = {"boot": {"guest"}, "image": {"agent", "guest"}, "job": {"guest"}}


def test_readme_names_each_file_once() -> None:
    for folder in FOLDERS:
        found = {p.name for p in (ROOT / folder).iterdir() if p.is_file()}
        rows = (ROOT / folder / "README.md").read_text().splitlines()
        named = [row.split("`")[1] for row in rows if row.startswith("| `")]
        assert sorted(named) == sorted(found - {"__init__.py", "README.md"}), folder


def test_folder_imports_only_from_folders_below() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    parts = node.module.split(".")
                    if parts[0] == "vtorque_linux_guest" and parts[1:2] != ["settings"]:
                        below = {"boot"} if path.name == "driver.py" else set()
                        assert parts[1] in {folder, *BELOW.get(folder, ()), *below}, path
