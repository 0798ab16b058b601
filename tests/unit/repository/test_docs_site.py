"""The documentation as a site and as man pages: built completely, without a warning.

Its modules are imported in separate processes: other tests measure the memory of forked processes.
"""

import itertools
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from browser import Browser

pytestmark = pytest.mark.e2e

REPO = Path(__file__).resolve().parents[3]
NAMES = """
import importlib, runpy, sys, typing
for name in runpy.run_path(sys.argv[1])["modules"]():
    for each, what in vars(importlib.import_module(name)).items():
        skipped = each.startswith("_") or isinstance(what, typing.TypeVar)
        if getattr(what, "__module__", None) == name and not skipped:
            print(f"{name}.{each}")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    where = tmp_path_factory.mktemp("site")
    argv = [sys.executable, REPO / "scripts/docs", where]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return where


def test_each_public_name_has_an_entry(site):
    _, _, listed = (site / "objects.inv").read_bytes().partition(b"using zlib.\n")
    known = {*re.findall(r"^(\S+) py:", zlib.decompress(listed).decode(), re.MULTILINE)}
    argv = [sys.executable, "-c", NAMES, REPO / "scripts/docs"]
    said = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    names = {*said.split()}
    assert len(names) > 300
    assert names - known == set()
    assert "vtorque_core.api.HostFault" in known, "a name that the API re-exports has no entry"


def test_each_command_has_a_reference_page(site):
    for name, words in {
        "vsub": ["--dry-run", "vcpus=N"],
        "vmgr": ["vmgr images build", "vmgr checkpoint"],
        "vtorque": ["vtorque doctor", "vtorque setup install"],
    }.items():
        text = (site / f"reference/{name}.html").read_text()
        assert [word for word in words if word not in text] == []


def test_signatures_show_the_fields_of_records(site):
    pages = {
        path.name: re.sub("<[^>]*>", "", path.read_text())
        for path in (site / "reference").glob("*.html")
    }
    assert [name for name, text in pages.items() if "*args: Any, **given: Any" in text] == []
    text = pages["vtorque_core.api.disk_file.html"]
    assert re.search(r"DiskFile\(\s*path: str,\s*size_mib: int = 0,\s*file_system: Literal", text)


def test_landing_page_has_no_source_of_a_diagram_and_a_copyright(site):
    text = (site / "index.html").read_text()
    assert "sequenceDiagram" not in text and "->>" not in text.replace("&gt;", ">")
    assert re.search(r"Copyright &#169; the vTorque authors", text)


LOOKED_AT = [
    "index",
    "doc/security",
    "doc/user",
    "reference/vmgr",
    "reference/vtorque_core.api.hooks",
]
UNCOPIED = """
[...document.querySelectorAll('.highlight')]
  .filter(each => !each.querySelector('button.copy')).length
"""
LUMINANCES = """
[document.body, ...document.querySelectorAll('.highlight')].map(each =>
  getComputedStyle(each).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => +a + +b) / 3)
"""


@pytest.mark.full
def test_pages_in_a_browser_are_quiet_and_fit(site, tmp_path):
    browser = Browser(tmp_path)
    try:
        for page, width, dark in itertools.product(LOOKED_AT, (390, 1280), (False, True)):
            browser.open(site / f"{page}.html", width=width, dark=dark)
            assert browser.complaints == []
            asked = {url.partition(":")[0] for url in browser.requests}
            assert asked <= {"file", "data"}
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
            assert browser.value(UNCOPIED) == 0
            shades = browser.value(LUMINANCES)
            assert all((shade < 128) == dark for shade in shades), (page, dark, shades)
    finally:
        browser.close()


def test_each_command_has_a_man_page(tmp_path):
    argv = [sys.executable, REPO / "scripts/docs", "--man", tmp_path]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.name: path for path in tmp_path.rglob("*") if path.is_file()}
    assert {*pages} == {"vsub.1", "vmgr.1", "vtorque.8"}
    for name, path in pages.items():
        text = path.read_text()
        assert f"{path.stem} \\- " in text and "Usage: " in text
        if shutil.which("groff"):
            done = subprocess.run(
                ["groff", "-ww", "-man", "-z", path], capture_output=True, check=False
            )
            assert (done.returncode, done.stderr) == (0, b""), name
