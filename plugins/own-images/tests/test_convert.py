"""The conversion of an image for the cache of its user: attributes and limits."""

import io
import sys

import pytest

from vtorque_core.api import Refused
from vtorque_linux_guest.image.filetree import FileTree
from vtorque_own_images import convert, pull


def test_attribute_whose_name_is_not_utf8_is_dropped():
    assert convert._is_kept("user.\xe9")
    assert not convert._is_kept("user.\udcff")


def test_memory_for_paths_is_limited(monkeypatch):
    """A short link to a long path in another script gives long paths to many small files."""
    tree = FileTree()
    for number in range(100):
        tree.file(f"{number}\U0001f600" + "a" * 200, b"", 0o644)
    convert._stream(tree, io.BytesIO(), lambda *_: None)
    monkeypatch.setattr(convert, "_PATHS", 40_000)
    with pytest.raises(Refused, match="paths need more than"):
        convert._stream(tree, io.BytesIO(), lambda *_: None)


def test_progress_is_told_once_per_percent_until_all_bytes_are_written():
    tree, told = FileTree(), []
    for number in range(1000):
        tree.file(f"f{number}", bytes(10), 0o644)
    convert._stream(tree, io.BytesIO(), lambda *progress: told.append(progress))
    assert told == [(100 * n, 10_000) for n in range(1, 101)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal_and_one_line_elsewhere(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with pull._progress("converting") as told:
        told(1, 2)
        told(2, 2)
    assert "100%" in sys.stderr.getvalue()
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with pull._progress("converting") as told:
        told(1, 2)
    assert sys.stderr.getvalue() == "converting\n"
