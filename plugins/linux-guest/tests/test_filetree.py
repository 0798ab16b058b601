"""The tree that images are made of: paths as in a chroot, tar files by anybody."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vtorque_core.api_node import Refused
from vtorque_linux_guest.filetree import MAX_HEADER, FileTree, members, read_tar

Change = Callable[[tarfile.TarInfo], None]


def tar(*entries: tuple[str, bytes | str, str], **pax: str) -> io.BytesIO:
    """Return a tar file of (name, content or link target, kind) entries."""
    out = io.BytesIO()
    kinds = {
        "f": tarfile.REGTYPE, "l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE, "d": tarfile.DIRTYPE,
        "c": tarfile.CHRTYPE, "b": tarfile.BLKTYPE, "p": tarfile.FIFOTYPE, "?": b"Z",
    }  # fmt: skip
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, kind in entries:
            info = tarfile.TarInfo(name)
            info.type = kinds[kind]
            info.pax_headers = dict(pax)
            if isinstance(content, str):
                info.linkname = content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return out


def everything(_name: str) -> bool:
    return True


def read(file: io.BytesIO, most: int = 1 << 20) -> FileTree:
    return read_tar(file, most, everything)


def test_links_are_followed_inside_the_image_only() -> None:
    tree = read(
        tar(
            ("usr/lib", b"", "d"),
            ("lib", "usr/lib", "l"),
            ("up", "../../../../etc", "l"),
            ("abs", "/usr", "l"),
            ("lib/a", b"a", "f"),
            ("up/passwd", b"of the image", "f"),
            ("abs/b", b"b", "f"),
        )
    )
    for path, content in {
        "usr/lib/a": b"a", "lib/a": b"a", "etc/passwd": b"of the image", "/usr/b": b"b",
        "usr/../lib/./a": b"a", "../../etc/passwd": b"of the image", "abs/lib/../b": b"b",
    }.items():  # fmt: skip
        node = tree.find(path)
        assert node is not None, path
        assert node.read() == content


def test_loops_and_files_in_the_way() -> None:
    tree = FileTree()
    tree.link("a", "b")
    tree.link("b", "a")
    assert tree.find("a/x") is None
    with pytest.raises(Refused, match="too many symbolic links"):
        tree.file("a/x", b"")
    tree.file("f", b"")
    with pytest.raises(Refused, match="is not a directory"):
        tree.file("f/x", b"")
    with pytest.raises(Refused, match="must be a directory"):
        tree.file("", b"")


def test_put_replaces_and_keeps_what_a_directory_has() -> None:
    tree = FileTree()
    tree.file("d/f", b"1")
    tree.directory("d", 0o700)
    tree.file("d/f", b"2")
    assert [path for path, _ in tree.walk()] == ["", "d", "d/f"]
    tree.file("d", b"no longer a directory")
    assert [path for path, _ in tree.walk()] == ["", "d"]
    tree.remove("d")
    tree.remove("d/x/y")
    assert [path for path, _ in tree.walk()] == [""]


def test_hard_links_are_one_file_and_attributes_come_along() -> None:
    tree = read(tar(("a", b"x", "f"), ("b", "a", "h"), **{"SCHILY.xattr.user.k": "v"}))
    assert tree.find("a") is tree.find("b")
    node = tree.find("a")
    assert node is not None
    assert node.xattrs == {"user.k": b"v"}


def test_devices_of_dev_are_left_out() -> None:
    tree = read(tar(("./dev", b"", "d"), ("./dev/null", b"", "c"), ("./dev/x", b"", "f")))
    assert [path for path, _ in tree.walk()] == ["", "dev"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (tar(("/etc/passwd", b"x", "f")), "absolute path"),
        (tar(("a/../../etc", b"x", "f")), "'..' in it"),
        (tar(("n" * 300, b"", "f")), "name that no file can have"),
        (tar(("disk", b"", "b")), "is a device"),
        (tar(("null", b"", "c")), "is a device"),
        (tar(("odd", b"", "?")), "unknown type"),
        (tar(("h", "nowhere", "h")), "hard link to 'nowhere'"),
        (tar(("d", b"", "d"), ("h", "d", "h")), "which is no file"),
        (tar(("h", "../../etc/shadow", "h")), "absolute path or '..'"),
        (tar(("h", "/etc/shadow", "h")), "absolute path or '..'"),
        (tar(("l", "", "l")), "empty or too long"),
        (tar(("l", "x" * 5000, "l")), "empty or too long"),
        (tar(("a", b"x" * 600, "f"), ("b", b"x" * 600, "f")), "has more than 0 MiB"),
        (tar(("f", b"", "f"), comment="x" * (MAX_HEADER + 10)), "a header of"),
        (io.BytesIO(b"not a tar file at all" * 100), "is not a tar file"),
        (io.BytesIO(tar(("f", b"x" * 1000, "f")).getvalue()[:700]), "truncated|not a tar file"),
        (tar(("f", b"", "f"), size="-5"), "truncated|not a tar file"),
        (tar(("f", b"", "f"), size=str(1 << 60)), "truncated|not a tar file"),
    ],
)
def test_broken_tar_files_are_refused(file: io.BytesIO, message: str) -> None:
    with pytest.raises(Refused, match=message):
        read(file, 1000)


def test_an_owner_that_is_no_id_is_refused() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo("f")
        info.uid = 1 << 40
        archive.addfile(info)
    with pytest.raises(Refused, match="which is no id"):
        read(out)


def test_it_reads_what_tar_writes(tmp_path: Path) -> None:
    base = tmp_path / "in"
    (base / "d" / ("long" * 40)).mkdir(parents=True)
    (base / "d" / ("long" * 40) / ("name" * 40)).write_bytes(b"deep")
    (base / "ü").write_bytes(b"umlaut")
    out = tmp_path / "out.tar"
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with tarfile.open(out, "w", format=form) as archive:
            archive.add(base, ".")
        with out.open("rb") as file:
            assert len(members(file, 1 << 20)) == 5
            tree = read_tar(file, 1 << 20, everything)
            node = tree.find("d/" + "long" * 40 + "/" + "name" * 40)
            assert node is not None
            assert node.read() == b"deep"
            assert tree.find("ü") is not None
