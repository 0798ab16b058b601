"""Input that ``vmgr images add`` and builders refuse, without leftovers in the pool."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import socket
import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import sparing
from added_disks import KNOWN, QuietProgress, add, said
from vtorque_core.api import HostFault, Refused
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.live.images import store
from vtorque_disk_image import builder, copying
from vtorque_images import change

MIB = 1 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    path.mkdir(mode=0o755)
    with store.staging(path) as staging:
        (staging / "k").write_bytes(b"kernel")
        change.commit(path, "there", staging, BuiltImage("l", "d", "a", 64, kernel="k"), "test")
    return path


def snapshot(pool: Path) -> dict[str, tuple[object, ...]]:
    """Return everything in the pool with its content and time."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(pool.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(pool))] = (status.st_mode, status.st_ino, content)
    return found


def qemu_img(*argv: object) -> None:
    subprocess.run(["qemu-img", *map(str, argv)], check=True, timeout=180, capture_output=True)


def make(path: Path, kind: str = "qcow2", size: str = "8M", *options: str) -> Path:
    """Make a disk with a small content."""
    qemu_img("create", "-q", "-f", kind, *options, path, size)
    command = ["qemu-io", "-f", kind, "-c", "write -q -P 170 0 1M", str(path)]
    subprocess.run(command, check=True, timeout=180, capture_output=True)
    return path


def edit(path: Path, at: int, data: bytes) -> Path:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    return path


def cut(path: Path, size: int) -> Path:
    os.truncate(path, size)
    return path


def raw_disk(path: Path, size: int = 4 * MIB, first: int = 2048, count: int = 1024) -> Path:
    """Make a raw disk with one MBR partition."""
    path.write_bytes(bytes(size))
    edit(path, 446, struct.pack("<B3sB3sII", 0x80, b"", 0x83, b"", first, count))
    return edit(path, 510, b"\x55\xaa")


# -- qcow2 ----------------------------------------------------------------------------------------


def backed(d: Path) -> Path:
    base = make(d / "base")
    qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", d / "f")
    return d / "f"


def backed_by_secret(d: Path) -> Path:
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", "/etc/shadow", "-F", "raw", d / "f", "1M")
    return d / "f"


def backed_by_json(d: Path) -> Path:
    name = 'json:{"driver":"raw","file":{"driver":"file","filename":"/etc/shadow"}}'
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "raw", d / "f", "1M")
    return d / "f"


def backed_by_nbd(d: Path) -> Path:
    name = "nbd:127.0.0.1:10809"
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "raw", d / "f", "1M")
    return d / "f"


def cyclic(d: Path) -> Path:
    for one, other in (("f", "g"), ("g", "f")):
        argv = ("-u", "-b", d / other, "-F", "qcow2", d / one, "1M")
        qemu_img("create", "-q", "-f", "qcow2", *argv)
    return d / "f"


def data_file(d: Path) -> Path:
    qemu_img("create", "-q", "-f", "qcow2", "-o", f"data_file={d}/data", d / "f", "1M")
    return d / "f"


def data_file_of_secret(d: Path) -> Path:
    """A header like that of CVE-2024-4467: a data file by a json: name."""
    path = data_file(d)
    content = path.read_bytes().replace(
        f"{d}/data".encode(), b"/etc/shadow".ljust(len(f"{d}/data"))
    )
    path.write_bytes(content)
    return path


def encrypted(d: Path) -> Path:
    return edit(make(d / "f"), 32, struct.pack(">I", 2))


def huge(d: Path) -> Path:
    return make(d / "f", "qcow2", "10P", "-o", "cluster_size=2M")


def huge_tables(d: Path) -> Path:
    return edit(make(d / "f"), 36, struct.pack(">I", 1 << 22))


def odd_clusters(d: Path) -> Path:
    return edit(make(d / "f"), 20, struct.pack(">I", 31))


def without_data(d: Path) -> Path:
    path = make(d / "f")
    return cut(path, path.stat().st_size - 900_000)


def crossed_tables(d: Path) -> Path:
    """The second level's entries all name one cluster: a small file that claims to be full."""
    path = make(d / "f")
    (table,) = struct.unpack_from(">Q", path.read_bytes(), 40)
    (second,) = struct.unpack_from(">Q", path.read_bytes(), table)
    second &= (1 << 56) - 1
    entry = path.read_bytes()[second : second + 8]
    return edit(path, second, entry * 100)


def zero_size(d: Path) -> Path:
    return edit(make(d / "f"), 24, bytes(8))


# -- Other formats ---------------------------------------------------------------------------------


def vmdk_descriptor(d: Path, extent: str = 'RW 2048 FLAT "/etc/shadow" 0') -> str:
    return (
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n"
        f'createType="monolithicFlat"\n{extent}\n'
    )


def vmdk_text(d: Path) -> Path:
    (d / "f").write_text(vmdk_descriptor(d))
    return d / "f"


def vmdk_hidden_text(d: Path) -> Path:
    """A sparse vmdk of no capacity: QEMU then uses the text in it."""
    path = make(d / "f", "vmdk")
    edit(path, 12, bytes(8))
    return edit(path, 512, vmdk_descriptor(d).encode())


def vmdk_parent(d: Path) -> Path:
    path = make(d / "f", "vmdk")
    return edit(path, 512, b'# Disk DescriptorFile\nparentFileNameHint="/etc/shadow"\n')


def vmdk_cut(d: Path) -> Path:
    return cut(make(d / "f", "vmdk"), 600)


def vmdk_without_data(d: Path) -> Path:
    path = make(d / "f", "vmdk")
    return cut(path, path.stat().st_size - 4096)


def vmdk_stream_cut(d: Path) -> Path:
    make(d / "g")
    argv = ("-o", "subformat=streamOptimized", d / "g", d / "f")
    qemu_img("convert", "-O", "vmdk", *argv)
    return cut(d / "f", (d / "f").stat().st_size // 2)


def vmdk_stream_without_tables(d: Path) -> Path:
    """Make a vmdk whose footer claims that the tables are at the footer's position."""
    path = make(d / "f", "vmdk")
    head = edit(path, 56, b"\xff" * 8).read_bytes()[:512]  # SparseExtentHeader: gdOffset
    return edit(path, path.stat().st_size, head + bytes(512))


def vhdx_cut(d: Path) -> Path:
    path = make(d / "f", "vhdx", "64M")
    return cut(path, 300_000)


def vhdx_garbage(d: Path) -> Path:
    (d / "f").write_bytes(b"vhdxfile" + os.urandom(2 * MIB))
    return d / "f"


def raw_cut(d: Path) -> Path:
    return raw_disk(d / "f", size=MIB, first=2048, count=8192)


def gpt_impossible(d: Path) -> Path:
    path = raw_disk(d / "f")
    edit(path, 450, b"\xee")
    return edit(path, 512, struct.pack("<8s64xQII", b"EFI PART", 2, 1 << 30, 1 << 30))


def gpt_missing(d: Path) -> Path:
    return edit(raw_disk(d / "f"), 450, b"\xee")


def tar(d: Path) -> Path:
    with tarfile.open(d / "f", "w") as archive:
        member = tarfile.TarInfo("../../etc/passwd")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"x:x"))
    return d / "f"


def zipped(d: Path) -> Path:
    with zipfile.ZipFile(d / "f", "w") as archive:
        archive.writestr("disk", bytes(10 * MIB))
    return d / "f"


def gzipped(d: Path) -> Path:
    (d / "f").write_bytes(gzip.compress(bytes(MIB)))
    return d / "f"


def text(d: Path) -> Path:
    (d / "f").write_text("#!/bin/sh\nrm -rf /\n")
    return d / "f"


def noise(d: Path) -> Path:
    (d / "f").write_bytes(b"\x01" + bytes(MIB))
    return d / "f"


def empty(d: Path) -> Path:
    (d / "f").touch()
    return d / "f"


def link(d: Path) -> Path:
    make(d / "g")
    (d / "f").symlink_to(d / "g")
    return d / "f"


def directory(d: Path) -> Path:
    (d / "f").mkdir()
    return d / "f"


def fifo(d: Path) -> Path:
    os.mkfifo(d / "f")
    return d / "f"


def unix_socket(d: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(d / "f"))
    return d / "f"


def luks(d: Path) -> Path:
    (d / "f").write_bytes(b"LUKS\xba\xbe" + bytes(MIB))
    return d / "f"


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "qcow2, header truncated": (lambda d: cut(make(d / "f"), 90), "truncated qcow2"),
    "qcow2, magic number truncated": (lambda d: cut(make(d / "f"), 20), "truncated qcow2"),
    "qcow2, tables truncated": (lambda d: cut(make(d / "f"), 70000), "truncated qcow2"),
    "qcow2, data truncated": (without_data, "qemu-img failed"),
    "qcow2, backing file in the directory": (backed, "has a backing file"),
    "qcow2, backing file of the node": (backed_by_secret, "has a backing file"),
    "qcow2, backing file by json:": (backed_by_json, "has a backing file"),
    "qcow2, backing file over the network": (backed_by_nbd, "has a backing file"),
    "qcow2, cyclic chain": (cyclic, "has a backing file"),
    "qcow2, data file": (data_file, "external data file"),
    "qcow2, data file of the node": (data_file_of_secret, "external data file"),
    "qcow2, encrypted": (encrypted, "is encrypted"),
    "qcow2, 10 PiB": (huge, "more than allowed (limit: 2097152 MiB, set with [images] max_disk)"),
    "qcow2, tables of 32 MiB": (huge_tables, "truncated qcow2"),
    "qcow2, impossible clusters": (odd_clusters, "cluster_bits is 31"),
    "qcow2, all tables in one cluster": (crossed_tables, "qemu-img failed"),
    "qcow2, no size": (zero_size, "is a disk of size 0"),
    "qcow2, version 1": (lambda d: edit(make(d / "f"), 4, struct.pack(">I", 1)), "version 1"),
    "qcow2, marked corrupt": (lambda d: edit(make(d / "f"), 79, b"\2"), "marked as corrupt"),
    "vmdk, text that names a file": (vmdk_text, "description of other files"),
    "vmdk, hidden text that names a file": (vmdk_hidden_text, "describes other files"),
    "vmdk, parent": (vmdk_parent, "has a backing file"),
    "vmdk, truncated": (vmdk_cut, "qemu-img failed"),
    "vmdk, no tables": (vmdk_stream_without_tables, "qemu-img failed"),
    "vmdk, data truncated": (vmdk_without_data, "truncated vmdk: its data is beyond the end"),
    "vmdk, stream truncated": (vmdk_stream_cut, "qemu-img failed"),
    "vmdk of 8 EiB": (
        lambda d: edit(make(d / "f", "vmdk"), 12, struct.pack("<Q", 1 << 54)),
        "more than allowed",
    ),
    "vhdx, truncated": (vhdx_cut, "qemu-img failed"),
    "vhdx, random bytes": (vhdx_garbage, "qemu-img failed"),
    "raw, truncated": (raw_cut, "is truncated: a partition ends at 5 MiB, but the disk has 1 MiB"),
    "raw, GPT with impossible sizes": (gpt_impossible, "has an invalid partition table: a GPT"),
    "raw, missing GPT": (gpt_missing, "has an invalid partition table"),
    "LUKS": (luks, "encrypted"),
    "tar with paths upwards": (tar, "is a tar file"),
    "zip bomb": (zipped, "is a zip file"),
    "gzip": (gzipped, "is a gzip file"),
    "script": (text, "is a script"),
    "random bytes": (noise, "is not a known disk format: qcow2,"),
    "empty file": (empty, "is empty"),
    "symbolic link": (link, "is a symbolic link"),
    "directory": (directory, "is a directory"),
    "FIFO": (fifo, "is a FIFO"),
    "socket": (unix_socket, "is a socket"),
    "device": (lambda d: Path("/dev/zero"), "is a device"),
    "missing": (lambda d: d / "none", "No such file"),
    "path with NUL": (lambda d: Path(f"{d}/a\0b"), "is not a path"),
    "path with a newline": (lambda d: d / "a\nb", "a\\nb: No such file"),
}


@pytest.mark.parametrize("case", sparing.each(2, BROKEN))
def test_broken_disk_is_refused_and_leaves_nothing(pool: Path, tmp_path: Path, case: str) -> None:
    make_it, words = BROKEN[case]
    place = tmp_path / "in"
    place.mkdir()
    file = make_it(place)
    before = snapshot(pool)
    for update, name in ((False, "new"), (True, "there")):
        with pytest.raises(Refused) as caught:
            add(pool, name, file, KNOWN, QuietProgress(), update=update)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert snapshot(pool) == before


def test_at_least_30_broken_disks_are_tested() -> None:
    assert len(BROKEN) >= 30


@pytest.mark.parametrize("kind", ["touched", "longer", "shorter", "rewritten"])
def test_file_that_changes_while_it_is_read_is_refused(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = make(tmp_path / "f")
    before = snapshot(pool)
    size = file.stat().st_size
    real = copying._copy_some

    def meddling(source: int, target: int, at: int, count: int) -> int:
        done = real(source, target, at, count)
        match kind:
            case "touched":
                os.utime(file)
            case "longer":
                os.truncate(file, size + 4096)
            case "shorter":
                os.truncate(file, size - 65536)
            case "rewritten":  # with the old mtime: detected by ctime
                status = file.stat()
                edit(file, 100_000, b"x")
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        return done

    monkeypatch.setattr(copying, "_copy_some", meddling)
    with pytest.raises(Refused, match="changed while it was read: try again when"):
        add(pool, "new", file, KNOWN, QuietProgress())
    assert snapshot(pool) == before


@pytest.mark.parametrize("name", ["a\nb", "../x", "", ".x", "-x", "a/b", "a" * 101, "ä"])
def test_bad_name_is_refused_before_the_file_is_read(pool: Path, name: str) -> None:
    before = snapshot(pool)
    with pytest.raises(Refused, match="is not the name of an image"):
        add(pool, name, Path("/nonexistent"), KNOWN, QuietProgress())
    assert snapshot(pool) == before


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (said(guest_type="linux"), "add --distro, --arch"),
        (said(), "add --guest-type, --distro, --arch"),
        (said("linux", "a b", "x86_64"), "invalid distro"),
        (said("linux", "d", "x86_64", cmdline="a\nb"), "cmdline"),
        (said("linux", "d", "x86_64", labels={"a\n": "b"}), "labels"),
        (said("linux", "d", "x86_64", min_ram=-1), "min_ram"),
        (said("linux", "d", "x86_64", boot="kernel"), "add --kernel or --boot disk"),
        (said("linux", "d", "x86_64", initrd=Path("/etc/hostname")), "--initrd needs --kernel"),
        (said("linux", "d", "x86_64", kernel=Path("/etc/passwd")), "is not a kernel"),
        (said("linux", "d", "x86_64", kernel=Path("/dev/zero")), "is a device"),
        (said("linux", "d", "x86_64", format="vmdk"), "truncated vmdk"),
        (said("linux", "d", "x86_64", format="qcow2"), "qcow"),
    ],
)
def test_bad_options_are_refused(
    pool: Path, tmp_path: Path, wishes: dict[str, str], words: str
) -> None:
    file = raw_disk(tmp_path / "f")
    before = snapshot(pool)
    with pytest.raises(Refused, match=words):
        add(pool, "new", file, wishes, QuietProgress())
    assert snapshot(pool) == before


def test_missing_disk_space_is_a_host_fault(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make(tmp_path / "f")
    before = snapshot(pool)
    monkeypatch.setattr(copying, "free_bytes", lambda _: 1000)
    with pytest.raises(HostFault, match="has 0 MiB free, but 1 MiB are needed"):
        add(pool, "new", file, KNOWN, QuietProgress())
    assert snapshot(pool) == before


def test_compressed_bomb_is_measured_before_it_is_decompressed(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 MiB of one letter in a small file; the free space suffices for the file only."""
    raw = tmp_path / "raw"
    raw.write_bytes(b"x" * (16 * MIB))
    qemu_img("convert", "-c", "-O", "qcow2", raw, tmp_path / "f")
    assert (tmp_path / "f").stat().st_size < MIB
    before = snapshot(pool)
    monkeypatch.setattr(builder, "free_bytes", lambda _: 8 * MIB)
    with pytest.raises(HostFault, match="has 8 MiB free, but 32 MiB are needed"):
        add(pool, "new", tmp_path / "f", KNOWN, QuietProgress())
    assert snapshot(pool) == before


def test_broken_disk_of_a_builder_is_refused(pool: Path, tmp_path: Path) -> None:
    before = snapshot(pool)
    for case in ("qcow2, backing file of the node", "qcow2, data file", "qcow2, cyclic chain"):
        place = tmp_path / case[-5:]
        place.mkdir()
        file = BROKEN[case][0](place)
        with pytest.raises(Refused), store.staging(pool) as staging:
            shutil.copy(file, staging / "d")
            built = BuiltImage("linux", "d", "x86_64", 64, disk="d")
            change.commit(pool, "new", staging, built, "test")
        assert snapshot(pool) == before
