"""The conversion of an image for the cache of its user: attributes and limits."""

import io

import pytest

from vtorque_core.api import Refused
from vtorque_linux_guest.image.filetree import FileTree
from vtorque_own_images import convert


def test_attribute_whose_name_is_not_utf8_is_dropped():
    assert convert._is_kept("user.\xe9")
    assert not convert._is_kept("user.\udcff")


def test_memory_for_paths_is_limited(monkeypatch):
    """A short link to a long path in another script gives long paths to many small files."""
    tree = FileTree()
    for number in range(100):
        tree.file(f"{number}\U0001f600" + "a" * 200, b"", 0o644)
    convert._stream(tree, io.BytesIO())
    monkeypatch.setattr(convert, "_PATHS", 40_000)
    with pytest.raises(Refused, match="paths need more than"):
        convert._stream(tree, io.BytesIO())
