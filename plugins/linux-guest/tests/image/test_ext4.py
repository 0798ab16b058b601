"""The ext4 writer against e2fsprogs: e2fsck finds no error, debugfs reads the content."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vtorque_core.api import Refused
from vtorque_linux_guest.image.ext4 import write_ext4
from vtorque_linux_guest.image.filetree import FileTree, Slice, TreeNode, directory

CAPABILITY = b"\1\0\0\2\0\4\0\0" + bytes(12)


def written(tree: FileTree, path: Path, size: int = 64) -> Path:
    """Write the tree and check it."""
    path.unlink(missing_ok=True)
    write_ext4(tree, path, size, "vtroot")
    checked = subprocess.run(["e2fsck", "-fn", path], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout.decode()[:3000]
    return path


def debugfs(path: Path, command: str) -> str:
    done = subprocess.run(["debugfs", "-R", command, path], capture_output=True, check=True)
    return done.stdout.decode()


def dumped(path: Path, into: Path) -> dict[str, tuple[str, bytes]]:
    """Return path to type and content of everything, as debugfs reads it."""
    into.mkdir()
    debugfs(path, f"rdump / {into}")
    found = {}
    for each in into.rglob("*"):
        name = str(each.relative_to(into))
        if each.is_symlink():
            found[name] = ("link", os.fsencode(os.readlink(each)))  # noqa: PTH115 - as it is
        elif each.is_file():
            found[name] = ("file", each.read_bytes())
        elif each.is_dir() and name != "lost+found":
            found[name] = ("dir", b"")
    return found


def expected(tree: FileTree) -> dict[str, tuple[str, bytes]]:
    kinds = {stat.S_IFDIR: "dir", stat.S_IFREG: "file", stat.S_IFLNK: "link"}
    return {
        path: (kinds[stat.S_IFMT(node.mode)], node.read())
        for path, node in tree.walk()
        if path not in ("", "lost+found")
    }


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0\n", exclude_categories=("Cs", "Cc")),
    min_size=1,
    max_size=60,
).filter(lambda name: name not in (".", "..", "lost+found") and '"' not in name)
CONTENTS = st.binary(max_size=9000)
LEAVES = st.one_of(
    CONTENTS.map(lambda data: TreeNode(stat.S_IFREG | 0o644, data)),
    st.binary(min_size=1, max_size=200).map(
        lambda data: TreeNode(stat.S_IFLNK | 0o777, data.replace(b"\0", b"x"))
    ),
)


def _directory(children: dict[str, TreeNode]) -> TreeNode:
    node = directory()
    node.children = children
    return node


TREES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=6).map(_directory),
    lambda inner: st.dictionaries(NAMES, st.one_of(LEAVES, inner), max_size=4).map(_directory),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(root=TREES)
def test_any_tree_reads_back(root: TreeNode, tmp_path_factory: pytest.TempPathFactory) -> None:
    tree = FileTree()
    tree.root = root
    scratch = tmp_path_factory.mktemp("tree")
    path = written(tree, scratch / "disk", 8)
    assert dumped(path, scratch / "out") == expected(tree)


def test_ten_thousand_files_hard_links_owners_and_times(tmp_path: Path) -> None:
    tree = FileTree()
    for number in range(10_000):
        name = f"many/{number:05d}{'n' * (number % 200)}"
        tree.file(name, b"%d" % number * (number % 40))
    shared = TreeNode(stat.S_IFREG | 0o4711, b"shared", uid=70000, gid=123, mtime=1_600_000_000)
    tree.put("one", shared)
    tree.put("deep/er/two", shared)
    tree.put("fifo", TreeNode(stat.S_IFIFO | 0o600))
    path = written(tree, tmp_path / "disk", 128)
    assert debugfs(path, "cat /deep/er/two") == "shared"
    shown = debugfs(path, "stat /one")
    assert shown == debugfs(path, "stat /deep/er/two")
    for text in ("Mode:  04711", "User: 70000", "Group:   123", "Links: 2", "mtime: 0x5f5e1000"):
        assert text in shown
    assert debugfs(path, "cat /many/00123" + "n" * 123) == "123" * 3
    assert len(debugfs(path, "ls -p /many").splitlines()) >= 10_002


def test_extended_attributes_are_stored_in_the_inode_or_a_block(tmp_path: Path) -> None:
    tree = FileTree()
    small = TreeNode(stat.S_IFREG | 0o755, b"x", xattrs={"security.capability": CAPABILITY})
    large = {"user.a": b"1" * 300, "user.empty": b"", "trusted.t": b"\0\1\2"}
    tree.put("small", small)
    tree.put("large", TreeNode(stat.S_IFREG | 0o644, b"y", xattrs=large))
    path = written(tree, tmp_path / "disk")
    assert "security.capability (20)" in debugfs(path, "ea_list /small")
    shown = debugfs(path, "ea_list /large")
    for text in ("user.a (300)", "user.empty (0)", "trusted.t (3)"):
        assert text in shown
    huge = FileTree()
    huge.put("f", TreeNode(stat.S_IFREG | 0o644, b"", xattrs={"user.a": bytes(5000)}))
    with pytest.raises(Refused, match="extended attributes"):
        write_ext4(huge, tmp_path / "huge", 64, "")


@pytest.mark.full
def test_large_sparse_file_is_written_up_to_its_last_block(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(300 << 20)
        file.seek(200 << 20)
        file.write(b"in the middle")
        file.seek((300 << 20) - 3)
        file.write(b"end")
    with source.open("rb") as file:
        tree = FileTree()
        tree.put("large", TreeNode(stat.S_IFREG | 0o644, Slice(file, 0, 300 << 20)))
        path = written(tree, tmp_path / "disk", 400)
        target = tmp_path / "back"
        debugfs(path, f"dump /large {target}")
        assert target.stat().st_size == 300 << 20
        with target.open("rb") as back:
            back.seek(200 << 20)
            assert back.read(13) == b"in the middle"
            back.seek(-3, 2)
            assert back.read() == b"end"


@pytest.mark.parametrize("size", [3, 127, 128, 129, 257, 1024, 8192])
def test_any_size_is_a_good_file_system(tmp_path: Path, size: int) -> None:
    tree = FileTree()
    tree.file("f", b"content")
    path = written(tree, tmp_path / "disk", size)
    assert debugfs(path, "cat /f") == "content"
    assert path.stat().st_blocks * 512 < 4 << 20


def test_too_small_is_refused(tmp_path: Path) -> None:
    tree = FileTree()
    tree.file("f", bytes(9 << 20))
    with pytest.raises(
        Refused, match="the files need more than the 8 MiB of the root disk: increase size"
    ):
        write_ext4(tree, tmp_path / "disk", 8, "")
    many = FileTree()
    for number in range(40_000):
        many.file(f"d/{number}", b"")
    with pytest.raises(Refused, match="too many"):
        write_ext4(many, tmp_path / "many", 8, "")


def test_same_tree_gives_the_same_bytes(tmp_path: Path) -> None:
    disks = []
    for order in (1, -1):
        tree = FileTree()
        for name in ["a", "b/c", "b/d", "z"][::order]:
            tree.file(name, name.encode())
        disks.append(written(tree, tmp_path / str(order)).read_bytes())
    assert disks[0] == disks[1]
