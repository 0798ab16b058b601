"""Entry points: found like by the standard library; a malformed distribution affects no other."""

import importlib.metadata
import sys

import pytest

from vtorque_core import __version__
from vtorque_core.config.plugins import GROUP, NODE_GROUP, Plugins, entry_points, owner


def own_entry_points(*groups):
    return sorted((p.group, p.name, p.value, owner(p)) for p in entry_points(*groups))


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
        own = name.rpartition("-")[0]
        (info / head).write_text(
            f"Metadata-Version: 2.1\nName: {own}\nVersion: {place}.1\n\nName: not this\n"
        )
        if points is not None:
            (info / "entry_points.txt").write_text(points)

    return lay_out


def test_installed_entry_points_match_the_standard_library():
    groups = (GROUP, NODE_GROUP, "console_scripts", "pytest11")
    assert own_entry_points(*groups) == standard(*groups)
    assert {p.name for p in entry_points(GROUP)} >= {"linux-guest", "pinning"}


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
def test_entry_points_file_is_parsed_as_by_the_standard_library(install, points):
    install("one-1.0", points)
    install("zip-2", "[vtorque1]\nz = z\n", place=1)
    assert own_entry_points("vtorque1", "vtorque1.node") == standard("vtorque1", "vtorque1.node")


def test_first_distribution_on_the_path_wins(install):
    install("My_dist-1.0", "[vtorque1]\na = first\n")
    install("my.dist-2.0", "[vtorque1]\na = second\n", place=1)
    install("other-2.0", "[vtorque1]\nb = b\n", head="PKG-INFO", about="egg-info", place=1)
    assert own_entry_points("vtorque1") == standard("vtorque1")
    assert [p.value for p in entry_points("vtorque1")] == ["first", "b"]


@pytest.mark.parametrize(
    ("points", "head"),
    [
        (b"[vtorque1]\n\xff = x\n", b"Name: bad\nVersion: 1\n"),
        (b"[vtorque1]\nbad\n", b"Name: bad\nVersion: 1\n"),
        (b"[vtorque1]\n= x\n", b"Name: bad\nVersion: 1\n"),
        (b"bad = x\n", b"Name: bad\nVersion: 1\n"),
        (b"[vtorque1]\nbad = \n", b"Name: bad\nVersion: 1\n"),
        (b"[vtorque1]\nbad = x\n", b""),
        (b"[vtorque1]\nbad = x\n", b"Name: \xff\nVersion: 1\n"),
        (b"[vtorque1]\nbad = x\n", None),
    ],
)
def test_malformed_distribution_does_not_break_the_others(install, tmp_path, points, head):
    about = tmp_path / "first/bad-1.0.dist-info"
    about.mkdir()
    (about / "entry_points.txt").write_bytes(points)
    if head is not None:
        (about / "METADATA").write_bytes(head)
    install("good-1.0", "[vtorque1]\ngood = vtorque_no_such_module\n", place=1)
    sys.path.append(str(tmp_path / "not-there"))
    assert ("vtorque1", "good", "vtorque_no_such_module", "good 1.1") in own_entry_points(
        "vtorque1"
    )
    plugins = Plugins.load(node=True)
    assert "vtorque_no_such_module" in plugins.broken["good"]


def test_core_version_equals_version_of_its_distribution():
    assert importlib.metadata.version("vtorque-core") == __version__
