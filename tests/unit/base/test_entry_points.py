"""Entry points are found as the standard library finds them."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from vtorque_core import __version__
from vtorque_core.base.entry_points import EntryPoint, entry_points
from vtorque_core.site.plugins import GROUP, NODE_GROUP


def ours(*groups):
    return sorted((p.group, p.name, p.value, p.distribution) for p in entry_points(groups))


def standard(*groups):
    return sorted(
        (p.group, p.name, p.value, f"{p.dist.name} {p.dist.version}")
        for group in groups
        for p in importlib.metadata.entry_points(group=group)
    )


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that lays out a distribution in one of two directories of the path."""
    places = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(sys, "path", [str(p) for p in places])
    for place in places:
        place.mkdir()

    def lay_out(name, points, *, place=0, head="METADATA", about="dist-info"):
        info = places[place] / f"{name}.{about}"
        info.mkdir()
        (info / head).write_text(
            f"Metadata-Version: 2.1\nName: Acme.{name}\nVersion: {place}.1\n\nName: not this\n"
        )
        if points is not None:
            (info / "entry_points.txt").write_text(points)

    return lay_out


def test_it_finds_what_is_installed_here():
    groups = (GROUP, NODE_GROUP, "console_scripts", "pytest11")
    assert ours(*groups) == standard(*groups)
    assert {p.name for p in entry_points((GROUP,))} >= {"linux-guest", "pinning"}


@pytest.mark.parametrize(
    "points",
    [
        "[vtorque1]\na = acme.a\n",
        "# a comment\n\n[ console_scripts ]\nx = y:z\n[vtorque1]\n a=acme.a\nb =acme.b:C.d\n",
        "[vtorque1.node]\na = acme.a\n[vtorque1]\n[vtorque10]\nb = b\n",
        "[vtorque1]\nA-b.c = acme.a [extra]\n",
        "",
        None,
    ],
)
def test_it_reads_a_file_as_the_standard_library(install, points):
    install("one-1.0", points)
    install("zip-2", "[vtorque1]\nz = z\n", place=1)
    assert ours("vtorque1", "vtorque1.node") == standard("vtorque1", "vtorque1.node")


def test_of_one_name_the_first_on_the_path_counts(install):
    install("My_dist-1.0", "[vtorque1]\na = first\n")
    install("my.dist-2.0", "[vtorque1]\na = second\n", place=1)
    install("other-2.0", "[vtorque1]\nb = b\n", head="PKG-INFO", about="egg-info", place=1)
    assert ours("vtorque1") == standard("vtorque1")
    assert [p.value for p in entry_points(("vtorque1",))] == ["first", "b"]


def test_a_broken_distribution_hides_no_other(install, tmp_path):
    install("bad-1.0", None)
    (tmp_path / "first/bad-1.0.dist-info/entry_points.txt").write_bytes(b"[vtorque1]\n\xff = x\n")
    (tmp_path / "first/empty-1.0.dist-info").mkdir()
    (tmp_path / "first/empty-1.0.dist-info/entry_points.txt").write_text("[vtorque1]\ne = e\n")
    sys.path.append(str(tmp_path / "not-there"))
    assert ours("vtorque1") == [("vtorque1", "e", "e", "empty 1.0")]


def test_a_value_names_a_module_or_something_in_it():
    assert EntryPoint("a", "os.path", "g", "x-1.dist-info").load() is sys.modules["os.path"]
    assert EntryPoint("a", "pathlib:Path.cwd", "g", "x-1.dist-info").load() == Path.cwd
    assert EntryPoint("a", "pathlib : Path", "g", "x-1.dist-info").module == "pathlib"
    assert EntryPoint("a", "os", "g", "x-1.dist-info").distribution == "x 1"


def test_core_version_equals_that_of_its_distribution():
    assert importlib.metadata.version("vtorque-core") == __version__
