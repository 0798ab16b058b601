"""File trees of images: paths as in a chroot, and untrusted tar files."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tar_files import tar
from vtorque_core.api import Refused
from vtorque_linux_guest.image import filetree
from vtorque_linux_guest.image.filetree import FileTree, read_tar
from vtorque_linux_guest.image.tar_reader import MAX_HEADER, members

Change = Callable[[tarfile.TarInfo], None]


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


def test_link_loop_or_file_in_a_path_is_refused() -> None:
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


def test_put_replaces_files_and_keeps_directory_content() -> None:
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


def test_hard_links_share_one_node_with_attributes() -> None:
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
        (tar(("a/../../etc", b"x", "f")), "contains '..'"),
        (tar(("n" * 300, b"", "f")), "is not a valid file name"),
        (tar(("disk", b"", "b")), "is a device"),
        (tar(("null", b"", "c")), "is a device"),
        (tar(("odd", b"", "?")), "unknown type"),
        (tar(("h", "nowhere", "h")), "is a hard link to 'nowhere', which is not a file"),
        (tar(("d", b"", "d"), ("h", "d", "h")), "which is not a file"),
        (tar(("h", "../../etc/shadow", "h")), "absolute path or '..'"),
        (tar(("h", "/etc/shadow", "h")), "absolute path or '..'"),
        (tar(("l", "", "l")), "empty or too long"),
        (tar(("l", "x" * 5000, "l")), "empty or too long"),
        (
            tar(("a", b"x" * 600, "f"), ("b", b"x" * 600, "f")),
            "has more than 0 MiB",
        ),
        (tar(("f", b"", "f"), comment="x" * (MAX_HEADER + 10)), "a header has"),
        (io.BytesIO(b"not a tar file at all" * 100), "is not a valid tar file"),
        (io.BytesIO(tar(("f", b"x" * 1000, "f")).getvalue()[:700]), "truncated|not a tar file"),
        (tar(("f", b"", "f"), size="-5"), "truncated|not a tar file"),
        (tar(("f", b"", "f"), size=str(1 << 60)), "truncated|not a tar file"),
    ],
)
def test_broken_tar_files_are_refused(file: io.BytesIO, message: str) -> None:
    with pytest.raises(Refused, match=message):
        read(file, 1000)


def test_owner_above_the_id_range_is_refused() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo("f")
        info.uid = 1 << 40
        archive.addfile(info)
    with pytest.raises(Refused, match="which is not a valid id"):
        read(out)


def test_tar_files_written_by_tar_are_read(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_every_tar_format_is_read(form: str, tmp_path: Path) -> None:
    base = tmp_path / "in"
    deep = base / ("directory" * 5) / "d"
    deep.mkdir(parents=True)
    (base / "file").write_bytes(b"content" * 100)
    (base / "file").chmod(0o4750)
    os.utime(base / "file", (1, 1234567890.5))
    (base / "empty").touch()
    os.link(base / "file", base / "same")
    (base / "link").symlink_to("file")
    names = {"file", "empty", "same", "link", "directory" * 5, f"{'directory' * 5}/d", ""}
    if form != "v7":
        os.mkfifo(base / "fifo")
        names.add("fifo")
        name = f"{'directory' * 5}/d/{'n' * 60}"
        (base / name).write_bytes(b"x")
        names.add(name)
    if form in ("oldgnu", "gnu", "posix"):
        (base / "far").symlink_to("t" * 150)
        names.add("far")
    out = tmp_path / "out.tar"
    argv = ["tar", f"--format={form}", "--numeric-owner", "-C", str(base), "-cf", str(out), "."]
    subprocess.run(argv, check=True, timeout=180)
    with out.open("rb") as file, tarfile.open(out) as theirs:
        tree = read_tar(file, 1 << 20, everything)
        assert {path for path, _ in tree.walk()} == names
        for info in theirs:
            node = tree.find(info.name, follow=False)
            assert node is not None
            if not info.issym():
                assert stat.S_IMODE(node.mode) == info.mode
            assert (node.uid, node.gid, node.mtime) == (info.uid, info.gid, int(info.mtime))
            if info.issym():
                assert node.read() == info.linkname.encode()
            elif info.isreg():
                assert node.read() == (base / info.name).read_bytes()
        assert tree.find("file") is tree.find("same")


def header(name: bytes, kind: bytes, size: int, **fields: bytes) -> bytes:
    """Return a manually made header of a tar file, with a valid checksum."""
    out = bytearray(512)
    for at, text in (
        (0, name), (100, b"0000644"), (108, b"0"), (116, b"0"), (124, b"%011o" % size),
        (136, fields.get("mtime", b"0")), (156, kind), (257, b"ustar\x0000"),
    ):  # fmt: skip
        out[at : at + len(text)] = text
    out[148:156] = b"%06o\0 " % (sum(out) + 8 * 32)
    return bytes(out)


def block(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def records(*pairs: bytes) -> bytes:
    """Return pax records, each below 1000 bytes."""
    return b"".join(b"%d %s\n" % (len(pair) + 4 + (len(pair) > 95), pair) for pair in pairs)


def pax(data: bytes, kind: bytes = b"x") -> bytes:
    return header(b"PaxHeader", kind, len(data)) + block(data)


def negative(kind: bytes) -> bytes:
    """Return a header whose size is -512, in the form of GNU's large numbers."""
    out = bytearray(header(b"f", kind, 0))
    out[124:136] = (-512).to_bytes(12, "big", signed=True)
    out[148:156] = b"%06o\0 " % (sum(out) - sum(out[148:156]) + 8 * 32)
    return bytes(out)


FILE = header(b"f", b"0", 0)


def attributes() -> bytes:
    return records(*(b"SCHILY.xattr.user.%06d=%s" % (n, b"v" * 30) for n in range(15_000)))


def memory_of(data: bytes) -> tuple[str, int]:
    """Read a tar file in a separate process; return the refusal, and the peak memory in KiB."""
    done = subprocess.run(
        [sys.executable, "-c", READ], input=data, capture_output=True, timeout=180, check=True
    )
    peak, said = done.stdout.decode().split(maxsplit=1)
    return said, int(peak)


READ = """
import io, resource, sys
from vtorque_core.api import Refused
from vtorque_linux_guest.image.filetree import read_tar
file = io.BytesIO(sys.stdin.buffer.read())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said = "nothing"
try:
    read_tar(file, 1 << 33, lambda name: True)
except Refused as error:
    said = str(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, said)
"""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(
            lambda: pax(attributes(), b"g") + FILE * 3000,
            "nothing",
            id="global header",
            marks=pytest.mark.full,
        ),
        pytest.param(
            lambda: (pax(attributes()) + FILE) * 80,
            "of long names and attributes",
            id="many headers",
            marks=pytest.mark.full,
        ),
        pytest.param(
            lambda: pax(b"1" * 1_000_000) + FILE, "extended header is damaged", id="one long header"
        ),
    ],
)
def test_headers_use_little_memory(data: Callable[[], bytes], message: str) -> None:
    said, peak = memory_of(data())
    assert message in said
    assert peak < 600 << 10


def test_implicit_directories_count_as_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filetree, "MAX_ENTRIES", 1000)
    paths = (pax(records(b"path=%d" % n + b"/a" * 400)) + FILE for n in range(6))
    with pytest.raises(Refused, match="the image has more than 1000 files"):
        read(io.BytesIO(b"".join(paths)))
    tree = FileTree()
    for _ in range(5000):  # removed entries do not count
        tree.file("d/f", b"")
        tree.remove("d")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((header(b"x", b"L", 900_000) + block(b"a/" * 450_000) + FILE) * 3, "a valid file name"),
        (header(b"s", b"S", 1 << 20) + bytes(1 << 20), "sparse member"),
        (pax(records(b"GNU.sparse.major=1")) + FILE, "sparse member"),
        (pax(b"99 path=x\n") + FILE, "extended header is damaged"),
        (pax(records(b"path=x") + b"abcdefghijkl") + FILE, "extended header is damaged"),
        (pax(records(b"path=x") + b"0 ") + FILE, "extended header is damaged"),
        (pax(b"6 path\n7 p=\n") + FILE, "extended header is damaged"),
        (pax(records(b"mtime=nan")) + FILE, "is not a number"),
        (pax(records(b"uid=" + b"9" * 30)) + FILE, "is not a number"),
        (pax(records(b"uid=-1")) + FILE, "which is not a valid id"),
        (pax(records(b"path=a\0b")) + FILE, "is not a valid file name"),
        (header(b"f", b"0", 0, mtime=b"12z"), "is not a number"),
        (FILE[:100] + b"1" + FILE[101:], "wrong checksum"),
        (negative(b"g") + FILE, "a header has a negative size, or ends"),
        (negative(b"x") + FILE, "a header has -512 bytes, and the limit is"),
        (negative(b"0") + FILE, "is truncated"),
        (FILE[:300], "truncated"),
        (pax(b"x" * 2000)[:1000], "truncated"),
        (b"", "is empty"),
    ],
)  # fmt: skip
def test_handmade_hostile_headers_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(Refused, match=message):
        read(io.BytesIO(data))


def test_paths_through_links_stay_short_enough() -> None:
    entries: list[tuple[str, bytes | str, str]] = []
    base = ""
    for number in range(4):
        entries.append((f"l{number}", base + "d/" * 1000, "l"))
        entries.append((f"l{number}/f", b"", "f"))
        base = f"l{number}/"
    with pytest.raises(Refused, match="resolves to a path of more than 4095 bytes"):
        read(tar(*entries))


def test_link_to_itself_is_not_found() -> None:
    tree = FileTree()
    tree.link("bin/sh", "sh")
    assert tree.find("bin/sh") is None
    tree.link("a", "b")
    tree.link("b", "a")
    assert tree.find("a") is None
    tree.directory("a")
    node = tree.find("a")
    assert node is not None
    assert node.is_directory


VALID = tar(
    ("etc", b"", "d"), ("l", "etc", "l"), ("l/g", b"g" * 600, "f"), ("h", "l/g", "h"),
    **{"SCHILY.xattr.user.k": "v", "path": "etc/" + "n" * 90},
).getvalue()  # fmt: skip


@settings(max_examples=4 * settings().max_examples, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5999), st.integers(0, 255)), max_size=6), st.booleans())
def test_damage_is_read_or_refused(changes: list[tuple[int, int]], mend: bool) -> None:
    """Examples found before: sizes below zero, records without a blank, both without an end."""
    data = bytearray(VALID)
    for where, byte in changes:
        data[where] = byte
    for at in range(0, len(data) if mend else 0, 512):
        head = data[at : at + 512]
        if head[257:262] == b"ustar":
            data[at + 148 : at + 156] = b"%06o\0 " % (sum(head) - sum(head[148:156]) + 8 * 32)
    with contextlib.suppress(Refused):
        read(io.BytesIO(bytes(data)))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_numbers_larger_than_their_field_are_read(form: int) -> None:
    """GNU's tar and pax encode numbers above eight octal digits differently."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        info = tarfile.TarInfo("a")
        info.uid, info.gid, info.mtime = 3_000_000_000, 1_000_660_000, -5
        archive.addfile(info)
    (member,) = members(out, 1 << 20)
    assert (member.uid, member.gid, member.mtime) == (3_000_000_000, 1_000_660_000, 0)


@pytest.mark.parametrize("size", [10 << 30, 1 << 63, 1 << 80, -1])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_size_beyond_the_file_is_refused(size: int, kind: bytes) -> None:
    head = bytearray(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT))
    head[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    head[156:157] = kind
    head[148:156] = b"%06o\0 " % (sum(head) - sum(head[148:156]) + 8 * 32)
    with pytest.raises(Refused):
        members(io.BytesIO(bytes(head) + bytes(1024)), 1 << 40)
