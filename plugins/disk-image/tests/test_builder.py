"""``vmgr images add`` and ``update``: accepted disks, detected facts, and cost."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

import sparing
from added_disks import KNOWN, add, said
from counting import transferred
from vtorque_core.api import Refused
from vtorque_core.api.values import Image
from vtorque_disk_image import copying, probe
from vtorque_disk_image.formats import check_kernel
from vtorque_images import change

pytestmark = pytest.mark.e2e

MIB = 1 << 20
OS_RELEASE = 'PRETTY_NAME="Tiny \'1\'"\nID=tiny\nID_LIKE="ubuntu debian"\nbroken="\n'


class RecordedProgress:
    """Records the progress calls."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.parts: list[tuple[int, int]] = []

    def step(self, text: str) -> None:
        self.steps.append(text)

    def told(self, done: int, total: int) -> None:
        self.parts.append((done, total))


def elf(machine: int = 62, order: str = "<") -> bytes:
    head = b"\x7fELF\x02" + (b"\x01" if order == "<" else b"\x02") + b"\x01" + bytes(9)
    return head + struct.pack(f"{order}HH", 2, machine) + bytes(200)


def bzimage(version: str) -> bytes:
    return bytes(0x202) + b"HdrS" + version.encode() + bytes(4096)


def system(tmp_path: Path, machine: int = 62, order: str = "<") -> Path:
    """Make the tree of a minimal Linux."""
    root = tmp_path / "root"
    for directory in ("boot", "usr/lib", "usr/bin", "etc"):
        (root / directory).mkdir(parents=True)
    (root / "usr/lib/os-release").write_text(OS_RELEASE)
    (root / "usr/bin/env").write_bytes(elf(machine, order))
    (root / "usr/bin/cloud-init").touch()
    for version in ("6.1.0-9-amd64", "6.1.0-10-amd64"):
        (root / f"boot/vmlinuz-{version}").write_bytes(bzimage(version))
        (root / f"boot/initrd.img-{version}").write_bytes(version.encode())
    (root / "boot/vmlinuz-7.0-without-initramfs").write_bytes(b"x")
    return root


def ext4(disk: Path, root: Path, size: int, offset: int = 0) -> Path:
    """Write a tree to an ext4 file system in a file."""
    with disk.open("ab") as file:
        file.truncate(offset + size)
    argv = ["mke2fs", "-q", "-t", "ext4", "-d", str(root), "-E", f"offset={offset}", str(disk)]
    subprocess.run([*argv, f"{size // 1024}k"], check=True, timeout=180)
    return disk


def mbr(disk: Path, start: int, size: int) -> Path:
    with disk.open("r+b") as file:
        file.seek(446)
        file.write(bytes(64))
        file.seek(446)
        file.write(struct.pack("<B3sB3sII", 0x80, b"", 0x83, b"", start // 512, size // 512))
        file.seek(510)
        file.write(b"\x55\xaa")
    return disk


def gpt(disk: Path, start: int, size: int) -> Path:
    mbr(disk, 512, disk.stat().st_size - 512)
    with disk.open("r+b") as file:
        file.seek(450)
        file.write(b"\xee")
        file.seek(512)
        file.write(struct.pack("<8s64xQII", b"EFI PART", 2, 128, 128))
        file.seek(1024 + 128)  # the second entry; the first is not used
        file.write(struct.pack("<16s16sQQ", b"x", b"y", start // 512, (start + size) // 512 - 1))
    return disk


def content(image: Path) -> bytes:
    """Return what a guest reads from a disk of the pool."""
    raw = image.parent.parent.parent.parent / "read.raw"
    argv = ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(image), str(raw)]
    subprocess.run(argv, check=True, timeout=180)
    return raw.read_bytes()


def put(
    pool: Path,
    file: Path,
    wishes: Mapping[str, str] = KNOWN,
    name: str = "m",
    *,
    update: bool = False,
) -> tuple[Image, list[str]]:
    return add(pool, name, file, wishes, RecordedProgress(), update=update)


FORMATS = {
    "qcow2": ("qcow2",),
    "qcow2, compressed": ("qcow2", "-c"),
    "qcow2, version 2": ("qcow2", "-o", "compat=0.10"),
    "vmdk": ("vmdk",),
    "vmdk, compressed": ("vmdk", "-o", "subformat=streamOptimized"),
    "vhdx": ("vhdx",),
    "raw": ("raw",),
}


SOME = ("vmdk, compressed", "raw")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in SOME else [pytest.mark.full]) for k in FORMATS]
)
def test_every_format_becomes_the_same_qcow2(pool: Path, tmp_path: Path, kind: str) -> None:
    raw = tmp_path / "disk.raw"
    raw.write_bytes(os.urandom(3 * MIB) + bytes(5 * MIB) + b"end" + bytes(MIB - 3))
    mbr(raw, MIB, 4 * MIB)
    into, *options = FORMATS[kind]
    file = tmp_path / "disk.in"
    argv = ["qemu-img", "convert", "-f", "raw", "-O", into, *options, str(raw), str(file)]
    subprocess.run(argv, check=True, timeout=180)
    before = file.read_bytes(), file.stat().st_mtime_ns
    image = put(pool, file)[0]
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert image.disk is not None
    assert (image.disk_format, image.kernel, image.min_ram_mib) == ("qcow2", None, 256)
    assert content(image.disk)[: 9 * MIB] == raw.read_bytes()
    assert change.verify(pool, "m") == image
    assert [p.name for p in pool.iterdir()] == ["m"]
    status = image.disk.stat()
    assert (status.st_uid, status.st_mode & 0o7777) == (os.geteuid(), 0o644)


def test_internal_snapshot_is_dropped(pool: Path, tmp_path: Path) -> None:
    file = tmp_path / "f"
    for argv in (
        ("qemu-img", "create", "-q", "-f", "qcow2", file, "8M"),
        ("qemu-img", "snapshot", "-c", "old", file),
    ):
        subprocess.run([str(a) for a in argv], check=True, timeout=180)
    image = put(pool, file)[0]
    listed = ["qemu-img", "snapshot", "-l", str(image.disk)]
    assert not subprocess.run(listed, check=True, capture_output=True, timeout=180).stdout


@pytest.mark.parametrize(
    ("table", "kind"),
    sparing.each(
        2,
        [
            (None, "raw"),
            (None, "qcow2"),
            (mbr, "qcow2"),
            (mbr, "raw"),
            (gpt, "raw"),
            (gpt, "qcow2"),
        ],
    ),
)
def test_system_and_kernel_in_a_disk_are_detected(
    pool: Path, tmp_path: Path, table: object, kind: str
) -> None:
    start = MIB if table else 0
    disk = ext4(tmp_path / "disk.raw", system(tmp_path), 16 * MIB, start)
    if callable(table):
        table(disk, start, 16 * MIB)
    if kind == "qcow2":
        argv = ["qemu-img", "convert", "-O", "qcow2", str(disk), str(tmp_path / "disk.qcow2")]
        subprocess.run(argv, check=True, timeout=180)
        disk = tmp_path / "disk.qcow2"
    image, notes = put(pool, disk, said())
    assert (image.guest_type, image.distro, image.arch) == ("linux", "tiny", "x86_64")
    assert dict(image.labels) == {"family": "debian", "init": "cloud-init"}
    assert image.kernel is not None
    assert image.initrd is not None
    assert image.kernel.read_bytes() == bzimage("6.1.0-10-amd64"), "not the newest kernel (10 > 9)"
    assert image.initrd.read_bytes() == b"6.1.0-10-amd64"
    found = probe._ext(os.open(tmp_path / "disk.raw", os.O_RDONLY), start)
    assert image.cmdline == f"root=UUID={found} rw"
    assert notes == []


@pytest.mark.parametrize(
    ("machine", "order", "arch"), [(183, "<", "aarch64"), (243, "<", "riscv64"), (22, ">", "s390x")]
)
def test_other_architectures_are_detected(
    pool: Path, tmp_path: Path, machine: int, order: str, arch: str
) -> None:
    root = system(tmp_path, machine, order)
    shutil.rmtree(root / "boot")
    image, notes = put(pool, ext4(tmp_path / "d", root, 8 * MIB), said())
    assert image.arch == arch
    assert notes == ["no kernel with an initramfs in /boot: the image boots with its boot loader"]


def test_invalid_kernel_in_the_disk_is_not_extracted(pool: Path, tmp_path: Path) -> None:
    root = system(tmp_path)
    (root / "boot/vmlinuz-6.1.0-10-amd64").write_bytes(b"MZ" * 500)
    image, notes = put(pool, ext4(tmp_path / "d", root, 16 * MIB), said())
    assert (image.kernel, image.initrd, image.cmdline) == (None, None, "")
    assert "is not a kernel: the image boots with its boot loader" in notes[0]


def test_file_names_in_a_disk_are_not_run_as_debugfs_commands(pool: Path, tmp_path: Path) -> None:
    """debugfs takes commands as text: a file's name must not become one."""
    root = system(tmp_path)
    for name in ("vmlinuz-9 x", "vmlinuz-9;quit", 'vmlinuz-9"', "vmlinuz-9\nquit"):
        (root / "boot" / name).write_bytes(b"x")
    image = put(pool, ext4(tmp_path / "d", root, 16 * MIB), said())[0]
    assert image.kernel is not None
    assert image.kernel.read_bytes() == bzimage("6.1.0-10-amd64")


def test_links_in_a_disk_do_not_lead_outside(pool: Path, tmp_path: Path) -> None:
    root = system(tmp_path)
    (root / "usr/lib/os-release").unlink()
    (root / "usr/lib/os-release").symlink_to("/etc/shadow")
    (root / "etc/os-release").symlink_to("../../../../etc/passwd")
    with pytest.raises(Refused, match="add --guest-type, --distro, --arch"):
        put(pool, ext4(tmp_path / "d", root, 16 * MIB), said())


# written by mkfs.xfs, mkfs.btrfs, pvcreate, cryptsetup, mkfs.fat
MARKS = {
    "XFS 'root'": {0: b"XFSB", 108: b"root\0"},
    "Btrfs 'fedora'": {65600: b"_BHRfS_M", 65835: b"fedora\0"},
    "LVM": {512: b"LABELONE"},
    "encrypted (LUKS)": {0: b"LUKS\xba\xbe\0\2"},
    "FAT 'EFI'": {71: b"EFI        FAT32   "},
    "XFS 'a\\x1b[2J\\nb'": {0: b"XFSB", 108: b"a\x1b[2J\nb\0"},
}


@pytest.mark.parametrize("what", MARKS)
def test_unreadable_partition_is_named(pool: Path, tmp_path: Path, what: str) -> None:
    root = tmp_path / "boot"
    root.mkdir()
    disk = ext4(tmp_path / "d", root, 8 * MIB, MIB)
    mbr(disk, MIB, 8 * MIB)
    with disk.open("r+b") as file:
        file.truncate(12 * MIB)
        file.seek(446 + 16)
        file.write(struct.pack("<B3sB3sII", 0, b"", 0x8E, b"", 9 * 2048, 3 * 2048))
        for offset, mark in MARKS[what].items():
            file.seek(9 * MIB + offset)
            file.write(mark)
    found = (
        "no known operating system was found: ext4 without os-release (partition 1), "
        f"{what} (partition 2)"
    )
    with pytest.raises(Refused) as refused:
        put(pool, disk, said())
    assert str(refused.value).endswith(f"{found}: add --guest-type, --distro, --arch")
    assert put(pool, disk)[1] == [found]


def test_disk_without_a_known_system_is_refused(pool: Path, tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(bytes(MIB))
    with pytest.raises(
        Refused, match="no known operating system was found: no known file system: add"
    ):
        put(pool, tmp_path / "d", said(format="raw"))
    subprocess.run(["mkswap", "-q", "-L", "away", tmp_path / "d"], check=True, timeout=180)
    with pytest.raises(Refused, match="no known operating system was found: swap 'away': add"):
        put(pool, tmp_path / "d", said(format="raw"))


def test_boot_from_disk_can_be_requested(pool: Path, tmp_path: Path) -> None:
    disk = ext4(tmp_path / "d", system(tmp_path), 16 * MIB)
    image = put(pool, disk, said(boot="disk"))[0]
    assert (image.kernel, image.cmdline) == (None, "")


ESP, BIOS_BOOT, LINUX = (  # written by gdisk(8) and sfdisk(8)
    uuid.UUID(text).bytes_le
    for text in (
        "c12a7328-f81f-11d2-ba4b-00a0c93ec93b",
        "21686148-6449-6e6f-744e-656564454649",
        "0fc63daf-8483-4772-8e79-3d69d8477de4",
    )
)


def gpt_of(disk: Path, *kinds: bytes) -> Path:
    """Make a disk whose GPT has partitions of these types, of 1 MiB each."""
    with disk.open("wb") as file:
        file.truncate((2 + len(kinds)) * MIB)
    gpt(disk, MIB, MIB)
    with disk.open("r+b") as file:
        for number, kind in enumerate(kinds):
            file.seek(1024 + 128 * number)
            first = (1 + number) * 2048
            file.write(struct.pack("<16s16sQQ", kind, b"u", first, first + 2047))
    return disk


@pytest.mark.parametrize(
    ("kinds", "firmware"),
    [
        ((ESP, LINUX), "efi"),
        ((BIOS_BOOT, ESP, LINUX), None),  # both types, as in Debian's cloud images
        ((LINUX,), None),
    ],
)
def test_firmware_is_detected_from_the_gpt(
    pool: Path, tmp_path: Path, kinds: tuple[bytes, ...], firmware: str | None
) -> None:
    disk = gpt_of(tmp_path / "d.raw", *kinds)
    wishes = said("linux", "tiny", "x86_64", format="raw")
    assert put(pool, disk, wishes)[0].labels.get("firmware") == firmware
    said_of_it = put(pool, disk, {**wishes, "firmware": "bios"}, "said")[0]
    assert said_of_it.labels["firmware"] == "bios", "the detected value overrides the given one"
    (tmp_path / "k").write_bytes(bzimage("own"))
    direct = put(pool, disk, {**wishes, "kernel": str(tmp_path / "k")}, "direct")[0]
    assert "firmware" not in direct.labels, "an image with a kernel needs no firmware"


def test_update_keeps_the_firmware(pool: Path, tmp_path: Path) -> None:
    wishes = said("linux", "tiny", "x86_64", format="raw")
    put(pool, gpt_of(tmp_path / "d.raw", LINUX), {**wishes, "firmware": "efi"})
    (tmp_path / "new.raw").write_bytes(bytes(MIB))
    image = put(pool, tmp_path / "new.raw", said(format="raw"), update=True)[0]
    assert image.labels["firmware"] == "efi"


@pytest.mark.parametrize(
    ("distro", "family"), [("Rocky", "redhat"), ("ubuntu", "debian"), ("tiny", None)]
)
def test_family_of_an_unreadable_disk_follows_from_its_distro(
    pool: Path, tmp_path: Path, distro: str, family: str | None
) -> None:
    """XFS, as in Rocky Linux: by the given name."""
    (tmp_path / "d").write_bytes(bytes(MIB))
    wishes = said("linux", distro, "x86_64", format="raw")
    assert put(pool, tmp_path / "d", wishes)[0].labels.get("family") == family
    labelled = {**wishes, "label.family": "mine"}
    assert put(pool, tmp_path / "d", labelled, "n")[0].labels["family"] == "mine"


def test_unknown_firmware_is_refused(pool: Path, tmp_path: Path) -> None:
    disk = gpt_of(tmp_path / "d.raw", ESP)
    with pytest.raises(Refused, match="firmware=uefi: must be one of bios, efi"):
        put(pool, disk, said("linux", "tiny", "x86_64", firmware="uefi"))
    with pytest.raises(Refused, match="the label firmware=uefi: write bios or efi"):
        put(pool, disk, said("linux", "tiny", "x86_64", {"firmware": "uefi"}))


def test_separate_kernel_is_used(pool: Path, tmp_path: Path) -> None:
    disk = ext4(tmp_path / "d", system(tmp_path), 16 * MIB)
    (tmp_path / "k").write_bytes(bzimage("own"))
    (tmp_path / "i").write_bytes(b"initramfs")
    wishes = said(kernel=tmp_path / "k", initrd=tmp_path / "i", cmdline="root=/dev/vda")
    image = put(pool, disk, wishes)[0]
    assert image.kernel is not None
    assert image.initrd is not None
    assert image.kernel.read_bytes() == bzimage("own")
    assert image.initrd.read_bytes() == b"initramfs"
    assert image.cmdline == "root=/dev/vda"


def test_boot_code_is_not_read_as_a_partition_table(pool: Path, tmp_path: Path) -> None:
    disk = ext4(tmp_path / "d", system(tmp_path), 16 * MIB)
    with disk.open("r+b") as file:
        file.seek(440)
        file.write(b"\xeb" * 70 + b"\x55\xaa")
    assert put(pool, disk, said())[0].distro == "tiny"


def test_elf_file_is_a_kernel_without_a_disk(pool: Path, tmp_path: Path) -> None:
    (tmp_path / "loader.elf").write_bytes(elf())
    wishes = said(guest_type="osv", distro="OSV", cmdline="/hello.so", labels={"a": "b"})
    image = put(pool, tmp_path / "loader.elf", wishes)[0]
    assert image.kernel is not None
    assert (image.disk, image.arch, image.kernel.read_bytes()) == (None, "x86_64", elf())
    assert (image.cmdline, image.labels) == ("/hello.so", {"a": "b"})
    (tmp_path / "i").write_bytes(b"initramfs")
    wishes = said(guest_type="linux", distro="tiny", initrd=tmp_path / "i")
    other = put(pool, tmp_path / "loader.elf", wishes, "other")[0]
    assert other.initrd is not None
    assert other.initrd.read_bytes() == b"initramfs"


def test_kernel_formats_are_recognized() -> None:
    for head in (bzimage(""), elf(), bytes(56) + b"ARM\x64"):
        check_kernel(head)
    for head in (b"", b"MZ", bytes(4096)):
        with pytest.raises(Refused, match="is not a kernel"):
            check_kernel(head)


def test_add_refuses_an_existing_name_and_update_a_missing_one(pool: Path, tmp_path: Path) -> None:
    disk = mbr(ext4(tmp_path / "d", system(tmp_path), 16 * MIB, MIB), MIB, 16 * MIB)
    with pytest.raises(Refused, match="no such image"):
        put(pool, disk, update=True)
    put(pool, disk)
    with pytest.raises(
        Refused, match="image m already exists: replace it with vmgr images update m FILE"
    ):
        put(pool, disk)


def test_update_keeps_unspecified_values(pool: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path, letter in ((one, b"1"), (two, b"2")):
        path.write_bytes(letter * MIB)
        mbr(path, 4096, 8192)
    wishes = said("linux", "tiny", "x86_64", min_ram=77, labels={"a": "1", "b": "2"})
    old = put(pool, one, wishes)[0]
    new = put(pool, two, said(labels={"b": "3"}), update=True)[0]
    assert new.sha256 != old.sha256
    assert (new.distro, new.min_ram_mib, new.labels) == ("tiny", 77, {"a": "1", "b": "3"})
    assert old.disk is not None
    assert old.disk.exists(), "the old version was removed, which starting jobs may use"


def test_progress_is_reported(pool: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(4 * MIB))
    mbr(tmp_path / "f", 4096, 8192)
    told = RecordedProgress()
    add(pool, "m", tmp_path / "f", KNOWN, told)
    assert told.steps == [
        "copying 'f'",
        "looking for an operating system",
        "converting raw to qcow2",
        "checking and hashing",
    ]
    assert (100, 100) in told.parts
    assert all(0 <= done <= total for done, total in told.parts)


def test_large_sparse_disk_costs_only_its_data(pool: Path, tmp_path: Path) -> None:
    """20 GB with 8 MB of data: as cheap as 8 MB with the same data."""
    data = os.urandom(8 * MIB)

    def cost(size: int) -> tuple[int, int]:
        file = tmp_path / f"{size}.raw"
        with file.open("wb") as out:
            out.truncate(size)
            out.write(data[: 4 * MIB])
            out.seek(size - 4 * MIB)
            out.write(data[4 * MIB :])
        mbr(file, 4096, 8192)
        before = transferred()
        image = put(pool, file, name=f"m{size}")[0]
        assert image.disk is not None
        return transferred() - before, image.disk.stat().st_blocks * 512

    small, on_disk = cost(9 * MIB)
    large, large_on_disk = cost(20 * 10**9)
    assert large < small + 32 * MIB, (large, small)
    assert large_on_disk < on_disk + 8 * MIB


@pytest.mark.parametrize("holes", [True, False])
def test_copy_is_equal_with_and_without_copy_file_range(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holes: bool
) -> None:
    file = tmp_path / "f"
    with file.open("wb") as out:
        out.write(os.urandom(100_001))
        out.seek(40 * MIB)
        out.write(os.urandom(17))
        out.truncate(41 * MIB + 3)
    if not holes:

        def refuse(*_: object) -> int:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "copy_file_range", refuse)
    with copying.open_source(file) as source, copying.create_file(tmp_path / "g") as target:
        copying.copy(source, target, pool, lambda *_: None)
    assert (tmp_path / "g").read_bytes() == file.read_bytes()
    assert (tmp_path / "g").stat().st_blocks * 512 < 2 * MIB
