"""The documentation as a site: it is built without a warning, and has each public name."""

import functools
import importlib
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import TypeVar

import pytest
from sphinx.util.inventory import InventoryFile

REPO = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.e2e


@functools.cache
def script():
    """Return scripts/docs as a module."""
    loader = SourceFileLoader("docs_script", str(REPO / "scripts/docs"))
    module = module_from_spec(spec_from_loader("docs_script", loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    where = tmp_path_factory.mktemp("site")
    argv = [sys.executable, REPO / "scripts/docs", where]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return where


def public():
    """Yield the public names: of each public module, those that it defines."""
    for name in script().modules():
        module = importlib.import_module(name)
        for each, what in vars(module).items():
            home = getattr(what, "__module__", None)
            skipped = each.startswith("_") or isinstance(what, TypeVar)
            if home == name and not skipped:
                yield f"{name}.{each}"


def test_each_public_name_has_an_entry(site):
    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    known = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    names = {*public()}
    assert len(names) > 300
    assert names - known == set()
    assert "vtorque_core.api.HostFault" in known, "what the API has from where nobody imports"


def test_each_command_has_its_manual(site):
    for name, words in {
        "vsub": ["--dry-run", "vcpus=N"],
        "vmgr": ["vmgr images build", "vmgr checkpoint"],
        "vtorque": ["vtorque doctor", "vtorque setup install"],
    }.items():
        text = (site / f"reference/{name}.html").read_text()
        assert [word for word in words if word not in text] == []
