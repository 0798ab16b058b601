"""Files from the writer, parsed by an independent reader; real OSv reads them in e2e tests."""

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vtorque_osv import disk, rofs

from rofs_reader import read_back
from vtorque_core.api import Refused


def image(tree, tmp_path):
    path = tmp_path / "rofs"
    with path.open("wb") as file:
        size = rofs.write(tree, file)
    assert path.stat().st_size == size
    return path.read_bytes()


NAME = st.binary(min_size=1, max_size=40).filter(
    lambda n: b"/" not in n and b"\0" not in n and n not in (b".", b"..")
)
LEAF = st.one_of(
    st.binary(max_size=1600),
    st.sampled_from([b"", b"x" * 512, b"x" * 513]),
    st.tuples(st.binary(min_size=1, max_size=60).filter(lambda t: b"\0" not in t)),
)
TREE = st.recursive(
    st.dictionaries(NAME, LEAF, max_size=4),
    lambda below: st.dictionaries(NAME, st.one_of(LEAF, below), max_size=4),
    max_leaves=25,
)


def expected(tree, path=b""):
    found = {path or b"/": None}
    for name, value in tree.items():
        below = path + b"/" + name
        found |= expected(value, below) if isinstance(value, dict) else {below: value}
    return found


@given(TREE)
@settings(deadline=None)
def test_any_tree_is_read_back(tmp_path_factory, tree):
    built = rofs.RofsTree()
    for path, value in expected(tree).items():
        name = os.fsdecode(path)
        if value is None:
            built.directory(name)
        elif isinstance(value, tuple):
            built.link(name, os.fsdecode(value[0]))
        else:
            built.file(name, value)
    assert read_back(image(built, tmp_path_factory.mktemp("r"))) == expected(tree)


def test_real_directory_tree_is_read_back(tmp_path):
    source = tmp_path / "tree"
    (source / "a/b").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "a/b/file").write_bytes(os.urandom(3000))
    (source / "a/zero").touch()
    (source / "link").symlink_to("a/b/file")
    (source / "dangling").symlink_to("/no/such")
    (source / os.fsdecode(b"na\xffme \n")).write_bytes(b"odd")
    tree = rofs.RofsTree()
    tree.add("/top", source)
    found = read_back(image(tree, tmp_path))
    assert found[b"/top/a/b/file"] == (source / "a/b/file").read_bytes()
    assert found[b"/top/a/zero"] == b""
    assert found[b"/top/link"] == (b"a/b/file",)
    assert found[b"/top/dangling"] == (b"/no/such",)
    assert found[b"/top/na\xffme \n"] == b"odd"
    assert found[b"/top/empty"] is None
    assert len(found) == 10


def test_ten_thousand_files_are_read_back(tmp_path):
    tree = rofs.RofsTree()
    for number in range(10_000):
        tree.file(f"/d{number % 97}/f{number}", b"%d" % number)
    found = read_back(image(tree, tmp_path))
    assert len(found) == 10_000 + 97 + 1
    assert all(found[b"/d%d/f%d" % (n % 97, n)] == b"%d" % n for n in range(10_000))


def test_same_tree_gives_the_same_bytes(tmp_path):
    def build(order):
        tree = rofs.RofsTree()
        for name in order:
            tree.file(f"/x/{name}", name.encode())
        return image(tree, tmp_path)

    assert build(["a", "b", "c"]) == build(["c", "a", "b"])


@pytest.mark.parametrize(
    "path", ["relative", "/a/../b", "/" + "x" * 256, "/x\0y", "/a" * 3000, "/"]
)
def test_bad_paths_are_refused(path):
    with pytest.raises(Refused):
        rofs.RofsTree().file(path, b"")


def test_special_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(Refused, match="is not a file, directory or link"):
        rofs.RofsTree().add("/x", tmp_path)
    tree = rofs.RofsTree()
    tree.file("/f", tmp_path / "fifo")
    with pytest.raises(Refused, match="is not a regular file"):
        image(tree, tmp_path)


def test_file_and_directory_do_not_replace_each_other():
    tree = rofs.RofsTree()
    tree.file("/a", b"1")
    tree.file("/a", b"2")
    with pytest.raises(Refused, match="a parent of this path is a file or link"):
        tree.file("/a/b", b"")
    tree.directory("/d")
    with pytest.raises(Refused, match="is already a directory"):
        tree.file("/d", b"")


def test_disk_has_one_partition(tmp_path):
    tree = rofs.RofsTree()
    tree.file("/hello", b"hi")
    disk.write_disk(tree, tmp_path / "disk")
    data = (tmp_path / "disk").read_bytes()
    assert data[510:512] == b"\x55\xaa"
    kind, first, count = data[0x1CE + 4], *struct.unpack_from("<II", data, 0x1CE + 8)
    assert (kind, first * 512, len(data)) == (0x83, 2 << 20, (first + count) * 512)
    assert data[0x1CE + 2]  # starting sector: OSv skips an entry where it is 0
    assert read_back(data[first * 512 :])[b"/hello"] == b"hi"


def test_disk_with_a_loader_has_the_file_system_behind_it(tmp_path):
    loader = bytes(510) + b"\x55\xaa" + os.urandom(3 << 20)
    (tmp_path / "loader.img").write_bytes(loader)
    disk.write_disk(rofs.RofsTree(), tmp_path / "disk", tmp_path / "loader.img")
    data = (tmp_path / "disk").read_bytes()
    assert data[512 : len(loader)] == loader[512:]
    first = struct.unpack_from("<I", data, 0x1CE + 8)[0]
    assert first * 512 == 4 << 20
    assert read_back(data[first * 512 :]) == {b"/": None}


def test_loader_without_a_boot_record_is_refused(tmp_path):
    (tmp_path / "loader.img").write_bytes(bytes(1000))
    with pytest.raises(Refused, match="no boot record"):
        disk.write_disk(rofs.RofsTree(), tmp_path / "disk", tmp_path / "loader.img")
