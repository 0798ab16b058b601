"""The pages about tools that submit jobs: their files parse, and their words are those of Slurm."""

import ast
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from vtorque_slurm import options

PAGES = sorted((Path(__file__).resolve().parents[3] / "doc/how-to").glob("*.md"))


def blocks(page, language):
    tokens = MarkdownIt().parse(page.read_text())
    return [token.content for token in tokens if token.type == "fence" and token.info == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_is_short_and_its_python_compiles(page):
    assert len(page.read_text().splitlines()) <= 25
    for block in blocks(page, "python"):
        ast.parse(block)


def test_open_ondemand_page_has_valid_files_and_words():
    """Keys: "submit.yml.erb" and "bin_overrides" in the documentation of Open OnDemand."""
    (page,) = [page for page in PAGES if page.stem == "open-ondemand"]
    app, cluster = map(yaml.safe_load, blocks(page, "yaml"))
    assert {*app} == {"batch_connect", "script"}
    # As its Slurm adapter calls sbatch: the native words last, the script on standard input.
    own = ["--parsable", "-D", "/home/ada", "-J", "app", "-o", "/home/ada/output.log"]
    words = app["script"]["native"]
    line = options.split([*own, *[word for word in words if not word.startswith("--vm=")]], ())
    assert (line.has_option("mem"), line.has_option("constraint"), line.operands) == (
        True,
        True,
        (),
    )
    assert "--vm=img=debian,ram=4G" in words
    job = cluster["v2"]["job"]
    assert (job["adapter"], job["bin_overrides"]) == ("slurm", {"sbatch": "/usr/local/bin/vsub"})
    said = page.read_text()
    assert '`native: ["-vm", "img=debian,ram=4G"]`' in said
    assert options.split([*own, "-vm", "img=debian,ram=4G"], ()).vm == ("img=debian,ram=4G",)
